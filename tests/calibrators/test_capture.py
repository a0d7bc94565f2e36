"""Statistics are those of the tokens they claim, and the sample covers heads and positions."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import mlx.core as mx
import numpy as np
import pytest

from velox_pack.calibrators import spectral
from velox_pack.calibrators.capture import LayerStatistics, capture, sample_positions
from velox_pack.calibrators.stream import Captured, Hook, StreamingForward
from velox_pack.calibrators.trace import LayerTrace, trace
from velox_pack.manifests.errors import CalibrationError
from velox_pack.source import resolve

TOKENS = np.random.default_rng(0).integers(0, 256, (3, 48)).astype(np.int32)


def test_moments_are_those_of_all_tokens_but_the_first(tiny_model: Any) -> None:
    source = resolve(str(tiny_model("llama", anisotropic=True)))
    traces = trace(source.skeleton())
    streaming = StreamingForward(source.skeleton(), source.weights)
    seen: list[Captured] = []
    streaming.run(TOKENS, seen.append)
    layer = capture(streaming, TOKENS, traces, skip_first=4, sample=30)[1]
    mine = [c for c in seen if c.layer == 1]
    for moments, name, skip in (
        (layer.queries, "queries", 0),
        (layer.keys, "keys", 4),
        (layer.keys_before, "keys_before", 4),
        (layer.values, "values", 4),
    ):
        x = np.concatenate([np.array(getattr(c, name))[:, skip:] for c in mine], axis=1)
        wide = x.astype(np.float64)
        assert moments.count == 3 * (48 - skip)
        np.testing.assert_allclose(moments.mean, wide.mean(axis=1), atol=1e-12)
        np.testing.assert_array_equal(moments.largest, np.abs(x).max(axis=1))
        for h in range(len(x)):
            np.testing.assert_allclose(
                moments.covariance[h], np.cov(wide[h].T, bias=True), atol=1e-10
            )
    assert layer.rotated
    for h in range(2):
        for s in range(layer.sample_keys.shape[1]):
            c = mine[layer.sample_sequences[h, s]]
            p = layer.sample_positions[h, s]
            np.testing.assert_array_equal(layer.sample_keys[h, s], np.array(c.keys)[h, p])
            np.testing.assert_array_equal(layer.sample_values[h, s], np.array(c.values)[h, p])
            assert c.keys_before is not None
            before = np.array(c.keys_before)[h, p]
            np.testing.assert_array_equal(layer.sample_keys_before[h, s], before)


def test_layers_without_rope_are_before_and_after_alike(tiny_model: Any) -> None:
    source = resolve(str(tiny_model("cohere2")))
    streaming = StreamingForward(source.skeleton(), source.weights)
    statistics = capture(streaming, TOKENS, trace(source.skeleton()))
    assert [statistics[i].rotated for i in range(4)] == [True, True, True, False]
    assert statistics[3].keys_before is statistics[3].keys


def test_twice_the_same_bytes(tiny_model: Any) -> None:
    source = resolve(str(tiny_model("gemma3_text")))
    traces = trace(source.skeleton())
    first, second = (
        capture(StreamingForward(source.skeleton(), source.weights), TOKENS, traces, seed=3)
        for _ in range(2)
    )
    for i in first:
        assert first[i].keys_before.second.tobytes() == second[i].keys_before.second.tobytes()
        assert first[i].sample_values.tobytes() == second[i].sample_values.tobytes()


def test_the_sample_is_stratified_over_sequences_and_positions() -> None:
    positions = sample_positions(8, 512, 3, skip_first=4, sample=1024, seed=(0, 5))
    assert positions.shape == (8, 3, 128)
    assert positions.min() >= 4
    assert positions.max() < 512
    assert np.all(np.diff(positions, axis=-1) > 0)  # no token twice
    share = np.mean(positions > 512 * 3 // 4, axis=(0, 2))  # late rows, in every head
    np.testing.assert_allclose(share, 0.25, atol=0.02)
    assert not np.array_equal(positions[:, 0], positions[:, 1])  # heads have tokens of their own
    everything = sample_positions(2, 20, 1, skip_first=4, sample=1000, seed=(0, 0))
    np.testing.assert_array_equal(everything[0, 0], np.arange(4, 20))


DIRECTION = np.linalg.qr(np.random.default_rng(9).standard_normal((16, 16)))[0][:, 0]
PLANTED = LayerTrace(0, "full", heads=2, kv_heads=2, k_dim=16, v_dim=16, routed=True, covered=True)


def planted(where: Callable[[np.ndarray], None]) -> LayerStatistics:
    """What is captured of noise with long vectors along DIRECTION wherever `where` marks a 1.

    `where` is given zeros [2 heads, 256 tokens] to write to; there are 4 sequences.
    """

    class Stream:
        def run(self, tokens: np.ndarray, hook: Hook, **_rest: Any) -> mx.array:
            rng = np.random.default_rng(1)
            for b, row in enumerate(tokens):
                marks = np.zeros((2, len(row)))
                where(marks)
                x = 0.3 * rng.standard_normal((2, len(row), 16))
                along = 6 * rng.standard_normal((2, len(row)))
                x += (marks * along)[:, :, None] * DIRECTION
                noise = mx.array(rng.standard_normal(x.shape).astype(np.float32))
                values = mx.array(x.astype(np.float32))
                hook(Captured(0, b, noise, noise, values, None, 0.25, "causal"))
            return mx.zeros(1)

    tokens = np.zeros((4, 256), np.int32)
    return capture(cast(StreamingForward, Stream()), tokens, [PLANTED], sample=128)[0]


def late(marks: np.ndarray) -> None:
    marks[:, 224:] = 1


def odd_head(marks: np.ndarray) -> None:
    marks[1] = 1


def range_of(statistics: LayerStatistics) -> tuple[float, float]:
    """Shortest and longest norm of values that the fitted 8-bit codes can tell apart."""
    ((low, step),) = spectral.fit({0: statistics}, "values")[0].log_norm
    return float(np.exp(low)), float(np.exp(low + 255 * step))


def test_late_rows_count() -> None:
    found = planted(late)
    basis = spectral.fit({0: found}, "values")[0].basis[0].astype(np.float64)
    assert np.all(np.abs(basis[:, :, 0] @ DIRECTION) > 0.98)
    early = found.sample_positions < 224
    longest = np.linalg.norm(found.sample_values, axis=-1)[~early].max()
    assert range_of(found)[1] > longest > 6
    first = np.stack([x[m][:80] for x, m in zip(found.sample_values, early, strict=True)])
    naive = replace(found, sample_values=first)  # as from the first rows of each sequence
    assert range_of(naive)[1] < longest


def test_odd_heads_count() -> None:
    found = planted(odd_head)
    fitted = spectral.fit({0: found}, "values")[0]
    along = np.abs(fitted.basis[0, :, :, 0].astype(np.float64) @ DIRECTION)
    assert along[1] > 0.98
    assert along[0] < 0.9
    assert fitted.variance[0, 1, 0] > 100 * fitted.variance[0, 0, 0]
    longest = np.linalg.norm(found.sample_values[1], axis=-1).max()
    assert range_of(found)[1] > longest
    naive = replace(found, sample_values=found.sample_values[[0, 0]])  # as if heads were alike
    assert range_of(naive)[1] < longest


def test_bad_input_is_one_line(tiny_model: Any) -> None:
    source = resolve(str(tiny_model("llama")))
    streaming = StreamingForward(source.skeleton(), source.weights)
    traces = trace(source.skeleton())
    with pytest.raises(CalibrationError, match="too short"):
        capture(streaming, TOKENS[:, :8], traces)
    with pytest.raises(CalibrationError, match="shape"):
        capture(streaming, TOKENS[0], traces)
    with pytest.raises(CalibrationError, match="no layer"):
        capture(streaming, TOKENS, [])
