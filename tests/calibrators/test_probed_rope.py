"""RoPE is undone exactly where it can be, and where it cannot the trace says why."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from velox_pack.calibrators import probed_rope
from velox_pack.calibrators.hooks import watch_attention
from velox_pack.calibrators.probed_rope import RopeSpec, find, undo
from velox_pack.calibrators.stream import pairs
from velox_pack.calibrators.trace import trace
from velox_pack.kernels.rope import apply_rope, rope_angles
from zoo import build

KEYS = np.random.default_rng(0).standard_normal((1, 2, 8, 16)).astype(np.float32)

ROPES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {}),
    "plain, large base": ("llama", {"rope_theta": 5e6}),
    "llama3": (
        "llama",
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 256,
            }
        },
    ),
    "linear": ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "yarn": (  # its factor of 1.14 on keys belongs to the keys before RoPE
        "llama",
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 256,
            }
        },
    ),
    "long": (
        "llama",
        {
            "rope_scaling": {
                "type": "longrope",
                "original_max_position_embeddings": 256,
                "short_factor": [1.0] * 8,
                "long_factor": [2.0 + i for i in range(8)],
            }
        },
    ),
    "partial": ("phi", {"partial_rotary_factor": 0.5}),
    "traditional": ("llama", {"rope_traditional": True}),
}


@pytest.mark.parametrize("offset", [0, 7, 700, 30_000, 100_000])
@pytest.mark.parametrize("name", ROPES)
def test_undoing_gives_back_the_key_before_rope(name: str, offset: int) -> None:
    architecture, config = ROPES[name]
    model = build(architecture, **config)
    spec = trace(model)[0].rope
    assert spec is not None
    assert spec.dims == (8 if name == "partial" else 16)
    rope = model.layers[0].self_attn.rope
    with watch_attention(model) as watch:
        after = rope(mx.array(KEYS), offset=offset)
    before = watch.ropes[0].before
    assert mx.abs(undo(after, spec, offset) - before).max().item() < 1e-5
    if name in ("yarn", "long"):
        assert not mx.allclose(before, mx.array(KEYS), atol=1e-2)


def test_probed_and_seen_rotations_are_the_same() -> None:
    """A slice that is turned and put back (gptj), against what the slice was."""
    model = build("gptj")
    spec = trace(model)[0].rope
    assert spec is not None
    attention = model.layers[0].attn
    x = mx.random.normal((1, 32, 64))
    with watch_attention(model) as watch:
        attention(x, mask="causal")
    (call,) = watch.take()
    assert call.rope is None  # keys are no rope's own result
    keys = attention.k_proj(x).reshape(1, 32, 4, 16).transpose(0, 2, 1, 3)
    assert mx.abs(undo(call.keys, spec) - keys).max().item() < 1e-5


@pytest.mark.parametrize(
    ("architecture", "config", "reason"),
    [
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "change with the length"),
        ("hunyuan_v1_dense", {}, "does not commute"),
        ("minicpm3", {}, "last coordinates"),
        ("phi3small", {}, "cannot be traced"),
    ],
)
def test_what_stays_after_rope_says_why(
    architecture: str, config: dict[str, Any], reason: str
) -> None:
    traces = [t for t in trace(build(architecture, **config)) if t.covered]
    assert traces
    for t in traces:
        assert t.rope is None
        assert t.rope_reason is not None
        assert reason in t.rope_reason


def test_probing_leaves_the_model_as_it_was() -> None:
    model = build("gptj")
    mx.eval(model.parameters())
    before = [np.array(a) for a in parameters(model)]
    assert trace(model)[0].rope is not None
    for old, new in zip(before, parameters(model), strict=True):
        np.testing.assert_array_equal(old, np.array(new))


def parameters(model: Any) -> list[mx.array]:
    return [a for _, a in pairs(model)]


SPEC = RopeSpec(8, False, (1.0, 0.3, 0.1, 0.03))


def turned(key: np.ndarray, spec: RopeSpec = SPEC) -> list[tuple[int, mx.array]]:
    """One key [H, D] at 8 positions each from 0 and from 500."""
    found = []
    for start in (0, 500):
        same = mx.broadcast_to(mx.array(key)[None, :, None], (1, *key.shape[:1], 8, key.shape[1]))
        tables = rope_angles(mx.array(spec.inv_freq), mx.arange(start, start + 8))
        found.append((start, apply_rope(same, *tables, spec.traditional)))
    return found


def test_what_is_found_by_looking_at_keys() -> None:
    key = KEYS[0, :, 0]
    other = RopeSpec(8, True, SPEC.inv_freq)
    assert find(turned(key), [other, SPEC]) == (SPEC, None)
    normed = [(s, k / mx.linalg.norm(k, axis=-1, keepdims=True)) for s, k in turned(key)]
    assert find(normed, [SPEC]) == (SPEC, None)
    still = [(s, mx.broadcast_to(k[:, :, :1], k.shape)) for s, k in turned(key)[:1]]
    assert find(still, [SPEC]) == (None, None)
    weights = mx.array(np.linspace(0.5, 1.5, 16, dtype=np.float32))
    spec, reason = find([(s, k * weights) for s, k in normed], [SPEC])
    assert spec is None
    assert "does not commute" in str(reason)
    spec, reason = find([(s, mx.roll(k, -8, -1)) for s, k in turned(key)], [SPEC])
    assert spec is None
    assert "last coordinates" in str(reason)
    spec, reason = find(turned(key), [])  # a rotation of the model's own, not by mx.fast.rope
    assert spec is None
    assert "depend on their position" in str(reason)
    spec, reason = find([(s, k * mx.nan) for s, k in turned(key)], [SPEC])
    assert spec is None
    assert "not finite" in str(reason)


def test_the_tolerance_is_far_from_both_sides() -> None:
    assert probed_rope._TOLERANCE < 0.01
    spec, _ = find(turned(KEYS[0, :, 0], RopeSpec(8, False, (1.0, 0.3, 0.1, 0.031))), [SPEC])
    assert spec is None
