"""RaBitQ: the nearest coarse centroid, and the residual's direction on a grid of half-integers.

Source: RaBitQ, 2405.12497, and Extended RaBitQ, 2409.09913. What of them was read, what differs,
and the NumPy definition are in calibrators.rabitq.
"""

from dataclasses import dataclass

import mlx.core as mx

from velox_pack.caches.codecs.base import Packed
from velox_pack.caches.codecs.heads import apart, together
from velox_pack.caches.codecs.rotated import LogNorm
from velox_pack.caches.codecs.vectors import Rounds, blockwise, unit_rows
from velox_pack.kernels.packing import pack, unpack
from velox_pack.manifests.errors import RecipeError

_TINY = 1e-20


@dataclass(frozen=True)
class CentroidGrid:
    """Codes of `bits` bits of rotated residuals, with the centroid and one scale for each row.

    centroids  [H, C, D] float16, C a power of two up to 256
    turn       rotation of residuals
    unbiased   the scale is |r| / cos, so that inner products with any query are unbiased over the
               rotation, else |r| * cos: the nearest row of that direction
    """

    centroids: mx.array
    turn: Rounds
    bits: int
    norm: LogNorm
    unbiased: bool
    granularity: int = 1

    def __post_init__(self) -> None:
        """Check what can be checked before anything is encoded."""
        if self.bits not in (1, 2, 3, 4):
            raise RecipeError(f"rabitq: bits={self.bits} is not 1 to 4")
        count = self.centroids.shape[1]
        if count > 256 or count & (count - 1):
            raise RecipeError(f"rabitq: {count} centroids are not a power of two up to 256")

    def encode(self, x: mx.array, start: int) -> Packed:
        """`[B, H, N, D]` to words [B, 1, N, W] uint32, scales and owners [B, H, N, 1] uint8.

        Owners only where there is more than one centroid.
        """
        y = x.astype(mx.float32)
        centroids = self.centroids.astype(mx.float32)
        offset = mx.square(centroids).sum(axis=-1)[:, None] / 2
        owner = mx.argmin(offset - y @ centroids.swapaxes(-1, -2), axis=-1, keepdims=True)
        rest = self.turn.forward(y - self._base(owner))
        size = mx.abs(rest)
        levels = mx.zeros(rest.shape, mx.uint32)
        if self.bits > 1:
            steps = (1 << (self.bits - 1)) - 1
            (levels,) = blockwise(self._levels, size, steps * rest.shape[-1])
        middle = levels.astype(mx.float32) + 0.5
        inner = (middle * size).sum(axis=-1, keepdims=True)
        length = mx.linalg.norm(middle, axis=-1, keepdims=True)
        # |r| / cos = |r|^2 |y| / <r, y>, and |r| cos = <r, y> / |y|.
        scale = inner / length
        if self.unbiased:
            square = mx.square(rest).sum(axis=-1, keepdims=True)
            scale = square * length / mx.maximum(inner, _TINY)
        top = 1 << (self.bits - 1)
        grid = mx.where(rest > 0, top + levels, top - 1 - levels)
        packed = (pack(together(grid), self.bits), self.norm.encode(scale))
        return packed if self.centroids.shape[1] == 1 else (*packed, owner.astype(mx.uint8))

    def _levels(self, size: mx.array) -> Packed:
        """Levels of magnitudes `[..., D]` so that level + 0.5 has the greatest cosine with them.

        As calibrators.rabitq: the best levels are floor(t * size), clipped, for the t at which the
        cosine is greatest, and it changes only where t * size crosses an integer.
        """
        width = size.shape[-1]
        steps = mx.arange(1, 1 << (self.bits - 1), dtype=mx.float32)
        at = (steps / mx.maximum(size, _TINY)[..., None]).reshape(*size.shape[:-1], -1)
        order = mx.argsort(at, axis=-1)
        gains = mx.take_along_axis(size, order // steps.size, axis=-1)
        inner = mx.cumsum(gains, axis=-1) + 0.5 * size.sum(axis=-1, keepdims=True)
        added = (order % steps.size + 1).astype(mx.float32) * 2
        cosine = inner * mx.rsqrt(mx.cumsum(added, axis=-1) + width / 4)
        best = mx.argmax(cosine, axis=-1, keepdims=True)
        none = 0.5 * size.sum(axis=-1, keepdims=True) * (width / 4) ** -0.5
        stop = mx.take_along_axis(mx.take_along_axis(at, order, axis=-1), best, axis=-1)
        stop = mx.where(mx.take_along_axis(cosine, best, axis=-1) > none, stop, 0.0)
        crossed = at.reshape(*size.shape, -1) <= stop[..., None]
        return (crossed.sum(axis=-1).astype(mx.uint32),)

    def _owner(self, packed: Packed) -> mx.array:
        """Owners `[B, H, N, 1]`."""
        return packed[2] if len(packed) > 2 else mx.zeros_like(packed[1])

    def _base(self, owner: mx.array) -> mx.array:
        """Centroids `[B, H, N, D]` float32 of owners `[B, H, N, 1]`."""
        H, count, D = self.centroids.shape
        places = owner[..., 0].astype(mx.uint32) + (mx.arange(H, dtype=mx.uint32) * count)[:, None]
        return mx.take(self.centroids.reshape(-1, D), places, axis=0).astype(mx.float32)

    def _directions(self, packed: Packed) -> mx.array:
        """Scaled grid points in the rotated basis, `[B, H, N, D]` float32."""
        H, _, D = self.centroids.shape
        grid = apart(unpack(packed[0], self.bits, H * D), H).astype(mx.float32)
        return unit_rows(grid - ((1 << self.bits) - 1) / 2) * self.norm.decode(packed[1])

    def decode(self, packed: Packed, start: int, dtype: mx.Dtype) -> mx.array:
        """Give `[B, H, N, D]` back in `dtype`: rows whose inner products are the estimates."""
        rest = self.turn.backward(self._directions(packed))
        return (self._base(self._owner(packed)) + rest).astype(dtype)

    def scores(self, q: mx.array, packed: Packed, start: int) -> mx.array:
        """Products `[B, H, R, N]` of queries `[B, H, R, D]` with coded keys, float32.

        Products with centroids are taken once for each of them and looked up.
        """
        table = q @ self.centroids.astype(mx.float32).swapaxes(-1, -2)
        owner = self._owner(packed).astype(mx.uint32).swapaxes(-1, -2)
        owner = mx.broadcast_to(owner, (*table.shape[:3], owner.shape[-1]))
        coarse = mx.take_along_axis(table, owner, axis=-1)
        return coarse + self.turn.forward(q) @ self._directions(packed).swapaxes(-1, -2)

    def mix(self, p: mx.array, packed: Packed, start: int) -> mx.array:
        """Mixtures `[B, H, R, D]` of coded values with weights `[B, H, R, N]`, float32."""
        rest = self.turn.backward(p @ self._directions(packed))
        return p @ self._base(self._owner(packed)) + rest

    def constants(self) -> list[mx.array]:
        """Centroids and rotation."""
        return [self.centroids, *self.turn.constants()]
