"""Statistics are those of the tokens they claim, and the sample covers heads and positions."""

from typing import Any

import numpy as np
import pytest

from velox_pack.calibrators.capture import capture, sample_positions
from velox_pack.calibrators.stream import Captured, StreamingForward
from velox_pack.calibrators.trace import trace
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
