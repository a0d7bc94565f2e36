"""TurboQuant's inner-product code: scalar codes of one bit less, and signs of what they leave over.

Zandieh, Daliri, Hadian, Mirrokni, 2504.19874, Algorithm 2 and Theorem 2 (read in a translation and
summaries; no code of the authors was read).
"""

from dataclasses import dataclass

import mlx.core as mx

from velox_pack.caches.codecs.base import Packed
from velox_pack.caches.codecs.qjl import SignSketch
from velox_pack.caches.codecs.rotated import PlainNorm, RotatedScalar


@dataclass(frozen=True)
class InnerProduct:
    """Codes of `first`, then a sign sketch and the norm of the residual.

    The sketch's estimate of the residual is unbiased whatever the first stage did, so inner
    products with the sum of both are too. Against the paper, the scale of the first stage is the
    one of least squares and not the row's norm: the residual that is left is smaller.
    """

    first: RotatedScalar
    sketch: SignSketch
    norm: PlainNorm
    granularity: int = 1

    def encode(self, x: mx.array, start: int) -> Packed:
        """`[B, H, N, D]` to the first stage's words and scales, signs and residual norms."""
        y = x.astype(mx.float32)
        coarse = self.first.encode(y, start)
        left = y - self.first.decode(coarse, start, mx.float32)
        size = self.norm.encode(mx.linalg.norm(left, axis=-1, keepdims=True))
        return (*coarse, self.sketch.encode(left), size)

    def decode(self, packed: Packed, start: int, dtype: mx.Dtype) -> mx.array:
        """The vectors `[B, H, N, D]` whose products are the unbiased estimates."""
        coarse = self.first.decode(packed[:2], start, mx.float32)
        left = self.sketch.decode(packed[2]) * self.norm.decode(packed[3])
        return (coarse + left).astype(dtype)

    def scores(self, q: mx.array, packed: Packed, start: int) -> mx.array:
        """Estimates `[B, H, R, N]` float32 of products of `q` `[B, H, R, D]` with coded keys."""
        sizes = self.norm.decode(packed[3]).swapaxes(-1, -2)
        coarse = self.first.scores(q, packed[:2], start)
        return coarse + self.sketch.scores(q, packed[2]) * sizes

    def constants(self) -> list[mx.array]:
        """Those of both stages."""
        return [*self.first.constants(), *self.sketch.constants()]
