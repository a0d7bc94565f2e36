"""What heads have in common, against capture's own moments of each head."""

from typing import Any

import numpy as np
import pytest

from velox_pack.calibrators import joint
from velox_pack.calibrators.capture import capture
from velox_pack.calibrators.stream import StreamingForward
from velox_pack.calibrators.trace import trace
from velox_pack.manifests.errors import CalibrationError
from velox_pack.source import resolve


def test_diagonal_blocks_are_each_heads_own(demo: Any) -> None:
    collector = joint.collect(demo.streaming(), demo.tokens, demo.traces)
    for part in ("keys", "values"):
        found = collector.done(part)
        assert list(found) == [t.index for t in demo.traces]
        for layer, own in found.items():
            moments, _ = demo.statistics[layer].part(part)
            assert own.group == 2
            assert own.before_rope == (part == "keys")
            assert own.moments.count == moments.count
            np.testing.assert_allclose(own.moments.total.reshape(2, 64), moments.total)
            for h in range(2):
                at = slice(64 * h, 64 * h + 64)
                np.testing.assert_allclose(own.moments.second[0, at, at], moments.second[h])
            np.testing.assert_allclose(np.trace(own.directions[0]), 1)
            assert own.sample.shape == (1, 4 * 128, 128)


def test_directions_do_not_see_length() -> None:
    x = np.random.default_rng(0).standard_normal((1, 500, 6))
    longer = x * np.geomspace(1, 100, 500)[None, :, None]
    np.testing.assert_allclose(joint.unit_moment(x), joint.unit_moment(longer))
    assert np.all(np.isfinite(joint.unit_moment(np.zeros((1, 3, 4)))))


def test_grouping_and_its_inverse() -> None:
    x = np.arange(4 * 3 * 2).reshape(4, 3, 2)
    together = joint.grouped(x, 2)
    assert together.shape == (2, 3, 4)
    np.testing.assert_array_equal(together[1, 2], [*x[2, 2], *x[3, 2]])
    np.testing.assert_array_equal(joint.ungrouped(together, 2), x)


@pytest.mark.parametrize(
    ("heads", "dim", "expected"),
    [(3, 64, 3), (8, 64, 4), (8, 128, 2), (1, 256, 1), (4, 512, 1), (6, 80, 3), (7, 64, 1)],
)
def test_groups_are_as_large_as_is_sensible(heads: int, dim: int, expected: int) -> None:
    assert joint.group_of(heads, dim) == expected


def test_layers_of_all_kinds(tiny_model: Any) -> None:
    """Sliding layers, and layers without RoPE, whose keys are taken as they are."""
    tokens = np.random.default_rng(0).integers(1, 90, (2, 64)).astype(np.int32)
    for architecture in ("gemma3_text", "cohere2"):
        source = resolve(str(tiny_model(architecture)))
        traces = trace(source.skeleton())
        streaming = StreamingForward(source.skeleton(), source.weights)
        statistics = capture(streaming, tokens, traces)
        streaming = StreamingForward(source.skeleton(), source.weights)
        found = joint.collect(streaming, tokens, traces, 1).done("keys")
        for layer, own in found.items():
            assert own.before_rope == statistics[layer].rotated
            wanted = statistics[layer].keys_before.second
            np.testing.assert_allclose(own.moments.second, wanted, rtol=1e-6)


def test_bad_input_is_one_line(demo: Any) -> None:
    with pytest.raises(CalibrationError, match="2 KV heads are no groups of 3"):
        joint.Collector(demo.traces, 3)
    with pytest.raises(CalibrationError, match="no layer"):
        joint.collect(demo.streaming(), demo.tokens, [])
