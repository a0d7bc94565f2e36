"""Second moments of linears' inputs: right, shared, and of one layer at a time."""

import gc
import weakref
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from velox_pack.calibrators.capture import capture
from velox_pack.calibrators.linear_inputs import InputMoment, _Sums
from velox_pack.calibrators.stream import StreamingForward
from velox_pack.calibrators.trace import trace
from velox_pack.manifests.errors import CalibrationError
from velox_pack.source import Source, resolve

TOKENS = np.random.default_rng(0).integers(0, 256, (3, 32)).astype(np.int32)


def moments_of(source: Source) -> list[InputMoment]:
    found: list[InputMoment] = []
    StreamingForward(source.skeleton(), source.weights).run(TOKENS, on_linear=found.append)
    return found


def short(moment: InputMoment) -> tuple[str, ...]:
    return tuple(path.rpartition(".")[2] for path in moment.paths)


def direct(source: Source) -> dict[str, np.ndarray]:
    """What the linears of each layer read, [3, 32, in], from the model's parts by hand."""
    model = source.skeleton()
    model.load_weights(list(source.weights().items()))
    model.set_dtype(mx.float32)
    read: dict[str, mx.array] = {}
    h = model.model.embed_tokens(mx.array(TOKENS))
    for i, layer in enumerate(model.layers):
        read[f"{i} q_proj"] = x = layer.input_layernorm(h)
        attended = layer.self_attn(x, "causal", None)
        read[f"{i} gate_proj"] = y = layer.post_attention_layernorm(h + attended)
        gate = layer.mlp.gate_proj(y)
        read[f"{i} down_proj"] = gate * mx.sigmoid(gate) * layer.mlp.up_proj(y)
        h = layer(h, "causal", None)
    return {name: np.array(a).astype(np.float64) for name, a in read.items()}


@pytest.mark.parametrize("trained", [False, True])
def test_moments_are_those_of_the_inputs(tiny_model: Any, trained: bool) -> None:
    source = resolve("demo" if trained else str(tiny_model("llama")))
    expected = direct(source)
    found = {f"{m.layer} {short(m)[0]}": m for m in moments_of(source)}
    assert set(expected) < set(found)
    for name, x in expected.items():
        moment, rows = found[name], x.reshape(-1, x.shape[-1])
        second = rows.T @ rows / len(rows)
        assert moment.count == len(rows) == TOKENS.size
        np.testing.assert_allclose(moment.second, second, atol=2e-5 * np.abs(second).max())
        np.testing.assert_allclose(moment.mean, rows.mean(axis=0), atol=1e-4)
        np.testing.assert_array_equal(moment.second, moment.second.T)
        assert moment.second.dtype == np.float32


def test_linears_that_read_the_same_share_one(tiny_model: Any) -> None:
    llama = moments_of(resolve(str(tiny_model("llama"))))
    groups = [("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)]
    assert [(m.layer, {*short(m)}) for m in llama] == [(i, {*g}) for i in range(3) for g in groups]
    assert llama[0].paths[0].startswith("model.layers.0.self_attn.")
    fused = moments_of(resolve(str(tiny_model("phi3"))))
    assert [short(m) for m in fused[:4]] == [
        ("qkv_proj",),
        ("o_proj",),
        ("gate_up_proj",),
        ("down_proj",),
    ]
    packed = moments_of(resolve(str(tiny_model("llama", quantize=(4, 64)))))
    assert [m.paths for m in packed] == [m.paths for m in llama]


def test_experts_share_one_over_all_that_are_routed_to_them(tiny_model: Any) -> None:
    found = {short(m): m for m in moments_of(resolve(str(tiny_model("mixtral")))) if m.layer == 1}
    (experts,) = (m for names, m in found.items() if {*names} == {"gate_proj", "up_proj"})
    router = found[("gate",)]
    assert experts.count == 2 * TOKENS.size  # two experts for each token
    np.testing.assert_allclose(experts.second, router.second, atol=1e-5)
    assert found[("down_proj",)].second.shape == (256, 256)


def test_one_layers_moments_are_alive_while_its_weights_are(tiny_model: Any) -> None:
    source = resolve(str(tiny_model("llama")))
    model = source.skeleton()
    earlier: list[tuple[int, weakref.ref[np.ndarray]]] = []
    filled: list[list[int]] = []

    def pack(moment: InputMoment) -> None:
        gc.collect()
        assert all(ref() is None for _, ref in earlier)  # handed out one by one, each dropped
        base = moment.second if moment.second.base is None else moment.second.base
        assert isinstance(base, np.ndarray)
        earlier.append((moment.layer, weakref.ref(base)))
        sizes = [sum(a.size for _, a in tree_flatten(layer.parameters())) for layer in model.layers]
        filled.append([i for i, size in enumerate(sizes) if size])
        assert filled[-1] == [moment.layer]

    StreamingForward(model, source.weights).run(TOKENS, on_linear=pack)
    assert [layer for layer, _ in earlier] == [0] * 4 + [1] * 4 + [2] * 4


def test_the_same_pass_captures_and_gives_the_same_bytes(tiny_model: Any) -> None:
    source = resolve(str(tiny_model("qwen3")))
    traces = trace(source.skeleton())
    first, second = [], moments_of(source)
    streaming = StreamingForward(source.skeleton(), source.weights)
    assert len(capture(streaming, TOKENS, traces, on_linear=first.append)) == 3
    for a, b in zip(first, second, strict=True):
        assert a.paths == b.paths
        assert a.second.tobytes() == b.second.tobytes()


def test_an_input_that_overflows_is_named(tiny_model: Any) -> None:
    source = resolve(str(tiny_model("llama")))

    def huge() -> dict[str, mx.array]:
        weights = {n: a.astype(mx.float32) for n, a in source.weights().items()}
        for name in ("gate_proj", "up_proj"):
            weights[f"model.layers.1.mlp.{name}.weight"] *= 1e25
        return weights

    streaming = StreamingForward(source.skeleton(), huge)
    with pytest.raises(
        CalibrationError, match=r"layer 1: input of model.layers.1.mlp.down_proj: .*NaN or inf"
    ):
        streaming.run(TOKENS, on_linear=lambda moment: None)


@pytest.mark.parametrize("width", [1, 33, 1100])  # within a block, and over several
def test_sums_of_any_width(width: int) -> None:
    rng = np.random.default_rng(width)
    parts = [rng.standard_normal((n, width)).astype(np.float32) + 0.5 for n in (7, 40)]
    sums = _Sums(width)
    for part in parts:
        sums.add(part)
    mean, second = sums.done()
    x = np.concatenate(parts).astype(np.float64)
    np.testing.assert_allclose(mean, x.mean(axis=0), atol=1e-6)
    np.testing.assert_allclose(second, x.T @ x / len(x), atol=1e-5)
    np.testing.assert_array_equal(second, second.T)
