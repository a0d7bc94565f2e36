"""KVQuant's non-uniform codes: calibrated levels, and each token's outliers apart in 16 bits.

Source: KVQuant, 2401.18079 (the authors' quant/kvquant/simquant_module_quantizer.py, read).
Calibration and the NumPy definition are in calibrators.nuq. There, as in the paper, all of a key's
numbers beyond their channels' calibrated thresholds are kept, so their count varies from token to
token. An array of codes has one shape, so here each token keeps a fixed number: those farthest
beyond their thresholds, counted in the ranges of their channels. Where a token has fewer, the
places that are left keep the numbers nearest to the thresholds; where it has more, the rest take
the outermost level. Values have a fixed number from either end in the paper as well.
"""

from dataclasses import dataclass, field

import mlx.core as mx

from velox_pack.caches.codecs.base import Packed
from velox_pack.caches.codecs.heads import apart, together
from velox_pack.caches.codecs.rotated import LevelTable
from velox_pack.kernels.packing import pack, unpack
from velox_pack.manifests.errors import RecipeError

_LARGEST = 65504.0  # of a float16


class OwnLevels(LevelTable):
    """One calibrated set of levels and the edges between them, which need not be midpoints.

    `levels` [2^bits], `edges` [2^bits - 1], float32, ascending.
    """

    def __init__(self, levels: mx.array, edges: mx.array) -> None:
        before = int(levels.shape[0]) - 1  # where a table of all widths has the smaller ones
        self.flat = mx.concatenate([mx.zeros((before,)), levels])
        self.edges = mx.concatenate([mx.full((before,), mx.inf), edges, mx.array([mx.inf])])
        mx.eval(self.flat, self.edges)


@dataclass(frozen=True)
class Nuq:
    """Codes of `bits` bits in the range of a channel (keys) or of a token (values).

    low, high  [H, D] float32, what -1 and 1 stand for in each channel; None: each token's own
               range, without its outliers, is found and kept in 16 bits
    kept       outliers of a token (all heads together) that are kept in 16 bits, with their places;
               with ranges by token as many from the upper end as from the lower
    """

    table: OwnLevels
    bits: int
    heads: int
    dim: int
    kept: int
    low: mx.array | None = None
    high: mx.array | None = None
    granularity: int = 1
    _starts: mx.array = field(init=False, repr=False)
    _range: tuple[mx.array, mx.array] | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Check what can be checked before anything is encoded."""
        width = self.heads * self.dim
        by_token = self.low is None or self.high is None
        if not 0 <= self.kept < width - 1 or (by_token and self.kept % 2):
            raise RecipeError(f"kvquant: {self.kept} outliers of {width} numbers cannot be kept")
        if width > 1 << 16:
            raise RecipeError(f"kvquant: a token of {width} numbers has too many places")
        starts = mx.full((width,), (1 << self.bits) - 1, dtype=mx.uint32)
        found = None
        if self.low is not None and self.high is not None:
            low, high = self.low.reshape(-1), self.high.reshape(-1)
            found = ((high + low) / 2, (high - low) / 2)
        object.__setattr__(self, "_starts", starts)
        object.__setattr__(self, "_range", found)

    def encode(self, x: mx.array, start: int) -> Packed:
        """`[B, H, N, D]` to words [B, 1, N, W], then what is kept of each token.

        Those are ranges [B, 1, N, 2] (only where they are found by token), places [B, 1, N, kept]
        uint8 or uint16 and numbers [B, 1, N, kept] (only where outliers are kept). Numbers of 16
        bits are bfloat16 for bfloat16 rows, else float16.
        """
        y = together(x).astype(mx.float32)
        ranges: Packed = ()
        if self._range is None:
            places, low, high = self._ends(y)
            pair = mx.concatenate([(high + low) / 2, mx.maximum((high - low) / 2, 1e-6)], axis=-1)
            ranges = (_narrow(pair, x.dtype),)
            offset, half = mx.split(ranges[0].astype(mx.float32), 2, axis=-1)
            unit = (y - offset) / half
        else:
            offset, half = self._range
            unit = (y - offset) / half
            places = None
            if self.kept:
                places = mx.argpartition(-mx.abs(unit), self.kept - 1, axis=-1)[..., : self.kept]
        codes = self.table.nearest(unit, self._starts, self.bits) - self._starts
        packed = (pack(codes, self.bits), *ranges)
        if places is None:
            return packed
        numbers = _narrow(mx.take_along_axis(y, places, axis=-1), x.dtype)
        small = mx.uint8 if y.shape[-1] <= 1 << 8 else mx.uint16
        return (*packed, places.astype(small), numbers)

    def _ends(self, y: mx.array) -> tuple[mx.array | None, mx.array, mx.array]:
        """Places of the outliers of rows, and the least and greatest number without them."""
        if not self.kept:
            return None, y.min(axis=-1, keepdims=True), y.max(axis=-1, keepdims=True)
        order = mx.argsort(y, axis=-1)
        side = self.kept // 2
        ends = mx.concatenate([order[..., : side + 1], order[..., -side - 1 :]], axis=-1)
        numbers = mx.take_along_axis(y, ends, axis=-1)
        places = mx.concatenate([ends[..., :side], ends[..., side + 2 :]], axis=-1)
        return places, numbers[..., side : side + 1], numbers[..., side + 1 : side + 2]

    def decode(self, packed: Packed, start: int, dtype: mx.Dtype) -> mx.array:
        """Give `[B, H, N, D]` back in `dtype`."""
        codes = unpack(packed[0], self.bits, self.heads * self.dim)
        if self._range is None:
            offset, half = mx.split(packed[1].astype(mx.float32), 2, axis=-1)
        else:
            offset, half = self._range
        y = self.table.levels(codes + self._starts) * half + offset
        if self.kept:
            places, numbers = packed[-2:]
            y = mx.put_along_axis(y, places.astype(mx.uint32), numbers.astype(mx.float32), axis=-1)
        return apart(y, self.heads).astype(dtype)

    def constants(self) -> list[mx.array]:
        """Levels and ranges."""
        limits = [a for a in (self.low, self.high) if a is not None]
        return [*self.table.constants(), self._starts, *limits, *(self._range or ())]


def _narrow(x: mx.array, rows: mx.Dtype) -> mx.array:
    """16 bits that hold numbers of rows of this type."""
    if rows == mx.bfloat16:
        return x.astype(mx.bfloat16)
    return mx.clip(x, -_LARGEST, _LARGEST).astype(mx.float16)
