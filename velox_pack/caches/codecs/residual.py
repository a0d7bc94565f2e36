"""Two-stage residual scalar codes after rotation (RVQ; from the description in DESIGN)."""

import math
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from velox_pack.caches.codecs.base import Packed
from velox_pack.caches.codecs.rotated import LevelTable, LogNorm, PlainNorm, Turn
from velox_pack.caches.codecs.turned import TurnedRows
from velox_pack.kernels.packing import pack_mixed, unpack_mixed
from velox_pack.manifests.errors import RecipeError


@dataclass(frozen=True)
class TwoStage(TurnedRows):
    """A coarse code of a rotated row, then a code of what it leaves over; one scale for both.

    turn    rotation of the rows
    again   rotation of what the first stage leaves over: it makes that Gaussian again, so that
            the same table serves both stages
    dim     coordinates of a row
    stages  bits of a coordinate in the first and in the second stage, 1 to 4 each

    The first stage comes first in the bitstream and decodes without the second. What is left
    over has nearly the same share of every row (the levels' mean squared error), so it needs no
    scale of its own. Two stages lose a little to one of as many bits: the error is the product of
    theirs, 0.132 against 0.117 at 1 + 1 bits, 0.0138 against 0.0095 at 2 + 2.
    """

    again: Turn
    dim: int
    stages: tuple[int, int]
    table: LevelTable
    norm: LogNorm | PlainNorm
    granularity: int = 1
    _starts: tuple[mx.array, mx.array] = field(init=False, repr=False)
    _left: float = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Check the stages: the level table is read without bounds."""
        if len(self.stages) != 2 or not all(1 <= bits <= 4 for bits in self.stages):
            raise RecipeError(f"rvq: stages of {self.stages} bits; each has 1 to 4")
        first, second = (mx.full((self.dim,), (1 << b) - 1, dtype=mx.uint32) for b in self.stages)
        object.__setattr__(self, "_starts", (first, second))
        object.__setattr__(self, "_left", math.sqrt(remaining(self.table, self.stages[0])))

    @property
    def widths(self) -> tuple[int, ...]:
        """Bits of each code of a row: all of the first stage, then all of the second."""
        return (self.stages[0],) * self.dim + (self.stages[1],) * self.dim

    def encode(self, x: mx.array, start: int) -> Packed:
        """`[B, H, N, D]` to words `[B, H, N, W]` uint32 and scales `[B, H, N, 1]`."""
        y = self.turn.forward(x.astype(mx.float32))
        size = mx.sqrt(mx.maximum((y * y).mean(-1, keepdims=True), 1e-30))
        unit = y / size
        at = self.table.nearest(unit, self._starts[0], self.stages[0])
        coarse = self.table.levels(at)
        left = self.again.forward((unit - coarse) / self._left)
        at_left = self.table.nearest(left, self._starts[1], self.stages[1])
        shape = coarse + self._left * self.again.backward(self.table.levels(at_left))
        # The scale that keeps a row's product with itself; see calibrators.rotated_code for why.
        fit = (y * y).sum(-1, keepdims=True) / mx.maximum((y * shape).sum(-1, keepdims=True), 1e-20)
        codes = mx.concatenate([at - self._starts[0], at_left - self._starts[1]], axis=-1)
        return pack_mixed(codes, self.widths), self.norm.encode(mx.maximum(fit, 1e-20))

    def coded(self, packed: Packed) -> mx.array:
        """Both stages together, `[B, H, N, D]` float32."""
        codes = unpack_mixed(packed[0], self.widths)
        coarse = self.table.levels(codes[..., : self.dim] + self._starts[0])
        left = self.table.levels(codes[..., self.dim :] + self._starts[1])
        shape = coarse + self._left * self.again.backward(left)
        return shape * self.norm.decode(packed[1])

    def constants(self) -> list[mx.array]:
        """Both rotations and the level table."""
        turns = [*self.turn.constants(), *self.again.constants()]
        return [*turns, *self._starts, *self.table.constants()]


def remaining(table: LevelTable, bits: int) -> float:
    """Share of a unit Gaussian's variance that the levels of `bits` bits leave over."""
    levels = np.array(table.flat[(1 << bits) - 1 : (2 << bits) - 1], np.float64)
    inner = ((levels[1:] + levels[:-1]) / 2).tolist()
    below = [0.0, *(0.5 * math.erfc(-e / math.sqrt(2)) for e in inner), 1.0]
    return 1.0 - float(np.sum(np.diff(below) * levels**2))
