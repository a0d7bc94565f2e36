"""Reports say what is planted: a drift of the queries, isotropic queries, keys' norms of no use."""

import json
from dataclasses import asdict

import mlx.core as mx
import numpy as np
import pytest

from velox_pack.calibrators import attention_mass, filter_report, qfilters
from velox_pack.calibrators.capture import LayerStatistics, Moments, sample_positions
from velox_pack.calibrators.stream import Captured
from velox_pack.calibrators.trace import LayerTrace
from velox_pack.manifests.errors import CalibrationError

D, N, SEQUENCES = 16, 256, 3
TRACE = LayerTrace(0, "full", heads=4, kv_heads=2, k_dim=D, v_dim=D, scale=0.25, covered=True)


def moments(x: np.ndarray) -> Moments:
    return Moments(x.shape[1], x.sum(axis=1), np.swapaxes(x, 1, 2) @ x, np.abs(x).max(axis=1))


def planted(drift: float, length: int = N) -> tuple[LayerStatistics, attention_mass.AttentionMass]:
    rng = np.random.default_rng(0)
    axis = np.linalg.qr(rng.standard_normal((D, D)))[0]
    queries = 0.5 * rng.standard_normal((SEQUENCES, 4, length, D)) + drift * axis[0]
    # What carries the keys' norm and their first direction is nothing that queries look for.
    keys = rng.standard_normal((SEQUENCES, 2, length, D))
    keys = keys + 5 * rng.standard_normal((SEQUENCES, 2, length, 1)) * axis[1]
    collector = attention_mass.Collector([TRACE], SEQUENCES, window=32)
    for s in range(SEQUENCES):
        parts = {
            "queries": queries[s],
            "keys": keys[s],
            "values": rng.standard_normal((2, length, D)),
        }
        arrays = {name: mx.array(x.astype(np.float32)) for name, x in parts.items()}
        collector(
            Captured(layer=0, sequence=s, keys_before=None, scale=0.25, mask="causal", **arrays)
        )
    at = sample_positions(SEQUENCES, length, 2, skip_first=4, sample=300, seed=(0,))
    sample = np.concatenate(
        [np.take_along_axis(k, p[:, :, None], axis=1) for k, p in zip(keys, at, strict=True)],
        axis=1,
    ).astype(np.float32)

    def flat(x: np.ndarray) -> Moments:
        return moments(x.transpose(1, 0, 2, 3).reshape(x.shape[1], -1, D))

    per = at.shape[2]
    statistics = LayerStatistics(
        index=0, rotated=False, queries=flat(queries), keys=flat(keys), keys_before=flat(keys),
        values=flat(keys), sample_keys=sample, sample_keys_before=sample, sample_values=sample,
        sample_sequences=np.broadcast_to(np.repeat(np.arange(SEQUENCES), per), sample.shape[:2]),
        sample_positions=at.transpose(1, 0, 2).reshape(2, -1),
    )  # fmt: skip
    return statistics, collector.done()[0]


def test_a_drift_shows_and_key_norm_loses() -> None:
    statistics, mass = planted(3.0)
    filters = qfilters.fit({0: statistics})
    (report,) = filter_report.fit(filters, {0: statistics}, {0: mass})
    report.to_tensors()
    assert report.layers == (0,)
    assert report.correlation.min() > 0.6
    assert np.abs(report.correlation_norm).max() < 0.4
    assert np.abs(report.correlation_keys).max() < 0.4
    assert report.positive.min() > 0.97
    np.testing.assert_allclose(report.projection, 3, rtol=0.1)
    assert report.anisotropy.min() > 4
    heads = filter_report.heads_of(report)
    assert [(h.layer, h.head) for h in heads] == [(0, 0), (0, 1)]
    assert json.loads(json.dumps([asdict(h) for h in heads]))[1]["positive"] > 0.97


def test_queries_without_a_drift_say_so() -> None:
    statistics, mass = planted(0.02)
    (report,) = filter_report.fit(qfilters.fit({0: statistics}), {0: statistics}, {0: mass})
    assert np.all(report.anisotropy < 1.5)
    assert np.all(report.second < 1.3)
    assert np.all(report.positive < 0.8)
    assert np.all(report.projection < 0.2)


def test_spearman_is_scipys() -> None:
    from scipy.stats import spearmanr

    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 9, (3, 40)), rng.standard_normal((3, 40))
    wanted = [spearmanr(x, y).statistic for x, y in zip(a, b, strict=True)]
    np.testing.assert_allclose(filter_report.spearman(a, b), wanted)
    assert filter_report.spearman(np.ones(5), np.arange(5)) == 0


def test_too_few_keys_that_are_followed() -> None:
    statistics, mass = planted(3.0, length=40)
    with pytest.raises(CalibrationError, match="layer 0: too few sampled keys"):
        filter_report.fit(qfilters.fit({0: statistics}), {0: statistics}, {0: mass})
