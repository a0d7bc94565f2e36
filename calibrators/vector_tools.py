"""What the vector codes share: the stored rotation, codes of scales, the power of the queries."""

import mlx.core as mx
import numpy as np

from velox_pack.calibrators.capture import LayerStatistics
from velox_pack.calibrators.spectral import NORM_CODES
from velox_pack.calibrators.trace import LayerTrace
from velox_pack.kernels import StructuredRotation, make_rotation, rotate
from velox_pack.manifests.artifacts_vector import rope_pairs
from velox_pack.manifests.errors import CalibrationError

Array = np.ndarray


def random_rotation(width: int, rounds: int, seed: int) -> tuple[Array, Array]:
    """Signs int8 [rounds, width] and mix float32 [M, M] of `rounds` structured rotations in a row.

    One round spreads outliers; three are as good as a Haar rotation for bounds that ask for one.
    """
    made = [make_rotation(width, seed + n) for n in range(rounds)]
    signs = np.stack([np.array(r.signs) for r in made]).astype(np.int8)
    mix = np.ones((1, 1), np.float32) if made[0].mix is None else np.array(made[0].mix)
    return signs, mix


def rotation_matrix(signs: Array, mix: Array) -> Array:
    """The matrix R float64 [D, D] for which `x @ R` applies all rounds to rows x."""
    rounds, width = signs.shape
    shared = mx.array(mix) if len(mix) > 1 else None
    block = make_rotation(width, 0).block
    matrix = mx.eye(width)
    for n in range(rounds):
        row = mx.array(signs[n].astype(np.float32))
        matrix = rotate(matrix, StructuredRotation(row, block, shared))
    return np.array(matrix).astype(np.float64)


def encode_log(scale: Array, log_norm: Array) -> Array:
    """8-bit codes uint8 of positive scales on the grid exp(lo + code * step), (lo, step) [2]."""
    low, step = (float(v) for v in log_norm)
    code = np.rint((np.log(np.maximum(scale, 1e-30)) - low) / step)
    codes: Array = np.clip(code, 0, NORM_CODES - 1).astype(np.uint8)
    return codes


def decode_log(codes: Array, log_norm: Array) -> Array:
    """Scales float64 of codes made by `encode_log`."""
    low, step = (float(v) for v in log_norm)
    scales: Array = np.exp(low + codes.astype(np.float64) * step)
    return scales


def fitting_scale(x: Array, shape: Array, *, unbiased: bool) -> Array:
    """Scales [...] that bring rows `shape` [..., D] to rows x: s * shape ~ x.

    The nearest is <x, shape> / |shape|^2. It makes every row too short, so that inner products
    along x shrink by cos^2 and attention becomes flatter; |x|^2 / <x, shape> keeps them, at the
    price of distance (RaBitQ's estimator does the same). Where the two hardly agree (cos < 1/4),
    the longer one stops at that; a row that is 0 has scale 0.
    """
    inner = np.einsum("...d,...d->...", x, shape)
    square, size = np.square(x).sum(axis=-1), np.square(shape).sum(axis=-1)
    above, below = np.maximum(inner, 0), size
    if unbiased:
        above, below = square, np.maximum(inner, np.sqrt(square * size) / 4)
    scale: Array = np.divide(above, below, out=np.zeros_like(inner), where=below > 0)
    return scale


def unit_rows(x: Array) -> Array:
    """Rows [..., D] divided by their norms; rows of 0 stay 0."""
    norm = np.linalg.norm(x, axis=-1, keepdims=True)
    unit: Array = np.divide(x, norm, out=np.zeros_like(x), where=norm > 0)
    return unit


def query_power(statistics: LayerStatistics, trace: LayerTrace | None) -> Array:
    """Mean square float64 [Hkv, D] of the queries that meet each coordinate of a KV head's keys.

    Averaged over the query heads of the group, and, given the layer's trace, over the two
    coordinates of each pair that RoPE turns: what a key before RoPE meets at varying distances.
    Coordinates that no query uses get a millionth of the greatest power, so that none is 0.
    """
    heads, width = statistics.keys.total.shape
    square = np.diagonal(statistics.queries.uncentred, axis1=1, axis2=2)
    power = square.reshape(heads, -1, width).mean(axis=1)
    if trace is not None and trace.rope is not None:
        first, second = rope_pairs(trace.rope.dims, trace.rope.dims, trace.rope.traditional)
        power[:, first] = power[:, second] = (power[:, first] + power[:, second]) / 2
    top = power.max(axis=1, keepdims=True)
    floored: Array = np.maximum(power, np.where(top > 0, 1e-6 * top, 1.0))
    return floored


def half_precision(x: Array, what: str) -> Array:
    """x as float16; CalibrationError if a number is too large for it or not finite."""
    if not np.all(np.abs(x) <= np.finfo(np.float16).max):
        raise CalibrationError(f"{what}: {np.abs(x).max():g} is not finite or beyond float16")
    return x.astype(np.float16)
