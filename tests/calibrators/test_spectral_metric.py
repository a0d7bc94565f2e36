"""Joint bases in a metric: what queries look at is saved, what heads repeat is coded once."""

import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from velox_pack.calibrators import codebooks, spectral, spectral_metric, waterfill
from velox_pack.calibrators.capture import LayerStatistics, Moments
from velox_pack.calibrators.joint import Joint, collect, grouped, ungrouped, unit_moment
from velox_pack.calibrators.scalar_codebooks import coded
from velox_pack.calibrators.stream import Captured
from velox_pack.calibrators.trace import LayerTrace
from velox_pack.kernels import make_rotation, rotate
from velox_pack.manifests.artifacts import Spectral
from velox_pack.manifests.artifacts_scalar import JointSpectral
from velox_pack.manifests.errors import CalibrationError

Array = np.ndarray


@dataclass
class Code:
    """Mean off, basis, norm, Gaussian levels: encode and decode at once, in float64."""

    mean: Array
    forward: Array
    backward: Array
    variance: Array
    widths: Array
    group: int = 1

    def __call__(self, x: Array) -> Array:
        z = grouped(x - self.mean[:, None], self.group) @ self.forward
        sigma = np.sqrt(self.variance / self.variance.sum(axis=-1, keepdims=True) + 1e-12)
        size = np.maximum(np.linalg.norm(z, axis=-1, keepdims=True), 1e-20)
        unit = z / (size * sigma[:, None])
        shape = np.zeros_like(z)
        for width in set(self.widths.tolist()) - {0}:
            at = self.widths == width
            shape[..., at] = coded(unit[..., at], codebooks.lloyd_max(width)[0])
        shape *= sigma[:, None]
        power = np.maximum(np.square(shape).sum(axis=-1, keepdims=True), 1e-20)
        shape *= (z * shape).sum(axis=-1, keepdims=True) / power
        out: Array = ungrouped(shape @ self.backward, self.group) + self.mean[:, None]
        return out


def hadamard(mean: Array, bits: float) -> Code:
    heads, dim = mean.shape
    turn = np.array(rotate(mx.eye(dim), make_rotation(dim, 0))).astype(np.float64)
    both = [np.broadcast_to(m, (heads, dim, dim)) for m in (turn, turn.T)]
    same = np.ones((heads, dim))
    return Code(mean, *both, same, waterfill.widths(same, bits)[0])


def plain(a: Spectral, n: int, bits: float) -> Code:
    basis = a.basis[n].astype(np.float64)
    given = waterfill.widths(a.variance[n], bits)[0]
    return Code(a.mean[n], basis, np.swapaxes(basis, 1, 2), a.variance[n], given)


def code_of(a: JointSpectral, n: int, bits: float) -> Code:
    given = spectral_metric.widths(a, n, bits)[0]
    wide = [x[n].astype(np.float64) for x in (a.mean, a.forward, a.variance)]
    out = spectral_metric.backward(a, n)
    return Code(wide[0], wide[1], out, wide[2], given, a.group)


def moments(x: Array) -> Moments:
    wide = x.astype(np.float64)
    second = np.swapaxes(wide, 1, 2) @ wide
    return Moments(x.shape[1], wide.sum(axis=1), second, np.abs(wide).max(axis=1))


def statistics(keys: Array, queries: Array) -> LayerStatistics:
    k, none = moments(keys), np.zeros(0)
    return LayerStatistics(0, False, moments(queries), k, k, k, keys, keys, keys, none, none)


def together(x: Array, group: int) -> Joint:
    y = grouped(x, group)
    directions = unit_moment(y - y.astype(np.float64).mean(axis=1, keepdims=True))
    return Joint(moments(y), directions, y[:, :500], group, False)


def test_bits_go_where_the_queries_look() -> None:
    """Keys vary most where no query looks: a plain spectral basis spends its bits there."""
    rng = np.random.default_rng(0)
    turn = np.linalg.qr(rng.standard_normal((32, 32)))[0]
    scale = np.where(np.arange(32) < 4, 6.0, 1.0)
    keys = ((rng.standard_normal((2, 4000, 32)) * scale) @ turn.T).astype(np.float32)
    look = np.where(np.arange(32) >= 28, 5.0, 0.05)
    queries = ((rng.standard_normal((4, 3000, 32)) * look) @ turn.T).astype(np.float32)
    metric = moments(queries).uncentred.reshape(2, 2, 32, 32).mean(axis=1)
    (found,) = spectral_metric.fit({0: together(keys, 1)}, {0: metric}, "keys", metric="queries")
    found.to_tensors()
    (own,) = spectral.fit({0: statistics(keys, queries)}, "keys")
    own_queries = queries.reshape(2, 6000, 32)

    def cost(code: Code) -> float:
        error = code(keys.astype(np.float64)) - keys
        return float(np.mean(np.square(own_queries[:, :2000] @ np.swapaxes(error, 1, 2))))

    best = cost(code_of(found, 0, 2.0))
    assert best < 0.2 * cost(plain(own, 0, 2.0))
    assert best < 0.2 * cost(hadamard(own.mean[0], 2.0))
    given, average = spectral_metric.widths(found, 0, 2.0)
    assert average == 2.0
    saved = spectral_metric.saving(found, 0, given)
    assert saved < 0.05
    assert spectral_metric.distortion(found, 0).at(2.0) == pytest.approx(saved, rel=0.5)


def test_heads_that_repeat_each_other_are_coded_once() -> None:
    """Values of four heads made from eight common factors; two of the heads matter a lot more."""
    rng = np.random.default_rng(0)
    factors = rng.standard_normal((4000, 8))
    x = np.einsum("nf,hfd->hnd", factors, rng.standard_normal((4, 8, 16)))
    x = (x + 0.3 * rng.standard_normal(x.shape) + 1.0).astype(np.float32)
    sensitivity = np.array([8.0, 0.1, 8.0, 0.1])
    layer = statistics(x, x)

    def nats(code: Code) -> float:
        error = np.square(code(x.astype(np.float64)) - x).sum(axis=(1, 2))
        size = np.square(x - x.mean(axis=1, keepdims=True)).sum(axis=(1, 2))
        return float(sensitivity @ (error / size))

    cost = {}
    for group in (1, 4):
        for name, own in (("alike", None), ("measured", sensitivity)):
            metric = spectral_metric.head_metric(layer, own)
            sums = {0: together(x, group)}
            (found,) = spectral_metric.fit(sums, {0: metric}, "values", metric="heads")
            found.to_tensors()
            assert found.undo.shape == (1, 4, 1, 1)
            cost[group, name] = nats(code_of(found, 0, 2.0))
            if own is not None:
                assert found.isotropic.sum() == pytest.approx(sensitivity.sum(), rel=1e-5)
                given, _ = spectral_metric.widths(found, 0, 2.0)
                predicted = spectral_metric.saving(found, 0, given) * sensitivity.sum()
                assert cost[group, name] == pytest.approx(predicted, rel=0.4)
    assert cost[4, "alike"] < 0.5 * cost[1, "alike"]
    assert cost[4, "measured"] < 0.8 * cost[4, "alike"]
    assert cost[4, "measured"] < 0.3 * nats(hadamard(layer.values.mean, 2.0))


def test_the_metric_is_the_logit_variance_over_positions(demo: Any) -> None:
    """Against turning errors by the model's own rope, one position at a time."""
    layer, trace = demo.statistics[2], demo.traces[2]
    metric = spectral_metric.query_metric(layer, trace)
    errors = np.random.default_rng(0).standard_normal((1, 2, 1, 64)).astype(np.float32)
    moment = layer.queries.uncentred.reshape(2, -1, 64, 64).mean(axis=1) * trace.scale**2
    base = 1 / trace.rope.inv_freq[1] ** (64 / 2)
    costs = []
    for position in range(0, spectral_metric.POSITIONS, 4):
        turned = mx.fast.rope(
            mx.array(errors), 64, traditional=False, base=base, scale=1.0, offset=position
        )
        e = np.array(turned)[0, :, 0].astype(np.float64)
        costs.append(np.einsum("hd,hde,he->h", e, moment, e))
    e = errors[0, :, 0].astype(np.float64)
    np.testing.assert_allclose(
        np.einsum("hd,hde,he->h", e, metric, e), np.mean(costs, axis=0), rtol=1e-3
    )


def test_trained_keys_cost_far_less_on_held_out_text(demo: Any) -> None:
    """What errors of keys do to the logits of later queries, against the two baselines."""
    metrics = {
        t.index: spectral_metric.query_metric(demo.statistics[t.index], t) for t in demo.traces
    }
    sums = collect(demo.streaming(), demo.tokens, demo.traces).done("keys")
    (found,) = spectral_metric.fit(sums, metrics, "keys", metric="queries")
    (own,) = spectral.fit(demo.statistics, "keys")
    found.to_tensors()
    assert found.before_rope
    costs: dict[str, list[Array]] = {"joint": [], "spectral": [], "hadamard": []}

    def hook(c: Captured) -> None:
        n = found.layers.index(c.layer)
        before = np.array(c.keys_before).astype(np.float64)
        codes = {
            "joint": code_of(found, n, 3.0),
            "spectral": plain(own, n, 3.0),
            "hadamard": hadamard(found.mean[n], 3.0),
        }
        queries = np.array(c.queries).reshape(len(before), -1, *before.shape[1:])
        later = np.tril(np.ones(before.shape[1:2] * 2), -24)[:, 4:]
        for name, code in codes.items():
            error = (code(before) - before).astype(np.float32)
            base = 1 / demo.traces[c.layer].rope.inv_freq[1] ** (64 / 2)
            turned = mx.fast.rope(
                mx.array(error)[None], 64, traditional=False, base=base, scale=1.0, offset=0
            )
            logits = queries @ np.swapaxes(np.array(turned)[0], 1, 2)[:, None] * c.scale
            costs[name].append(np.mean(np.square(logits[..., 4:]) * later))

    demo.streaming().run(demo.heldout, hook)
    mean = {name: float(np.sum(v)) for name, v in costs.items()}
    assert mean["joint"] < 0.6 * mean["spectral"]
    assert mean["joint"] < 0.3 * mean["hadamard"]


def test_power_1_codes_the_cost_itself() -> None:
    rng = np.random.default_rng(1)
    keys = (rng.standard_normal((2, 2000, 8)) @ rng.standard_normal((8, 8))).astype(np.float32)
    mix = rng.standard_normal((2, 8, 8))
    metric = mix @ np.swapaxes(mix, 1, 2)
    own = together(keys, 2)
    row = spectral_metric.fit_layer(own, metric, 1.0, 1e-9, False, False)
    ratio = row["cost"] / row["variance"]
    np.testing.assert_allclose(ratio, ratio[:, :1].repeat(16, axis=1), rtol=1e-4)
    blocks = [own.moments.covariance[0, at, at] for at in (slice(8), slice(8, 16))]
    total = sum(np.trace(m @ c) for m, c in zip(metric, blocks, strict=True))
    assert row["cost"].sum() == pytest.approx(total, rel=1e-6)
    assert np.all(np.diff(row["cost"]) <= 0)


def test_heavy_tails_are_spread() -> None:
    """Long rare vectors in fixed directions: they own the plain basis and are clipped there."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 6000, 32)) * np.linspace(1.3, 0.7, 32)
    rare = rng.random((1, 6000)) < 0.02
    x[rare] *= np.where(np.arange(32) == 31, 40.0, 0.3)
    x = (x @ np.linalg.qr(rng.standard_normal((32, 32)))[0]).astype(np.float32)
    same = {0: np.eye(32)[None]}
    errors = {}
    for directions in (False, True):
        (a,) = spectral_metric.fit(
            {0: together(x, 1)}, same, "values", metric="heads", directions=directions
        )
        given, _ = spectral_metric.widths(a, 0, 3.0)
        b = spectral_metric.spread(a, given[None])
        b.to_tensors()
        before, after = (spectral_metric.saving(which, 0, given) for which in (a, b))
        assert before == pytest.approx(after, rel=1e-5)
        for name, which in (("plain", a), ("spread", b)):
            own = np.square(code_of(which, 0, 3.0)(x.astype(np.float64)) - x).sum(axis=-1)
            errors[name, directions] = float(np.mean(own / np.square(x).sum(axis=-1)))
    assert errors["spread", True] < 0.9 * errors["plain", False]
    assert errors["spread", True] <= min(errors.values()) * 1.02


def test_spread_needs_widths_that_fit() -> None:
    x = np.random.default_rng(0).standard_normal((1, 100, 8)).astype(np.float32)
    same = {0: np.eye(8)[None]}
    (a,) = spectral_metric.fit({0: together(x, 1)}, same, "values", metric="heads")
    for wrong in ([[1, 2, 3, 4, 5, 6, 7, 8]], [[3, 2]], [[3] * 8, [3] * 8]):
        with pytest.raises(ValueError, match="rise, or do not fit"):
            spectral_metric.spread(a, np.array(wrong, np.uint8))
    alone = spectral_metric.spread(a, np.array([[8, 7, 6, 5, 4, 3, 2, 1]], np.uint8))
    np.testing.assert_array_equal(alone.forward, a.forward)


def test_participation_ratio() -> None:
    assert spectral.participation_ratio(np.ones(16)) == pytest.approx(16)
    assert spectral.participation_ratio(np.eye(16)[0] * 1e-300) == pytest.approx(1)
    assert spectral.participation_ratio(np.zeros(4)) == 0
    np.testing.assert_allclose(
        spectral.participation_ratio(np.array([[2.0, 2, 0], [1, 0, 0]])), [2, 1]
    )


def test_bad_input_is_one_line() -> None:
    x = np.random.default_rng(0).standard_normal((1, 100, 8)).astype(np.float32)
    sums = {0: together(x, 1)}
    with pytest.raises(CalibrationError, match="layer 0: keys or their metric"):
        spectral_metric.fit(sums, {0: np.full((1, 8, 8), np.nan)}, "keys", metric="queries")
    for power, ridge in ((1.5, 0.1), (0.5, 0.0)):
        with pytest.raises(ValueError, match="power"):
            spectral_metric.fit(
                sums, {0: np.eye(8)[None]}, "keys", metric="queries", power=power, ridge=ridge
            )


def test_a_layer_that_nobody_reads_is_coded_as_it_is() -> None:
    x = np.random.default_rng(0).standard_normal((1, 100, 8)).astype(np.float32)
    sums = {0: together(x, 1)}
    found = [
        spectral_metric.fit(sums, {0: metric}, "keys", metric="queries")[0]
        for metric in (np.zeros((1, 8, 8)), np.eye(8)[None])
    ]
    for role, array in found[0].to_tensors().items():
        np.testing.assert_array_equal(array, found[1].to_tensors()[role])


def test_layers_without_rope_are_not_turned() -> None:
    x = np.random.default_rng(0).standard_normal((1, 100, 8)).astype(np.float32)
    layer = statistics(x, np.concatenate([x, 2 * x]))
    trace = LayerTrace(0, "full", heads=2, kv_heads=1, k_dim=8, v_dim=8, scale=0.5)
    wanted = layer.queries.uncentred.mean(axis=0, keepdims=True) / 4
    np.testing.assert_allclose(spectral_metric.query_metric(layer, trace), wanted)
    scaled = spectral_metric.query_metric(layer, trace, np.array([3.0]))
    isotropic = np.trace(scaled[0]) * np.trace(layer.keys.covariance[0]) / 8
    assert isotropic == pytest.approx(3.0)


_HASH = """
import hashlib, numpy as np
from velox_pack.calibrators import spectral_metric as m
x = np.random.default_rng(0).standard_normal((4, 200, 64))
metric = np.swapaxes(x, 1, 2) @ x
shape, undo = m._power(metric, 2, 0.5, 0.1)
print(hashlib.sha256(shape.tobytes() + undo.tobytes()).hexdigest())
"""


def test_threads_do_not_change_the_bytes() -> None:
    digests = set()
    for threads in ("1", "2"):
        env = os.environ | {"OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads}
        command = [sys.executable, "-c", _HASH]
        digests.add(subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE).stdout)
    assert len(digests) == 1
