"""True attention in blocks is what the whole matrix says, and losses are those of dropped keys."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from velox_pack.calibrators import attention_mass
from velox_pack.calibrators.attention_mass import RATIOS, Collector, Heads, blocks, losses
from velox_pack.calibrators.stream import Captured
from velox_pack.calibrators.trace import LayerTrace
from velox_pack.manifests.errors import CalibrationError

TRACE = LayerTrace(0, "full", heads=4, kv_heads=2, k_dim=8, v_dim=6, scale=0.5, covered=True)


def captured(n: int, mask: Any = "causal", seed: int = 0, **changes: np.ndarray) -> Captured:
    rng = np.random.default_rng(seed)
    arrays = {
        "queries": rng.standard_normal((4, n, 8)),
        "keys": rng.standard_normal((2, n, 8)),
        "values": rng.standard_normal((2, n, 6)),
    } | changes
    parts = {name: mx.array(x.astype(np.float32)) for name, x in arrays.items()}
    return Captured(layer=0, sequence=0, keys_before=None, scale=0.5, mask=mask, **parts)


def whole(c: Captured, allowed: np.ndarray, bias: Any = 0.0) -> np.ndarray:
    """[Hkv, G, N, N]."""
    q, k = np.array(c.queries, np.float64), np.array(c.keys, np.float64)
    scores = q.reshape(2, 2, *q.shape[1:]) @ np.swapaxes(k, 1, 2)[:, None] * c.scale + bias
    scores = np.where(allowed, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def mean_mass(weights: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    later = np.tril(allowed, -1)
    return (weights * later).sum(axis=2).mean(axis=1) / np.maximum(later.sum(axis=0), 1)


@pytest.mark.parametrize("kind", ["causal", "window", "added", "by head"])
def test_equals_the_whole_matrix(kind: str) -> None:
    n = 100  # no multiple of the block
    at = np.arange(n)
    allowed = at[:, None] >= at
    bias: Any = 0.0
    mask: Any = "causal"
    if kind == "window":
        allowed = allowed & (at[:, None] < at + 24)
        mask = mx.array(allowed)
    elif kind == "added":
        mask = mx.array(np.where(allowed, 0, np.finfo(np.float32).min).astype(np.float32))
    elif kind == "by head":
        slope = 0.01 * np.arange(1, 5)[:, None, None] * (at - at[:, None])
        bias = slope.reshape(2, 2, n, n)
        mask = mx.array(np.where(allowed, slope, -np.inf).astype(np.float32))[None]
    c = captured(n, mask)
    collector = Collector([TRACE], 1, window=32)
    collector(c)
    found = collector.done()[0]
    weights = whole(c, allowed, bias)
    np.testing.assert_allclose(found.mean_mass[0], mean_mass(weights, allowed), rtol=2e-5)
    np.testing.assert_allclose(found.by_position, found.mean_mass[0])
    for start, block, _ in blocks(c, 32):
        np.testing.assert_allclose(
            block, weights[:, :, start : start + 32, : start + block.shape[2]], atol=1e-6
        )


def test_losses_are_those_of_attending_to_what_is_kept() -> None:
    rng = np.random.default_rng(1)
    weights = rng.dirichlet(np.ones(30), (2, 3, 5))
    values = rng.standard_normal((2, 30, 4))
    out = weights @ values[:, None]
    rivals, scores = weights[..., 4:24], rng.standard_normal((2, 20))
    budgets = np.array([20, 7, 1])
    lost, error = losses(rivals, values[:, 4:24], out, scores, budgets)
    for h in range(2):
        for k, budget in enumerate(budgets):
            gone = 4 + np.argsort(-scores[h])[budget:]
            kept = np.delete(np.arange(30), gone)
            some = weights[h][..., kept]
            other = (some / some.sum(axis=-1, keepdims=True)) @ values[h, kept]
            wrong = np.square(other - out[h]).sum(axis=-1).mean()
            np.testing.assert_allclose(error[h, k], wrong, atol=1e-12)
            np.testing.assert_allclose(lost[h, k], weights[h][..., gone].sum(axis=-1).mean())


def test_the_oracle_loses_least_and_selectors_are_asked() -> None:
    def by_norm(heads: Heads, start: int) -> np.ndarray:
        assert heads.keys.shape == (2, 256, 8)
        return -np.linalg.norm(heads.keys, axis=-1)

    collector = Collector([TRACE], 2, window=32, selectors={"norm": by_norm}, sample=32)
    for seed in range(2):
        collector(captured(256, seed=seed))
    found = collector.done()[0]
    assert set(found.lost) == set(found.error) == {"oracle", "norm"}
    assert np.all(found.lost["oracle"] <= found.lost["norm"] + 1e-9)
    assert np.all(np.diff(found.lost["norm"], axis=-1) >= 0)
    assert np.all(found.lost["norm"][:, 0] == 0)
    assert found.mean_mass.shape == (2, 2, 256)
    assert found.queries.shape == (4, 32, 8)
    np.testing.assert_allclose(found.pooled.mean(axis=0), np.ones(len(RATIOS)))


def test_a_sink_and_a_concentrated_head_show() -> None:
    """Head 0 looks at few keys and at the first; head 1 at all alike."""
    n = 256
    rng = np.random.default_rng(2)
    keys = 0.01 * rng.standard_normal((2, n, 8))
    keys[0, 0, 0] = 9
    keys[0, rng.choice(np.arange(8, n), 20, replace=False), 0] = 8
    queries = np.zeros((4, n, 8))
    queries[..., 0] = 2
    collector = Collector([TRACE], 1, window=32)
    collector(captured(n, queries=queries, keys=keys))
    found = collector.done()[0]
    assert found.by_position[0, 0] > 10 * found.by_position[1, 0]
    concentrated, diffuse = found.ratio_for(0.9)
    assert concentrated < 0.25
    assert diffuse > 0.7
    assert np.all(found.pooled[0, 2:5] < found.pooled[1, 2:5])


def test_pooled_shares_count_the_best_keys() -> None:
    mass = np.array([[0.5, 0.1, 0.01, 0.01], [0.2, 0.2, 0.2, 0.02]])
    shares = attention_mass.pooled_shares(mass, np.array([4, 2, 1]))
    np.testing.assert_allclose(shares, [[1, 0.5, 1], [1, 1.5, 1]])


def test_too_short_and_unknown_layers() -> None:
    collector = Collector([TRACE], 1, window=64)
    collector(captured(48))
    with pytest.raises(CalibrationError, match="48 tokens are too short"):
        collector.done()
    assert Collector([], 1).done() == {}
    with pytest.raises(CalibrationError, match="window of 0"):
        Collector([TRACE], 1, window=0)
