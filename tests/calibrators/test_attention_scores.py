"""Fitted filters and Expected Attention on planted queries, where the right answer is known."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from velox_pack.calibrators import attention_filter, expected_attention
from velox_pack.calibrators.attention_mass import blocks
from velox_pack.calibrators.filter_report import spearman
from velox_pack.calibrators.probed_rope import RopeSpec
from velox_pack.calibrators.stream import Captured
from velox_pack.calibrators.trace import LayerTrace
from velox_pack.kernels import apply_rope, rope_angles
from velox_pack.manifests.errors import CalibrationError

D, N = 16, 320
INV = (1.0, 0.3, 0.1, 0.03)  # half of the coordinates are turned


def trace(traditional: bool = False, rope: bool = True) -> LayerTrace:
    spec = RopeSpec(8, traditional, INV) if rope else None
    return LayerTrace(
        0, "full", heads=4, kv_heads=2, k_dim=D, v_dim=D, scale=0.25, rope=spec, covered=True
    )


def turned(x: np.ndarray, t: LayerTrace, start: int = 0) -> np.ndarray:
    if t.rope is None:
        return x
    tables = rope_angles(mx.array(t.rope.inv_freq), mx.arange(start, start + x.shape[1]))
    return np.array(apply_rope(mx.array(x.astype(np.float32))[None], *tables, t.rope.traditional))[
        0
    ]


def planted(t: LayerTrace, seed: int, spread: float = 0.3) -> Captured:
    """Queries drift along one axis before RoPE; norms of keys are large off that axis."""
    axis = np.random.default_rng(9).standard_normal(D) / 2
    rng = np.random.default_rng(seed)
    queries = spread * rng.standard_normal((4, N, D)) + 2 * axis
    keys = rng.standard_normal((2, N, D)) * (1 + rng.random((2, N, 1)))
    parts = {
        "queries": turned(queries, t),
        "keys": turned(keys, t),
        "values": rng.standard_normal((2, N, D)),
    }
    arrays = {name: mx.array(x.astype(np.float32)) for name, x in parts.items()}
    before = mx.array(keys.astype(np.float32))
    return Captured(layer=0, sequence=seed, keys_before=before, scale=0.25, mask="causal", **arrays)


def calibrated(t: LayerTrace, collector: Any) -> Any:
    for seed in range(3):
        collector(planted(t, seed))
    return collector


def truth(c: Captured, start: int = 256) -> tuple[np.ndarray, np.ndarray]:
    """Keys before `start`, and log of the mass that they get from the next 64 queries."""
    weights = next(w for s, w, _ in blocks(c, 64) if s == start)
    return np.array(c.keys)[:, 4:start], np.log(weights[..., 4:start].mean(axis=(1, 2)))


@pytest.mark.parametrize(
    "t", [trace(), trace(traditional=True), trace(rope=False)], ids=["halves", "pairs", "none"]
)
def test_scores_predict_attention_and_the_norm_does_not(t: LayerTrace) -> None:
    filters = calibrated(t, attention_filter.Collector([t]))
    moments = calibrated(t, expected_attention.Collector([t]))
    (paper,) = expected_attention.fit(moments)
    weights = calibrated(t, expected_attention.Weigher([paper])).weights()
    (weighted,) = expected_attention.fit(moments, weights=weights)
    keys, log_mass = truth(planted(t, 7))
    found = {"norm": -np.linalg.norm(keys, axis=-1)}
    for frame in attention_filter.FRAMES:
        (made,) = attention_filter.fit(filters, frame)
        made.to_tensors()
        direction = made.filters[0]
        if frame == "moving":
            direction = attention_filter.turn(direction, t, 256 + made.lead)
        found[frame] = attention_filter.score(keys, direction, made.norm[0])
    for name, artifact in (("paper", paper), ("weighted", weighted)):
        artifact.to_tensors()
        found[name] = expected_attention.score(artifact, 0, keys, 256)
    rho = {name: float(spearman(score, log_mass).mean()) for name, score in found.items()}
    assert rho["norm"] < 0.5
    assert min(rho["moving"], rho["paper"], rho["weighted"]) > 0.9
    assert rho["fixed"] > 0.4
    if t.rope is not None:  # what turns cannot be foreseen from one place
        assert rho["moving"] > rho["fixed"]


def test_expected_attention_is_the_gaussians_expectation() -> None:
    """Without RoPE, one query head a KV head, full rank: the log of E exp(q . k / sqrt d)."""
    t = LayerTrace(0, "full", heads=2, kv_heads=2, k_dim=4, v_dim=4, scale=0.5, covered=True)
    rng = np.random.default_rng(0)
    queries = rng.standard_normal((2, 100_000, 4)) @ rng.standard_normal((2, 4, 4)) + 0.5
    zeros = mx.zeros((2, 1, 4))
    collector = expected_attention.Collector([t], skip_first=0)
    collector(Captured(0, 0, mx.array(queries.astype(np.float32)), zeros, zeros, None, 0.5, None))
    (artifact,) = expected_attention.fit(collector, rank=4)
    keys = rng.standard_normal((2, 30, 4)) / 3
    score = expected_attention.score(artifact, 0, keys, 30)
    expected = np.exp(0.5 * keys @ np.swapaxes(queries, 1, 2)).mean(axis=-1)
    np.testing.assert_allclose(score, np.log(expected / expected.sum(1, keepdims=True)), atol=0.01)


def test_terms_average_over_the_coming_positions() -> None:
    t = trace(traditional=True)
    (artifact,) = expected_attention.fit(
        calibrated(t, expected_attention.Collector([t])), horizon=7, rank=3
    )
    keys = np.random.default_rng(1).standard_normal((2, 5, D))
    linear, square, norm = expected_attention.terms(artifact, 0, keys, 40)
    mean = np.stack([turned(artifact.mean[0][:, None], t, 40 + i)[:, 0] for i in range(7)]).mean(0)
    wanted = np.einsum("hgd,hnd->hgn", mean.reshape(2, 2, D), keys) * 0.25
    np.testing.assert_allclose(linear, wanted, atol=1e-5)
    assert artifact.factor.shape == (1, 4, D, 3)
    assert np.all(square >= 0)
    np.testing.assert_allclose(norm[:, 0], np.linalg.norm(keys, axis=-1))


def test_moments_are_those_before_rope() -> None:
    """The same queries with and without RoPE give the same mean and covariance."""
    with_rope, without = trace(), trace(rope=False)
    a = calibrated(with_rope, expected_attention.Collector([with_rope])).sums[0]
    b = calibrated(without, expected_attention.Collector([without])).sums[0]
    assert a[0] == b[0] == 3 * (N - 4)
    np.testing.assert_allclose(a[1], b[1], rtol=1e-4, atol=1e-2)
    np.testing.assert_allclose(a[2], b[2], rtol=1e-3, atol=0.05)


def test_the_same_text_gives_the_same_bytes() -> None:
    t = trace()

    def fitted() -> list[bytes]:
        filters = calibrated(t, attention_filter.Collector([t]))
        moments = calibrated(t, expected_attention.Collector([t]))
        (paper,) = expected_attention.fit(moments)
        weights = calibrated(t, expected_attention.Weigher([paper])).weights()
        made: list[Any] = [*attention_filter.fit(filters, "moving"), paper]
        made += expected_attention.fit(moments, weights=weights)
        return [x.tobytes() for a in made for x in a.to_tensors().values()]

    assert fitted() == fitted()


def test_ridge_regression_is_least_squares() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 50, 5)), rng.standard_normal((2, 50))
    found = attention_filter.solve(np.swapaxes(x, 1, 2) @ x, np.einsum("hnd,hn->hd", x, y), 1e-12)
    for h in range(2):
        np.testing.assert_allclose(found[h], np.linalg.lstsq(x[h], y[h])[0], rtol=1e-4)


def test_bad_input() -> None:
    t = trace()
    collector = attention_filter.Collector([t])
    with pytest.raises(CalibrationError, match="no block of queries"):
        attention_filter.fit(collector, "moving")
    with pytest.raises(CalibrationError, match="'still'"):
        attention_filter.fit(collector, "still")
    with pytest.raises(CalibrationError, match="rank 0"):
        expected_attention.fit(expected_attention.Collector([t]), rank=0)
