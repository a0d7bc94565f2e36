"""Spectral bases of heads together, in the metric of what reads them: what an error costs.

Three things make a spectral code beat a plain rotation (each measured alone in the benchmark):

- heads of a group share one basis (`joint`), because they repeat each other;
- the basis is that of a metric. A key's error e changes a logit by q . e, so what counts is
  E[(q . e)^2] = e^T M e with M the second moment of the queries; a value's error counts by how much
  the model's predictions suffer from its head (RateQuant's sensitivities). Eigenvectors U of
  A S A, S the second moment and A = (M + ridge)^(power / 2), give coordinates z = (x - mean) A U,
  coded with bits water-filled by cost. With power 1 the squared error of z IS the cost; held-out
  text prefers power 1/2, with the rest of the metric entering through the bits alone, because M
  differs from token to token and a basis stretched by all of it errs where M is small on average;
- S is that of directions, (x - mean) / |x - mean|, so that few long vectors, the heavy tails of
  values, do not decide the basis; and `spread` turns coordinates of equal width among themselves.

Keys are taken before RoPE, so M is that of queries as a key sees them before RoPE: turned back by
the key's position, averaged over positions. It needs only the captured statistics; the Fisher
information of a backward pass (`gradients.fisher`) may take its place and is no better.

Sources: SpectralQuant (Dynamis-Labs/spectralquant: README, engine.py, nonuniform_quantization.py
read) for eigenbases and water-filled bits; SMAQ (abstract read) for a query metric that must be
softened at low rates. Joint bases, costs, sensitivities and directions are our own.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby

import mlx.core as mx
import numpy as np
from threadpoolctl import threadpool_limits

from velox_pack.calibrators import ratequant, waterfill
from velox_pack.calibrators.capture import LayerStatistics
from velox_pack.calibrators.codebooks import distortions
from velox_pack.calibrators.joint import Joint, by_shape
from velox_pack.calibrators.spectral import eigenbasis, norm_range
from velox_pack.calibrators.trace import LayerTrace
from velox_pack.kernels.rope import apply_rope, rope_angles
from velox_pack.kernels.rotation import make_rotation, rotate
from velox_pack.manifests.artifacts_scalar import JointSpectral
from velox_pack.manifests.errors import CalibrationError

Array = np.ndarray

POWER, RIDGE = 0.5, 0.03
POSITIONS = 512  # distances over which the metric of the queries is averaged


def query_metric(
    statistics: LayerStatistics, trace: LayerTrace, sensitivity: Array | None = None
) -> Array:
    """Cost of errors of keys before RoPE, float64 [Hkv, D, D].

    scale^2 E[q q^T], averaged over the query heads of each KV head and over the positions from
    which a key may be turned back (no turning in layers without RoPE): the variance of attention
    logits. With `sensitivity` [Hkv], nats for an error of relative size 1 without direction (see
    `sensitivity.measure`), each head's metric is scaled to that, and costs are nats.
    """
    moment = statistics.queries.uncentred
    heads, dim = statistics.keys_before.total.shape
    metric: Array = moment.reshape(heads, -1, dim, dim).mean(axis=1) * trace.scale**2
    if trace.rope is not None and statistics.rotated:
        cos, sin = rope_angles(mx.array(trace.rope.inv_freq), mx.arange(0, POSITIONS, 4))
        rows = mx.broadcast_to(mx.eye(dim)[None, :, None], (1, dim, cos.shape[0], dim))
        turned = np.array(apply_rope(rows, cos, sin, trace.rope.traditional))[0]
        total = np.zeros_like(metric)
        for turn in turned.transpose(1, 0, 2).astype(np.float64):  # x @ turn is x after RoPE
            total += turn @ metric @ turn.T
        metric = (total + np.swapaxes(total, 1, 2)) / (2 * cos.shape[0])
    return _scaled(metric, statistics.keys_before.covariance, sensitivity)


def head_metric(statistics: LayerStatistics, sensitivity: Array | None = None) -> Array:
    """Cost of errors of values, float64 [Hkv, D, D]: alike in all directions of a head."""
    covariance = statistics.values.covariance
    same = np.broadcast_to(np.eye(covariance.shape[-1]), covariance.shape)
    return _scaled(same, covariance, sensitivity)


def _scaled(metric: Array, covariance: Array, sensitivity: Array | None) -> Array:
    if sensitivity is None:
        return metric
    now = _isotropic(metric, covariance)
    factor = np.asarray(sensitivity, np.float64) / np.where(now > 0, now, 1.0)
    return metric * factor[:, None, None]


def _isotropic(metric: Array, covariance: Array) -> Array:
    """Cost [H] of errors as large as the vectors, in no direction more than in another."""
    sizes = [np.trace(a, axis1=1, axis2=2) for a in (metric, covariance)]
    cost: Array = sizes[0] * sizes[1] / metric.shape[-1]
    return cost


def fit(
    joint: Mapping[int, Joint],
    metrics: Mapping[int, Array],
    part: str,
    *,
    metric: str,
    power: float = POWER,
    ridge: float = RIDGE,
    directions: bool = True,
) -> tuple[JointSpectral, ...]:
    """Bases of the keys (before RoPE where it can be undone) or values of all layers given.

    `metrics[layer]` float64 [H, D, D] by head, `metric` what it is ("queries", "heads", "fisher");
    `ridge` in parts of its mean eigenvalue. With `directions` False the second moment is the
    covariance. Layers that agree in shape and in standing before RoPE are stacked. Raises
    CalibrationError for what is not finite, ValueError for a power out of 0 to 1 or a ridge that
    is not positive.
    """
    if not (0 <= power <= 1 and ridge > 0):
        raise ValueError(f"power {power} must be 0 to 1 and ridge {ridge} above 0")
    artifacts = []
    for (before, group, _), layers in by_shape(joint).items():
        rows = []
        for i in layers:
            second = joint[i].moments.covariance
            if not (np.all(np.isfinite(second)) and np.all(np.isfinite(metrics[i]))):
                raise CalibrationError(f"layer {i}: {part} or their metric are not finite")
            rows.append(
                fit_layer(joint[i], metrics[i], power, ridge, directions, metric == "heads")
            )
        fields = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        half = {n: fields.pop(n).astype(np.float16) for n in ("forward", "undo")}
        artifacts.append(
            JointSpectral(
                part=part,
                before_rope=before,
                group=group,
                metric=metric,
                power=float(power),
                **half,
                **{name: value.astype(np.float32) for name, value in fields.items()},
                layers=tuple(layers),
            )
        )
    return tuple(artifacts)


def fit_layer(
    joint: Joint, metric: Array, power: float, ridge: float, directions: bool, scalar: bool
) -> dict[str, Array]:
    """The tensors of one layer in float64, by the names they have in the artifact.

    `scalar`: the metric is a multiple of the identity in each head. A group that nobody reads (its
    metric is 0) gets the identity, so that its bits are not spread by chance.
    """
    group = joint.group
    read = np.repeat(np.abs(metric).reshape(len(metric) // group, -1).any(axis=1), group)
    metric = np.where(read[:, None, None], metric, np.eye(metric.shape[-1]))
    covariance = joint.moments.covariance
    size = np.trace(covariance, axis1=1, axis2=2)[:, None, None]
    shape, undo = _power(metric, group, power, ridge)
    inside = _blocks(shape, group)
    second = joint.directions * size if directions else covariance
    basis, variance = eigenbasis(inside @ second @ inside)
    forward = inside @ basis
    backward = np.swapaxes(forward, 1, 2) @ _blocks(undo, group)
    cost = variance * np.einsum("gij,gjk,gik->gi", backward, _blocks(metric, group), backward)
    order = np.argsort(-cost, axis=1, kind="stable")
    forward = np.take_along_axis(forward, order[:, None, :], axis=2)
    variance, cost = (np.take_along_axis(a, order, axis=1) for a in (variance, cost))
    own = _by_head(covariance, group)
    mean = joint.moments.mean
    return {
        "mean": mean.reshape(len(own), -1),
        "forward": forward,
        "undo": undo[:, :1, :1] if scalar else undo,
        "variance": variance,
        "cost": np.maximum(cost, 0.0),
        "isotropic": _isotropic(metric, own).reshape(-1, group).sum(axis=1),
        "log_norm": norm_range((joint.sample - mean[:, None, :]) @ forward),
    }


def _power(metric: Array, group: int, power: float, ridge: float) -> tuple[Array, Array]:
    """A = (M / level + ridge)^(power / 2), symmetric [H, D, D], and A^-2.

    The level is the mean eigenvalue in a group of heads. A is scaled so that the mean square of its
    eigenvalues is 1 in each group: norms stay what they were, about.
    """
    with threadpool_limits(1):  # LAPACK's result differs between one and two threads
        values, vectors = np.linalg.eigh(metric)
    values = np.maximum(values, 0.0).reshape(len(metric) // group, -1)
    level = values.mean(axis=1, keepdims=True)
    values = (values / np.where(level > 0, level, 1.0) + ridge) ** (power / 2)
    values /= np.sqrt(np.square(values).mean(axis=1, keepdims=True))
    values = values.reshape(len(metric), 1, -1)
    across = np.swapaxes(vectors, 1, 2)
    return (vectors * values) @ across, (vectors / np.square(values)) @ across


def _blocks(by_head: Array, group: int) -> Array:
    """Matrices [H, D, D] as block-diagonal ones [G, C, C]."""
    heads, dim, _ = by_head.shape
    result = np.zeros((heads // group, group * dim, group * dim))
    for h, block in enumerate(by_head):
        at = slice(h % group * dim, (h % group + 1) * dim)
        result[h // group, at, at] = block
    return result


def _by_head(blocks: Array, group: int) -> Array:
    """The diagonal blocks [H, D, D] of matrices [G, C, C]."""
    dim = blocks.shape[1] // group
    return np.stack([b[n * dim :][:dim, n * dim :][:, :dim] for b in blocks for n in range(group)])


def backward(artifact: JointSpectral, row: int) -> Array:
    """What takes z back, float64 [G, C, C]: x = mean + z @ backward."""
    undo = artifact.undo[row].astype(np.float64)
    heads, dim = artifact.mean[row].shape
    if undo.shape[-1] == 1:
        undo = np.broadcast_to(np.eye(dim), (heads, dim, dim)) * undo
    across = np.swapaxes(artifact.forward[row].astype(np.float64), 1, 2)
    result: Array = across @ _blocks(undo, artifact.group)
    return result


def widths(artifact: JointSpectral, row: int, bits: float) -> tuple[Array, float]:
    """Widths uint8 [C] shared by the groups of layer number `row`, and their mean."""
    return waterfill.widths(artifact.cost[row], bits)


def spread(artifact: JointSpectral, given: Array) -> JointSpectral:
    """The same bases with coordinates of equal width turned among themselves.

    `given` uint8 [L, C], never rising along a row. A structured rotation is multiplied into the
    columns of each run of equal widths, whose variances and costs become their mean: each
    coordinate is a sum of many, so close to the Gaussian that levels are made for, and the
    predicted cost stays what it was. Raises ValueError for widths that rise or do not fit.
    """
    table = np.atleast_2d(given)
    layers, _, dim = artifact.variance.shape
    if table.shape != (layers, dim) or np.any(np.diff(table.astype(np.int64)) > 0):
        raise ValueError(f"widths {table.shape} rise, or do not fit {layers} layers of {dim}")
    forward = artifact.forward.astype(np.float64)
    variance, cost = artifact.variance.copy(), artifact.cost.copy()
    for n, row in enumerate(table):
        start = 0
        for _, run in groupby(row.tolist()):
            stop = start + len(list(run))
            forward[n, :, :, start:stop] @= _turn(stop - start)
            for a in (variance, cost):
                a[n, :, start:stop] = a[n, :, start:stop].mean(axis=-1, keepdims=True)
            start = stop
    return replace(artifact, forward=forward.astype(np.float16), variance=variance, cost=cost)


def _turn(size: int) -> Array:
    """An orthogonal matrix float64 [size, size] that spreads each coordinate over all."""
    turned: Array = np.array(rotate(mx.eye(size), make_rotation(size, 0))).astype(np.float64)
    return turned


def saving(artifact: JointSpectral, row: int, given: Array) -> float:
    """Predicted cost at these widths against errors of relative size 1 without direction."""
    cost = np.sum(artifact.cost[row].astype(np.float64) * distortions()[given])
    return float(cost / max(float(artifact.isotropic[row].sum()), np.finfo(np.float64).tiny))


def distortion(artifact: JointSpectral, row: int) -> ratequant.Distortion:
    """The curve that RateQuant multiplies by the layer's sensitivity, summed over its heads."""
    step = waterfill.WORD / artifact.cost.shape[-1]
    first, last = int(np.ceil(ratequant.FIT_FROM / step)), int(ratequant.FIT_TO / step)
    grid = step * np.arange(first, last + 1)
    errors = [saving(artifact, row, widths(artifact, row, b)[0]) for b in grid]
    return ratequant.fit_distortion(grid, np.array(errors))
