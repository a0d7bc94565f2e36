"""Two streams: outlier channels at fixed levels with more bits, the rest rotated, with a scale.

From the description in DESIGN; calibration and the NumPy definition are in calibrators.outliers.
"""

from dataclasses import dataclass, field, replace

import mlx.core as mx
import numpy as np

from velox_pack.caches.codecs.base import Packed
from velox_pack.caches.codecs.heads import apart, together
from velox_pack.caches.codecs.rotated import LevelTable, LogNorm, Structured
from velox_pack.kernels.packing import pack_mixed, unpack_mixed
from velox_pack.kernels.rotation import make_rotation
from velox_pack.manifests.errors import RecipeError

_ALIKE = 0.25  # a cosine below which the scale that keeps products would be too long


def rest_turn(signs: mx.array, width: int) -> Structured:
    """A rotation of `width` coordinates from the stored signs of a wider one: nothing is drawn."""
    return Structured(replace(make_rotation(width, 0), signs=signs[:width].astype(mx.float32)))


@dataclass(frozen=True)
class TwoStreams:
    """Rows less their mean: K outlier channels of each head, and the D - K others, rotated.

    channels   [H, K] ascending
    mean       [H, D] float32
    deviation  [H, D] float32, of which the outliers' place their levels
    bits, outlier_bits  of the numbers of either stream
    turn       rotation of D - K coordinates

    The scale of the others is the one that keeps inner products with the row from 2 bits on, of
    least error at 1 bit (calibrators.rotated_code says why).
    """

    channels: mx.array
    mean: mx.array
    deviation: mx.array
    bits: int
    outlier_bits: int
    turn: Structured
    table: LevelTable
    norm: LogNorm
    granularity: int = 1
    _order: mx.array = field(init=False, repr=False)
    _back: mx.array = field(init=False, repr=False)
    _starts: mx.array = field(init=False, repr=False)
    _widths: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Lay out a row: outliers first, then the others, each in ascending order."""
        (heads, count), dim = self.channels.shape, self.mean.shape[-1]
        if not 1 <= self.bits <= 8 or not 1 <= self.outlier_bits <= 8:
            raise RecipeError(f"outliers: {self.bits} and {self.outlier_bits} bits, not 1 to 8")
        if self.turn.rotation.width != dim - count:
            raise RecipeError(f"outliers: no rotation of {dim - count} coordinates")
        channels = np.array(self.channels).astype(np.int64)
        rest = [np.setdiff1d(np.arange(dim), row) for row in channels]
        order = np.concatenate([channels, np.stack(rest)], axis=1)
        back = np.argsort(order, axis=1)
        widths = ((self.outlier_bits,) * count + (self.bits,) * (dim - count)) * heads
        starts = mx.array([(1 << w) - 1 for w in widths], dtype=mx.uint32)
        object.__setattr__(self, "_order", mx.array(order[None, :, None].astype(np.uint32)))
        object.__setattr__(self, "_back", mx.array(back[None, :, None].astype(np.uint32)))
        object.__setattr__(self, "_widths", widths)
        object.__setattr__(self, "_starts", starts)

    def encode(self, x: mx.array, start: int) -> Packed:
        """`[B, H, N, D]` to words `[B, 1, N, W]` uint32 and scales `[B, H, N, 1]` uint8."""
        count = self.channels.shape[1]
        y = _taken(x.astype(mx.float32) - self.mean[:, None], self._order)
        first, rest = y[..., :count], self.turn.forward(y[..., count:])
        size = mx.rsqrt(mx.maximum(mx.square(rest).mean(axis=-1, keepdims=True), 1e-40))
        unit = mx.concatenate([first / self._spread(), rest * size], axis=-1)
        at = self.table.nearest(together(unit), self._starts, max(self._widths))
        shape = apart(self.table.levels(at), x.shape[1])[..., count:]
        scale = self.norm.encode(self._scale(rest, shape))
        return pack_mixed(at - self._starts, self._widths), scale

    def _scale(self, rest: mx.array, shape: mx.array) -> mx.array:
        """As calibrators.vector_tools.fitting_scale."""
        inner = (rest * shape).sum(axis=-1, keepdims=True)
        below = mx.square(shape).sum(axis=-1, keepdims=True)
        if self.bits == 1:
            return inner / mx.maximum(below, 1e-20)
        square = mx.square(rest).sum(axis=-1, keepdims=True)
        return square / mx.maximum(mx.maximum(inner, mx.sqrt(square * below) * _ALIKE), 1e-20)

    def decode(self, packed: Packed, start: int, dtype: mx.Dtype) -> mx.array:
        """Give `[B, H, N, D]` back in `dtype`."""
        heads, count = self.channels.shape
        at = unpack_mixed(packed[0], self._widths) + self._starts
        unit = apart(self.table.levels(at), heads)
        rest = self.turn.backward(unit[..., count:] * self.norm.decode(packed[1]))
        y = mx.concatenate([unit[..., :count] * self._spread(), rest], axis=-1)
        return (_taken(y, self._back) + self.mean[:, None]).astype(dtype)

    def _spread(self) -> mx.array:
        """Deviations of the outliers `[1, H, 1, K]`."""
        return _taken(self.deviation[None, :, None], self._order[..., : self.channels.shape[1]])

    def constants(self) -> list[mx.array]:
        """Channels, where their levels stand, rotation and level table."""
        own = [self.channels, self.mean, self.deviation, self._order, self._back, self._starts]
        return [*own, *self.turn.constants(), *self.table.constants()]


def _taken(x: mx.array, places: mx.array) -> mx.array:
    """Along the last axis, other places in each head."""
    wanted = (*x.shape[:-1], places.shape[-1])
    return mx.take_along_axis(x, mx.broadcast_to(places, wanted), axis=-1)
