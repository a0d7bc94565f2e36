"""Encodings of a weight matrix: Lloyd-Max codes with one scale a row, and fitted affine groups.

Both are data-free and minimise the squared error of the weight: scales (and biases) are the
least-squares ones for their codes, searched from several starts, since the error of a row or group
is a jagged function of its scale. Matrices are encoded a block of rows at a time; the blocks do
not change the result.
"""

import math
from collections.abc import Iterator

import mlx.core as mx
import numpy as np

from velox_pack.kernels import level_table, midpoints, pack, quantize_levels, unpack_levels
from velox_pack.manifests.errors import PackError

# Elements encoded at once; temporaries take about ten float32 of each.
_BLOCK_ELEMENTS = 1 << 21
# Lloyd: scales tried, as parts of a row's root mean square. Each is refitted to its codes. Rows of
# 512 at 4 bits: 4.5 % less squared error than the root mean square itself, at 3 bits 1.6 %.
_LLOYD_STARTS = (0.9, 0.95, 1.0, 1.05, 1.1)
# Affine: starting ranges as parts of a group's min-max range, and alternations (scale and bias
# given codes, codes given scale and bias) from each. At group 64 of a trained model: 18 % less
# squared error than min-max at 4 bits, 24 % at 3.
_AFFINE_STARTS = (1.0, 0.925, 0.85, 0.775, 0.7)
_AFFINE_ROUNDS = 4
_F16_SMALLEST, _F16_LARGEST = 2.0**-14, 65504.0


def encode_lloyd(weight: mx.array, levels: mx.array, bits: int) -> dict[str, mx.array]:
    """Encode rows (already rotated) with sorted levels [2^bits] of a source of variance 1.

    weight [out, in] of any float dtype. Returns codes uint32 [out, ceil(in * bits / 32)], scales
    float16 [out, 1], levels float32 [2^bits]: a weight is scale * levels[code]. The levels come
    back times a power of two if the scales do not fit float16 otherwise. Raises PackError on
    values that are not finite.
    """
    levels = levels.astype(mx.float32)
    boundaries = midpoints(levels)
    scales = mx.concatenate(
        [_lloyd_scales(rows, levels, boundaries) for rows in _row_blocks(weight)]
    )
    exponent = _float16_exponent(scales)
    stored = (scales * 2.0**-exponent).astype(mx.float16)
    codes = []
    start = 0
    for rows in _row_blocks(weight):
        scale = stored[start : start + rows.shape[0]].astype(mx.float32) * 2.0**exponent
        codes.append(pack(quantize_levels(rows / _nonzero(scale), boundaries), bits))
        mx.eval(codes[-1])
        start += rows.shape[0]
    return {"codes": mx.concatenate(codes), "scales": stored, "levels": levels * 2.0**exponent}


def decode_lloyd(
    codes: mx.array, scales: mx.array, levels: mx.array, bits: int, width: int
) -> mx.array:
    """Rows float32 [out, width] of Lloyd codes, still rotated."""
    rows = unpack_levels(codes, bits, width, level_table(levels.astype(mx.float32), bits))
    return rows * scales.astype(mx.float32)


def encode_affine(weight: mx.array, bits: int, group: int, dtype: mx.Dtype) -> dict[str, mx.array]:
    """Encode weight [out, in] in the format of `mx.quantize`, scales and biases in `dtype`.

    Returns codes uint32 [out, in * bits / 32], scales and biases [out, in / group]. From several
    starting ranges each group's scale and bias are fitted to its codes in turns and the best kept,
    the rounding to `dtype` included, so min-max is never better. Raises PackError on values that
    are not finite or whose groups do not fit `dtype`.
    """
    parts: dict[str, list[mx.array]] = {"codes": [], "scales": [], "biases": []}
    for rows in _row_blocks(weight):
        groups = rows.reshape(rows.shape[0], rows.shape[1] // group, group)
        codes, scales, biases = _fit_groups(groups, (1 << bits) - 1, dtype)
        parts["codes"].append(pack(codes.reshape(rows.shape), bits))
        parts["scales"].append(scales)
        parts["biases"].append(biases)
        mx.eval([p[-1] for p in parts.values()])
    packed = {name: mx.concatenate(p) for name, p in parts.items()}
    if not (_finite(packed["scales"]) and _finite(packed["biases"])):
        raise PackError(f"weights do not fit affine groups with {dtype} scales")
    return packed


def decode_affine(
    codes: mx.array, scales: mx.array, biases: mx.array, bits: int, group: int
) -> mx.array:
    """Rows float32 [out, in] of affine codes, still rotated."""
    scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    return mx.dequantize(codes, scales, biases, group_size=group, bits=bits)


def _row_blocks(weight: mx.array) -> Iterator[mx.array]:
    """Float32 blocks of rows, checked to be finite."""
    rows = max(1, _BLOCK_ELEMENTS // weight.shape[1])
    for start in range(0, weight.shape[0], rows):
        block = weight[start : start + rows].astype(mx.float32)
        if not _finite(block):
            raise PackError("a weight is not finite (NaN or infinity)")
        yield block


def _finite(x: mx.array) -> bool:
    return bool(mx.all(mx.isfinite(x)).item())


def _nonzero(scale: mx.array) -> mx.array:
    """A zero row divides by 1: any code times scale 0 is 0."""
    return mx.where(scale == 0, 1.0, scale)


def _lloyd_scales(rows: mx.array, levels: mx.array, boundaries: mx.array) -> mx.array:
    """Scales [rows, 1]: of those tried, refitted to their codes, the one of least error."""
    norm = mx.sqrt(mx.mean(mx.square(rows), axis=-1, keepdims=True))
    unit = rows / _nonzero(norm)
    best_gain, best = mx.full(norm.shape, -1.0), mx.zeros(norm.shape)
    for start in _LLOYD_STARTS:
        values = mx.take(levels, quantize_levels(unit / start, boundaries))
        product = mx.sum(unit * values, axis=-1, keepdims=True)
        power = mx.sum(mx.square(values), axis=-1, keepdims=True)
        # With the fitted scale product / power the error is |unit|^2 - product^2 / power.
        gain = mx.square(product) / _nonzero(power)
        best = mx.where(gain > best_gain, product / _nonzero(power), best)
        best_gain = mx.maximum(gain, best_gain)
        mx.eval(best, best_gain)
    return best * norm


def _float16_exponent(scales: mx.array) -> int:
    """Power of two to take out of the scales so that float16 holds them to full precision."""
    values = np.array(scales)
    largest, smallest = float(values.max()), float(values.min(initial=np.inf, where=values > 0))
    if largest == 0 or (smallest >= _F16_SMALLEST and largest <= _F16_LARGEST):
        return 0
    # The largest scale goes just below 2^15; what lies up to 29 binary orders below stays normal.
    return math.frexp(largest)[1] - 15


def _fit_groups(groups: mx.array, top: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array, mx.array]:
    """Codes [out, n, group] 0..top and scales, biases [out, n] in `dtype` of the best fit."""
    high, low = mx.max(groups, axis=-1), mx.min(groups, axis=-1)
    centre, half = (high + low) / 2, (high - low) / 2
    mean = mx.mean(groups, axis=-1)
    centred = groups - mean[..., None]
    best = mx.full(mean.shape, mx.inf), groups, mean, mean
    for start in _AFFINE_STARTS:
        scale, bias = 2 * half * start / top, centre - half * start
        for _ in range(_AFFINE_ROUNDS):
            codes = _round(groups, scale, bias, top)
            code_mean = mx.mean(codes, axis=-1)
            spread = codes - code_mean[..., None]
            power = mx.sum(mx.square(spread), axis=-1)
            scale = mx.where(power > 0, mx.sum(spread * centred, axis=-1) / _nonzero(power), scale)
            bias = mean - scale * code_mean
        # The bias is fitted once more to the scale as it will be stored.
        stored_scale = scale.astype(dtype)
        scale = stored_scale.astype(mx.float32)
        code_mean = mx.mean(_round(groups, scale, bias, top), axis=-1)
        stored_bias = (mean - scale * code_mean).astype(dtype)
        bias = stored_bias.astype(mx.float32)
        codes = _round(groups, scale, bias, top)
        error = mx.sum(mx.square(codes * scale[..., None] + bias[..., None] - groups), axis=-1)
        better = error < best[0]
        best = (
            mx.where(better, error, best[0]),
            mx.where(better[..., None], codes, best[1]),
            mx.where(better, stored_scale, best[2].astype(dtype)),
            mx.where(better, stored_bias, best[3].astype(dtype)),
        )
        mx.eval(best)
    _, codes, scales, biases = best
    return codes.astype(mx.uint32), scales, biases


def _round(groups: mx.array, scale: mx.array, bias: mx.array, top: int) -> mx.array:
    """Float codes 0..top of each value."""
    inverse = mx.where(scale == 0, 0.0, 1 / _nonzero(scale))
    return mx.clip(mx.round((groups - bias[..., None]) * inverse[..., None]), 0, top)
