"""Filters find a planted drift of the queries, and predict attention on trained weights."""

from typing import Any

import numpy as np
import pytest
from scipy.stats import spearmanr

from velox_pack.calibrators import qfilters
from velox_pack.calibrators.capture import Moments
from velox_pack.calibrators.stream import Captured
from velox_pack.manifests.errors import CalibrationError


def moments_of(x: np.ndarray) -> Moments:
    return Moments(x.shape[1], x.sum(axis=1), np.swapaxes(x, 1, 2) @ x, np.abs(x).max(axis=1))


def planted(drift: np.ndarray, heads: int = 4) -> np.ndarray:
    noise = np.random.default_rng(0).standard_normal((heads, 2000, len(drift)))
    return noise + 3 * drift


def test_equals_the_singular_vectors_of_the_queries() -> None:
    """From sums and second moments what the paper takes from the SVD of stacked queries."""
    rng = np.random.default_rng(1)
    queries = planted(rng.standard_normal(16) / 4)
    found = qfilters.filters(moments_of(queries), kv_heads=2)
    expected = []
    for head in queries:
        u, _, vt = np.linalg.svd(head, full_matrices=False)
        expected.append(np.sign(u[:, 0].sum()) * vt[0])
    grouped = np.array(expected).reshape(2, 2, 16).mean(axis=1)
    grouped /= np.linalg.norm(grouped, axis=1, keepdims=True)
    np.testing.assert_allclose(found, grouped, atol=1e-9)


def test_a_planted_drift_is_found_with_its_sign() -> None:
    drift = np.zeros(16)
    drift[3] = -1.0
    found = qfilters.filters(moments_of(planted(drift)), kv_heads=4)
    assert np.all(found @ drift > 0.99)
    # Centring would remove the very thing: the top direction of the covariance misses it.
    centred = np.linalg.eigh(moments_of(planted(drift)).covariance)[1][:, :, -1]
    assert np.abs(centred @ drift).max() < 0.7


def test_heads_that_cancel_are_refused() -> None:
    drift = np.zeros(16)
    drift[0] = 1.0
    queries = planted(drift, heads=1)
    both = np.concatenate([queries, -queries])
    with pytest.raises(CalibrationError, match="cancel"):
        qfilters.filters(moments_of(both), kv_heads=1)


def mean_attention(c: Captured) -> np.ndarray:
    """[Hkv, N]: what a key gets from queries after it, averaged over them and over the group."""
    queries, keys = np.array(c.queries), np.array(c.keys)
    n, d = queries.shape[1:]
    grouped = queries.reshape(keys.shape[0], -1, n, d)
    scores = grouped @ np.swapaxes(keys, 1, 2)[:, None] * c.scale
    scores = np.where(np.tril(np.ones((n, n), bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    later = np.tril(np.ones((n, n)), -1)
    return (weights * later).sum(axis=2).mean(axis=1) / np.maximum(later.sum(axis=0), 1)


def test_predicts_attention_on_held_out_text(demo: Any) -> None:
    """+0.70 in FIGURES of the benchmark; key norm and the keys' own first direction must lose."""
    (artifact,) = qfilters.fit(demo.statistics)
    artifact.to_tensors()
    found: dict[str, list[float]] = {"filter": [], "norm": [], "keys": []}

    def hook(c: Captured) -> None:
        keys = np.array(c.keys)[:, 4:-32]
        truth = mean_attention(c)[:, 4:-32]
        layer = demo.statistics[c.layer].keys
        axis = np.linalg.eigh(layer.second)[1][:, :, -1]
        axis *= np.sign((layer.total * axis).sum(axis=1, keepdims=True))
        for h in range(len(keys)):
            direction = artifact.filters[artifact.layers.index(c.layer), h]
            scores = {
                "filter": keys[h] @ direction,
                "norm": -np.linalg.norm(keys[h], axis=1),
                "keys": keys[h] @ axis[h],
            }
            for name, score in scores.items():
                found[name].append(float(spearmanr(score, truth[h]).statistic))

    demo.streaming().run(demo.heldout, hook)
    assert np.mean(found["filter"]) > 0.62
    assert min(found["filter"]) > 0.2  # the sign is right in every head
    assert np.mean(found["norm"]) < 0.3
    assert np.mean(found["keys"]) < 0.3
