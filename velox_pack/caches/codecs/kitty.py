"""Kitty's channels: bits for each by what its error costs, levels at fixed places.

Source: Kitty, 2511.18643 (abstract and the authors' kitty_sim/utils_quant.py, read), where a page's
ranges and its channels with more bits are found as it is written. Here both are calibrated
(calibrators.kitty, with the NumPy definition), so nothing but codes is stored.
"""

from dataclasses import dataclass, field

import mlx.core as mx

from velox_pack.caches.codecs.base import Packed
from velox_pack.caches.codecs.heads import apart, together
from velox_pack.caches.codecs.rotated import LevelTable
from velox_pack.kernels.packing import pack_mixed, unpack_mixed
from velox_pack.manifests.errors import RecipeError


@dataclass(frozen=True)
class ChannelLevels:
    """Scalar codes of channels as they are: `mean`, `deviation` [H, D] float32 place the levels.

    widths  bits of each channel of all heads, one head behind another, 0 to 8
    """

    mean: mx.array
    deviation: mx.array
    widths: tuple[int, ...]
    table: LevelTable
    granularity: int = 1
    _starts: mx.array = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Check the widths: the level tables are read without bounds."""
        if len(self.widths) != self.mean.size or not 0 <= min(self.widths) <= max(self.widths) <= 8:
            raise RecipeError(f"kitty: no widths of 0 to 8 bits for {self.mean.size} channels")
        starts = mx.array([(1 << w) - 1 for w in self.widths], dtype=mx.uint32)
        object.__setattr__(self, "_starts", starts)

    def encode(self, x: mx.array, start: int) -> Packed:
        """`[B, H, N, D]` to words `[B, 1, N, W]` uint32 of all heads together."""
        unit = (x.astype(mx.float32) - self.mean[:, None]) / self.deviation[:, None]
        at = self.table.nearest(together(unit), self._starts, max(self.widths))
        return (pack_mixed(at - self._starts, self.widths),)

    def decode(self, packed: Packed, start: int, dtype: mx.Dtype) -> mx.array:
        """Give `[B, H, N, D]` back in `dtype`."""
        at = unpack_mixed(packed[0], self.widths) + self._starts
        unit = apart(self.table.levels(at), self.mean.shape[0])
        return (unit * self.deviation[:, None] + self.mean[:, None]).astype(dtype)

    def constants(self) -> list[mx.array]:
        """Where levels stand, and the level table."""
        return [self.mean, self.deviation, self._starts, *self.table.constants()]
