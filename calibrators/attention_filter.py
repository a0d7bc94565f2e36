"""Filters fitted to true attention: what one dot product with a key can predict best.

Q-Filters guess the direction from queries alone; with the true attention of the calibration text at
hand the direction can be fitted. For every observation (a block of queries, and the keys before
it) the logarithm of the mean mass of each key is regressed, by ridge regression within the
observation, on the key after RoPE and its norm. With `frame` "moving" keys are first turned back
by the position of the middle of the block: the direction then stands before RoPE like a query, and
is turned to where the coming queries will be when it is used. No paper; the moving frame is what
Expected Attention (2510.00636) does with the mean query.
"""

from collections.abc import Sequence

import numpy as np
from threadpoolctl import threadpool_limits

from velox_pack.calibrators.attention_mass import blocks
from velox_pack.calibrators.stream import Captured
from velox_pack.calibrators.trace import LayerTrace
from velox_pack.manifests.artifacts_attention import AttentionFilter
from velox_pack.manifests.errors import CalibrationError

Array = np.ndarray

FRAMES = ("moving", "fixed")
RIDGE = 0.003  # of the mean square of a key's coordinate
_LEAST = 1e-9  # mass below this counts as this


class Collector:
    """A capture hook that adds up the normal equations of the covered layers in `traces`.

    `window` queries are one observation, `sinks` first keys do not count. Blocks before a quarter
    of the sequence are left out, as in `attention_mass`.
    """

    def __init__(self, traces: Sequence[LayerTrace], *, window: int = 64, sinks: int = 4) -> None:
        self.traces = {t.index: t for t in traces if t.covered}
        self.window, self.sinks = window, sinks
        self.sums: dict[tuple[int, str], tuple[Array, Array]] = {}

    def __call__(self, captured: Captured) -> None:
        """Add one sequence of one layer."""
        trace = self.traces.get(captured.layer)
        if trace is None:
            return
        keys = np.array(captured.keys)
        norm = np.linalg.norm(keys, axis=-1, keepdims=True)
        with threadpool_limits(1):
            for start, weights, _ in blocks(captured, self.window):
                if start - self.sinks < 8 or start < keys.shape[1] // 4:
                    continue
                mass = weights[..., self.sinks : start].mean(axis=(1, 2), dtype=np.float64)
                target = np.log(np.maximum(mass, _LEAST))
                at = slice(self.sinks, start)
                middle = start + weights.shape[2] // 2
                for frame in FRAMES:
                    turned = keys[:, at]
                    if frame == "moving":
                        turned = turn(turned, trace, -middle)
                    features = np.concatenate([turned, norm[:, at]], axis=-1)
                    self._add(captured.layer, frame, features.astype(np.float64), target)

    def _add(self, layer: int, frame: str, x: Array, y: Array) -> None:
        x = x - x.mean(axis=1, keepdims=True)
        y = y - y.mean(axis=1, keepdims=True)
        square, product = np.swapaxes(x, 1, 2) @ x, np.einsum("hnd,hn->hd", x, y)
        old = self.sums.get((layer, frame))
        self.sums[layer, frame] = (
            (square, product) if old is None else (old[0] + square, old[1] + product)
        )


def fit(collector: Collector, frame: str, ridge: float = RIDGE) -> tuple[AttentionFilter, ...]:
    """Filters of all layers that were seen, one artifact for each shape and rotation."""
    if frame not in FRAMES:
        raise CalibrationError(f"frame is {frame!r}, not one of {FRAMES}")
    groups: dict[tuple[object, ...], list[int]] = {}
    for layer, name in sorted(collector.sums):
        trace = collector.traces[layer]
        if name == frame:
            key = (trace.kv_heads, trace.k_dim, *rotation(trace)[:2], len(rotation(trace)[2]))
            groups.setdefault(key, []).append(layer)
    if not groups:
        raise CalibrationError("no block of queries was observed: take longer sequences")
    made = []
    for layers in groups.values():
        fitted = np.stack([solve(*collector.sums[i, frame], ridge) for i in layers])
        dims, traditional, _ = rotation(collector.traces[layers[0]])
        made.append(
            AttentionFilter(
                frame=frame,
                lead=collector.window // 2 if frame == "moving" else 0,
                dims=dims,
                traditional=traditional,
                filters=np.ascontiguousarray(fitted[..., :-1]).astype(np.float32),
                norm=np.ascontiguousarray(fitted[..., -1]).astype(np.float32),
                inv_freq=np.array([rotation(collector.traces[i])[2] for i in layers], np.float32),
                layers=tuple(layers),
            )
        )
    return tuple(made)


def solve(square: Array, product: Array, ridge: float) -> Array:
    """Ridge regression [H, C] from normal equations [H, C, C], [H, C]; the norm is not shrunk."""
    size = product.shape[1]
    diagonal = np.einsum("hcc->hc", square)
    shrink = np.repeat(ridge * diagonal[:, :-1].mean(axis=1, keepdims=True), size, axis=1)
    shrink[:, -1] = 1e-6 * diagonal[:, -1] + np.finfo(np.float64).tiny
    system = square + shrink[:, None, :] * np.eye(size)
    with threadpool_limits(1):
        solved: Array = np.linalg.solve(system, product[..., None])[..., 0]
    return solved


def score(keys: Array, filters: Array, norm: Array) -> Array:
    """Scores [H, N] of keys [H, N, D] after RoPE; a moving filter has been turned before."""
    along = np.einsum("hnd,hd->hn", keys, filters)
    scores: Array = along + norm[:, None] * np.linalg.norm(keys, axis=-1)
    return scores


def turn(x: Array, trace: LayerTrace, position: float) -> Array:
    """RoPE of x [..., D] at one position, which may be negative; nothing where there is none."""
    dims, traditional, inv_freq = rotation(trace)
    angles = position * np.array(inv_freq, np.float64)
    return rotate(x, np.cos(angles), np.sin(angles), dims, traditional)


def rotate(x: Array, cos: Array, sin: Array, dims: int, traditional: bool) -> Array:
    """x [..., D] with its first `dims` coordinates turned; cos, sin [dims/2] or broadcasting.

    Averages of rotations are as good as rotations.
    """
    out = np.array(x)
    if traditional:
        first, second = slice(0, dims, 2), slice(1, dims, 2)
    else:
        first, second = slice(0, dims // 2), slice(dims // 2, dims)
    a, b = x[..., first], x[..., second]
    out[..., first] = a * cos - b * sin
    out[..., second] = a * sin + b * cos
    return out


def rotation(trace: LayerTrace) -> tuple[int, bool, tuple[float, ...]]:
    """(dims, traditional, inv_freq) of a layer; one pair that stands still without RoPE."""
    if trace.rope is None:
        return 2, False, (0.0,)
    return trace.rope.dims, trace.rope.traditional, trace.rope.inv_freq
