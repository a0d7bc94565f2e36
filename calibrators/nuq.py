"""KVQuant's non-uniform codes: levels weighted by sensitivity, outliers apart, first token exact.

Source: KVQuant, 2401.18079 (the official code, SqueezeAILab/KVQuant, quant/kvquant, read). Keys are
coded before RoPE. Each channel is brought to [-1, 1] by thresholds from the calibration that leave
1 % of its values outside; values (the V of attention) by the range that each token has without its
own 1 % of outliers. One set of levels per layer, for keys and for values: weighted k-means of all
normalized numbers, the weight the squared gradient (diagonal Fisher information). Outliers are kept
in 16 bits, apart. Q-Norm moves the levels so that decoded numbers have mean and deviation of the
true ones.

Differences: k-means in one dimension is Lloyd's iteration on sorted values, without random starts;
the gradient is taken with respect to the normalized number (times the range), which is what the
error of a shared level is multiplied by; labels are the model's own (see `sensitivity`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from velox_pack.calibrators.gradients import Gradients, backward
from velox_pack.calibrators.scalar_codebooks import coded, empirical
from velox_pack.calibrators.stream import StreamingForward
from velox_pack.calibrators.trace import LayerTrace
from velox_pack.manifests.artifacts_scalar import Nuq
from velox_pack.manifests.errors import CalibrationError

Array = np.ndarray

OUTLIERS = 0.01
OUTLIER_BITS = 32  # a float16 and its place
RANGE_BITS = 32  # offset and range of a token, float16 each


@dataclass(frozen=True, eq=False)
class NuqLayer:
    """One layer: what `Nuq` stacks. `low`, `high` [H, D], `levels` [K], `edges` [K - 1]."""

    low: Array
    high: Array
    levels: Array
    edges: Array


@dataclass(frozen=True, eq=False)
class NuqCodes:
    """Codes uint8 [H, N, D]; outliers bool [H, N, D] and their float16 values in row order.

    `ranges` float16 [N, 2] are offset and half range of each token for axis "token", else None.
    `exact` float32 [H, F, D] are the first tokens.
    """

    codes: Array
    outliers: Array
    kept: Array
    ranges: Array | None
    exact: Array

    def bits_per_element(self, bits: int) -> float:
        """Bits of a coded token's number, outliers and ranges included."""
        heads, tokens, dim = self.codes.shape
        elements = heads * tokens * dim
        apart = OUTLIER_BITS * self.kept.size
        ranges = 0 if self.ranges is None else RANGE_BITS * tokens
        return float(bits + (apart + ranges) / max(elements, 1))


def token_outliers(x: Array, share: float) -> Array:
    """Mask [H, N, D] of each token's largest and smallest numbers, half the share from each end.

    At least one from each end, unless the share is 0. A token is its H * D numbers.
    """
    heads, tokens, dim = x.shape
    flat = x.transpose(1, 0, 2).reshape(tokens, heads * dim)
    mask = np.zeros(flat.shape, bool)
    if share > 0:
        count = max(1, round(share * flat.shape[1] / 2))
        order = np.argsort(flat, axis=1, kind="stable")
        ends = np.concatenate((order[:, :count], order[:, -count:]), axis=1)
        np.put_along_axis(mask, ends, True, axis=1)
    return mask.reshape(tokens, heads, dim).transpose(1, 0, 2)


def token_ranges(x: Array, outliers: Array) -> Array:
    """(offset, half range) of each token without its outliers, float16 [N, 2]."""
    low = np.where(outliers, np.inf, x).min(axis=(0, 2))
    high = np.where(outliers, -np.inf, x).max(axis=(0, 2))
    half = np.maximum((high - low) / 2, 1e-6)
    return np.stack([(high + low) / 2, half], axis=1).astype(np.float16)


def fit_layer(
    x: Array,
    weights: Array | None,
    bits: int,
    *,
    axis: str,
    outliers: float = OUTLIERS,
    q_norm: bool = False,
) -> NuqLayer:
    """Thresholds and levels from vectors x [H, N, D] and squared gradients there (None: all alike).

    Raises CalibrationError for vectors that are not finite or too few for the levels.
    """
    x = np.asarray(x, np.float64)
    if not np.all(np.isfinite(x)) or (weights is not None and not np.all(np.isfinite(weights))):
        raise CalibrationError("vectors or gradients for NUQ levels are not finite")
    low, high = np.quantile(x, (outliers / 2, 1 - outliers / 2), axis=1)
    high = np.maximum(high, low + 1e-6)
    unit, apart, half = _normalized(x, low, high, axis, outliers)
    inside = ~apart
    weight = np.ones_like(unit) if weights is None else weights * np.square(half)
    if not weight[inside].sum() > 0:  # a layer that no query reads
        weight = np.ones_like(unit)
    levels, _ = empirical(unit[inside], bits, weight[inside])
    edges = (levels[1:] + levels[:-1]) / 2
    if q_norm:
        true, found = unit[inside], coded(unit[inside], levels)
        stretch = true.std() / max(float(found.std()), 1e-12)
        levels = (levels - found.mean()) * stretch + true.mean()
    return NuqLayer(low, high, levels, edges)


def _normalized(
    x: Array, low: Array, high: Array, axis: str, share: float
) -> tuple[Array, Array, Array]:
    """Numbers brought to [-1, 1], the mask of outliers, and half ranges that broadcast."""
    if axis == "channel":
        offset, half = ((high + low) / 2)[:, None, :], ((high - low) / 2)[:, None, :]
        apart = (x < low[:, None, :]) | (x > high[:, None, :]) if share else np.zeros(x.shape, bool)
    else:
        apart = token_outliers(x, share)
        ranges = token_ranges(x, apart).astype(np.float64)
        offset, half = (ranges[None, :, i, None] for i in (0, 1))
    return (x - offset) / half, apart, half


def calibrate(
    streaming: StreamingForward,
    tokens: Array,
    traces: Sequence[LayerTrace],
    bits: int,
    *,
    outliers: float = OUTLIERS,
    exact_first: int = 1,
    window: int = 0,
    q_norm: bool | None = None,
    seed: int = 0,
) -> tuple[Nuq, ...]:
    """Keys and values of all covered layers from one backward pass over tokens int32 [n, N].

    Only one layer's vectors are in memory at a time. `q_norm` is on at 2 bits and below unless
    given, as in the paper. Raises CalibrationError as `gradients.backward` does.
    """
    moved = bits <= 2 if q_norm is None else q_norm
    held: list[Gradients] = []
    fitted: dict[str, dict[int, NuqLayer]] = {"keys": {}, "values": {}}

    def add(found: Gradients) -> None:
        held.append(found)
        if len(held) < tokens.shape[0]:
            return
        for part, layers in fitted.items():
            pairs = [h.part(part) for h in held]
            x, g = (np.concatenate([p[i][:, exact_first:] for p in pairs], axis=1) for i in (0, 1))
            layers[found.layer] = fit_layer(
                x,
                np.square(g.astype(np.float64)),
                bits,
                axis=_axis(part),
                outliers=outliers,
                q_norm=moved,
            )
        held.clear()

    backward(streaming, tokens, traces, add, window=window, seed=seed)
    rotated = {t.index: t.rope is not None for t in traces}
    return tuple(
        artifact
        for part, layers in fitted.items()
        for artifact in stack(layers, rotated, part, bits, outliers, exact_first)
    )


def _axis(part: str) -> str:
    return "channel" if part == "keys" else "token"


def stack(
    layers: Mapping[int, NuqLayer],
    rotated: Mapping[int, bool],
    part: str,
    bits: int,
    outliers: float = OUTLIERS,
    exact_first: int = 1,
) -> tuple[Nuq, ...]:
    """Artifacts of layers that agree in shape and in standing before RoPE."""
    groups: dict[tuple[bool, tuple[int, ...]], list[int]] = {}
    for index in sorted(layers):
        before = part == "keys" and rotated[index]
        groups.setdefault((before, layers[index].low.shape), []).append(index)
    return tuple(
        Nuq(
            part=part,
            before_rope=before,
            axis=_axis(part),
            bits=bits,
            outliers=float(outliers),
            exact_first=exact_first,
            levels=_stacked([layers[i].levels for i in indices]),
            edges=_stacked([layers[i].edges for i in indices]),
            low=_stacked([layers[i].low for i in indices]),
            high=_stacked([layers[i].high for i in indices]),
            layers=tuple(indices),
        )
        for (before, _), indices in groups.items()
    )


def _stacked(rows: list[Array]) -> Array:
    result: Array = np.stack(rows).astype(np.float32)
    return result


def encode(artifact: Nuq, row: int, x: Array, start: int = 0) -> NuqCodes:
    """Codes of vectors [H, N, D] (keys before RoPE) at positions from `start`."""
    first = min(max(artifact.exact_first - start, 0), x.shape[1])
    exact, x = x[:, :first].astype(np.float32), x[:, first:].astype(np.float64)
    low, high = (np.asarray(a[row], np.float64) for a in (artifact.low, artifact.high))
    unit, apart, _ = _normalized(x, low, high, artifact.axis, artifact.outliers)
    ranges = token_ranges(x, apart) if artifact.axis == "token" else None
    codes = np.searchsorted(artifact.edges[row], unit).astype(np.uint8)
    return NuqCodes(codes, apart, x[apart].astype(np.float16), ranges, exact)


def decode(artifact: Nuq, row: int, codes: NuqCodes) -> Array:
    """Vectors float32 [H, N, D], the exact first tokens in front."""
    if codes.ranges is None:
        low, high = (np.asarray(a[row], np.float64) for a in (artifact.low, artifact.high))
        offset, half = ((high + low) / 2)[:, None, :], ((high - low) / 2)[:, None, :]
    else:
        ranges = codes.ranges.astype(np.float64)
        offset, half = (ranges[None, :, i, None] for i in (0, 1))
    x = artifact.levels[row].astype(np.float64)[codes.codes] * half + offset
    x[codes.outliers] = codes.kept
    return np.concatenate([codes.exact, x.astype(np.float32)], axis=1)
