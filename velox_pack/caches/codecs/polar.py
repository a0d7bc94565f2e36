"""Polar coordinates of randomly rotated rows (PolarQuant).

Han, Kacham, Karbasi, Mirrokni, Zandieh, 2502.02617 (abstract and a summary of the method read):
the recursive transform and its angles' densities. The other PolarQuant, 2502.00527 (authors' code
read: ericshwu/PolarQuant), takes the RoPE pairs of keys alone and rounds radii and angles within
the range that each pair has over 128 tokens; this one needs no range and codes values too.
"""

import math
from dataclasses import dataclass, field

import mlx.core as mx

from velox_pack.caches.codecs.base import Packed
from velox_pack.caches.codecs.rotated import PlainNorm
from velox_pack.caches.codecs.turned import TurnedRows
from velox_pack.kernels.levels import midpoints, quantize_levels
from velox_pack.kernels.packing import pack_mixed, unpack_mixed
from velox_pack.manifests.errors import RecipeError

# Lloyd-Max levels at 1, 2, 3 bits of the angles of the second and later rounds, less pi / 4: the
# upper half, the lower is its mirror. The density in round r is sin(2 angle) to the power of
# 2^(r-1) - 1; a test finds them again.
ANGLES = {
    2: ((0.2853982,), (0.1514179, 0.4756420), (0.0781682, 0.2371432, 0.4054019, 0.5969486)),
    3: ((0.2020648,), (0.1110132, 0.3591485), (0.0586516, 0.1793302, 0.3122226, 0.4778816)),
    4: ((0.1422434,), (0.0794888, 0.2611841), (0.0425279, 0.1306011, 0.2297478, 0.3596369)),
    5: ((0.1002075,), (0.0564453, 0.1868949), (0.0303827, 0.0935113, 0.1653692, 0.2618433)),
    6: ((0.0706991,), (0.0399745, 0.1328576), (0.0215791, 0.0664890, 0.1178894, 0.1877239)),
    7: ((0.0499313,), (0.0282839, 0.0941780), (0.0152895, 0.0471357, 0.0836829, 0.1336275)),
    8: ((0.0352845,), (0.0200052, 0.0666737), (0.0108217, 0.0333710, 0.0592839, 0.0947978)),
}


def angle_levels(round_: int, bits: int) -> list[float]:
    """Ascending levels of the angles of a round from the second on, in 0 to pi / 2."""
    upper = ANGLES[round_][bits - 1]
    return [math.pi / 4 + a for a in (*(-u for u in reversed(upper)), *upper)]


@dataclass(frozen=True)
class Polar(TurnedRows):
    """Angles of pairs, of the pairs' radii, of the radii's radii and so on, and the last radii.

    dim     coordinates of a row
    rounds  how often radii are paired; 2^rounds divides dim
    first   bits of the first round's angles, which are uniform over the circle
    later   bits of all later angles, which crowd around pi / 4

    The paper has 4 rounds, 4 bits and 2 bits, and a radius of 16 bits for every 16 coordinates:
    3.875 bits. All the rounds that a row has (one radius for 64 coordinates: 3.25 bits) cost a
    twelfth of error more.
    """

    dim: int
    rounds: int
    first: int
    later: int
    norm: PlainNorm
    granularity: int = 1
    _cos: mx.array = field(init=False, repr=False)
    _sin: mx.array = field(init=False, repr=False)
    _edges: tuple[mx.array, ...] = field(init=False, repr=False)
    _starts: mx.array = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Make the tables of all rounds' angles, one behind the other."""
        most = min((self.dim & -self.dim).bit_length() - 1, max(ANGLES))
        if not 1 <= self.rounds <= most:
            raise RecipeError(f"polar: {self.rounds} rounds for heads of {self.dim}; 1 to {most}")
        if not (1 <= self.first <= 8 and 1 <= self.later <= 3):
            raise RecipeError(
                f"polar: angles of {self.first} and {self.later} bits, not 1 to 8 and 1 to 3"
            )
        count = 1 << self.first
        angles = [(i + 0.5) * 2 * math.pi / count for i in range(count)]
        starts, edges = [0] * (self.dim // 2), []
        for r in range(2, self.rounds + 1):
            starts += [len(angles)] * (self.dim >> r)
            levels = angle_levels(r, self.later)
            edges.append(midpoints(mx.array(levels)))
            angles += levels
        tables = {
            "_cos": mx.array([math.cos(a) for a in angles]),
            "_sin": mx.array([math.sin(a) for a in angles]),
            "_edges": tuple(edges),
            "_starts": mx.array(starts, dtype=mx.uint32),
        }
        for name, value in tables.items():
            object.__setattr__(self, name, value)
        mx.eval(self.constants())

    @property
    def widths(self) -> tuple[int, ...]:
        """Bits of each angle of a row, the first round's first."""
        half = self.dim // 2
        return (self.first,) * half + (self.later,) * (half - (self.dim >> self.rounds))

    def encode(self, x: mx.array, start: int) -> Packed:
        """`[B, H, N, D]` to words `[B, H, N, W]` uint32 and radii `[B, H, N, D / 2^rounds]`."""
        radii = self.turn.forward(x.astype(mx.float32))
        codes = []
        for r in range(1, self.rounds + 1):
            a, b = radii[..., 0::2], radii[..., 1::2]
            angles = mx.arctan2(b, a)
            radii = mx.sqrt(a * a + b * b)
            if r == 1:
                count = 1 << self.first
                whole = mx.floor(angles * (count / (2 * math.pi))).astype(mx.int32)
                codes.append(whole.astype(mx.uint32) & (count - 1))
            else:
                codes.append(quantize_levels(angles, self._edges[r - 2]))
        return pack_mixed(mx.concatenate(codes, axis=-1), self.widths), self.norm.encode(radii)

    def coded(self, packed: Packed) -> mx.array:
        """Rows from the last radii down, `[B, H, N, D]` float32."""
        at = unpack_mixed(packed[0], self.widths) + self._starts
        cos, sin = (
            mx.take_along_axis(t, at.reshape(-1), axis=0).reshape(at.shape)
            for t in (self._cos, self._sin)
        )
        radii = self.norm.decode(packed[1])
        stop = at.shape[-1]
        for r in range(self.rounds, 0, -1):
            begin = stop - (self.dim >> r)
            pair = [radii * t[..., begin:stop] for t in (cos, sin)]
            radii = mx.stack(pair, axis=-1).reshape(*radii.shape[:-1], -1)
            stop = begin
        return radii

    def constants(self) -> list[mx.array]:
        """The rotation and the tables of angles."""
        return [*self.turn.constants(), self._cos, self._sin, self._starts, *self._edges]
