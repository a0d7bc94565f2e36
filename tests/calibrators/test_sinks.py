"""Telling tokens that collect attention by a length."""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from token_samples import of_demo, rows_of, same_bytes
from velox_pack.calibrators import sinks
from velox_pack.calibrators.sinks import LayerMass
from velox_pack.calibrators.stream import Captured
from velox_pack.manifests.artifacts_channels import STATISTICS
from velox_pack.manifests.errors import CalibrationError

PLACES = [(0, 50), (1, 90), (2, 33)]


def planted(statistic: str | None) -> dict[int, LayerMass]:
    """Three tokens hold a third of the attention; their keys or values are short or long."""
    rng = np.random.default_rng(0)
    keys, values = np.exp(0.1 * rng.standard_normal((2, 4, 2, 200))) * 7
    mass = np.full((4, 200), 0.004, np.float32)
    for s, p in PLACES:
        mass[s, p] = 0.33
        if statistic is not None:
            lengths = keys if statistic.endswith("keys") else values
            lengths[s, :, p] *= 0.3 if statistic.startswith("short") else 3
    return {5: LayerMass(5, mass, keys, values, np.arange(200, 0, -1))}


@pytest.mark.parametrize("statistic", STATISTICS[1:])
def test_planted_tokens_are_told_by_what_tells_them(statistic: str) -> None:
    masses = planted(statistic)
    (found,) = sinks.fit(masses)
    assert STATISTICS[found.statistic[0]] == statistic
    assert found.recall[0] == 1
    assert found.false_positives[0] <= sinks.TOLERATED
    own = masses[5]
    for s, p in PLACES:
        rng = np.random.default_rng(s)
        k, v = (
            x / np.linalg.norm(x, axis=-1, keepdims=True) * lengths[s][..., None]
            for x, lengths in zip(
                rng.standard_normal((2, 2, 200, 8)), (own.keys, own.values), strict=True
            )
        )
        called = np.flatnonzero(sinks.is_sink(found, 0, k, v))
        assert p in called  # the first tokens, which naive protection keeps, are none
        assert len(called) <= 4


def test_nothing_is_told_by_lengths_that_tell_nothing() -> None:
    (found,) = sinks.fit(planted(None))
    assert found.statistic.tolist() == [0]
    assert found.mass[0] > 0.1
    assert not sinks.is_sink(found, 0, np.ones((2, 9, 8)), np.ones((2, 9, 8))).any()


@pytest.mark.parametrize("window", [None, 40])
def test_attention_is_that_of_the_whole_matrix(window: int | None) -> None:
    rng = np.random.default_rng(0)
    n = 300  # more than one block
    q, k, v = (mx.array(rng.standard_normal((h, n, 16)).astype(np.float32)) for h in (4, 2, 2))
    at = np.arange(n)
    visible = at[:, None] >= at[None]
    if window:
        visible &= at[:, None] - at[None] < window
    mask = "causal" if window is None else mx.array(visible)
    total, seen = sinks.attention_received(Captured(0, 0, q, k, v, None, 0.25, mask))
    scores = np.einsum("hgqd,hkd->hgqk", np.array(q).reshape(2, 2, n, 16), np.array(k)) * 0.25
    weights = np.exp(np.where(visible, scores, -np.inf))
    weights /= weights.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(total, weights.mean(axis=(0, 1)).sum(axis=0), rtol=1e-4)
    np.testing.assert_array_equal(seen, visible.sum(axis=0))


def test_trained_sinks_are_short_and_hold_on_held_out_text(demo: Any) -> None:
    _, held, masses = of_demo(demo)
    found = sinks.fit(masses)
    assert same_bytes(found, sinks.fit(masses))
    rows = rows_of(found)
    a, n = rows[4]
    assert STATISTICS[a.statistic[n]].startswith("short")
    assert a.mass[n] > 0.02
    assert a.recall[n] > 0.7
    assert a.false_positives[n] <= sinks.TOLERATED
    called = sinks.is_sink(a, n, held[4].keys, held[4].values)
    assert 0 < called.mean() < 0.05
    assert rows[1][0].statistic[rows[1][1]] == 0


def test_short_sequences() -> None:
    with pytest.raises(CalibrationError, match="longer"):
        sinks.fit({0: replace(planted("short keys")[5], seen=np.full(200, 20))})
