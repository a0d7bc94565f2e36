"""Latents of groups of heads, scalar coded at a width for each: SVDq and PALU.

Sources: SVDq, 2502.15304 (abstract and introduction read); PALU, 2407.21118 (abstract and the
authors' code, shadowpa0327/Palu, read). Calibration and the NumPy definition are in
calibrators.lowrank: bases and widths are calibrated, where SVDq decomposes the prompt and both
papers round latents affinely.
"""

from dataclasses import dataclass

import mlx.core as mx

from velox_pack.caches.codecs.base import Packed
from velox_pack.caches.codecs.heads import apart, together
from velox_pack.caches.codecs.rotated import RotatedScalar
from velox_pack.kernels.packing import pack_mixed, unpack_mixed
from velox_pack.manifests.errors import RecipeError


@dataclass(frozen=True)
class Latents:
    """Few orthonormal columns for each group of heads: a turn that leaves the rest out.

    `basis` [H, D, R]: each head's rows of its group's basis; `group` heads share their latents.
    """

    basis: mx.array
    group: int

    def forward(self, x: mx.array) -> mx.array:
        """`[B, H, N, D]` to latents `[B, G, N, R]`."""
        B, H, N, _ = x.shape
        y = x @ self.basis.astype(x.dtype)
        return y.reshape(B, H // self.group, self.group, N, -1).sum(axis=2)

    def backward(self, x: mx.array) -> mx.array:
        """Latents `[B, G, N, R]` to `[B, H, N, D]`."""
        return self.mixed(mx.repeat(x, self.group, axis=1))

    def query(self, q: mx.array) -> mx.array:
        """`[B, H, R', D]` to `[B, H, R', R]`: head h's products with the latents of its group."""
        return q @ self.basis.astype(q.dtype)

    def mixed(self, z: mx.array) -> mx.array:
        """Mixtures of a group's latents `[B, H, R', R]` to head h's own `[B, H, R', D]`."""
        return z @ self.basis.astype(z.dtype).swapaxes(-1, -2)

    def constants(self) -> list[mx.array]:
        """The basis."""
        return [self.basis]


@dataclass(frozen=True)
class LatentScalar(RotatedScalar):
    """A rotated scalar code whose widths differ from group to group.

    `sigma` is [G, R], `widths` has the G * R of all groups, one group behind another; codes of a
    token stand in one row `[B, 1, N, W]`, scales are `[B, G, N, 1]`.
    """

    def __post_init__(self) -> None:
        """Check the widths: the level tables are read without bounds."""
        if (
            len(self.widths) != self.sigma.size
            or not 0 <= min(self.widths) <= max(self.widths) <= 8
        ):
            raise RecipeError(f"no widths of 0 to 8 bits for {self.sigma.size} latents")
        starts = mx.array([(1 << w) - 1 for w in self.widths], dtype=mx.uint32)
        object.__setattr__(self, "_starts", starts)

    def encode(self, x: mx.array, start: int) -> Packed:
        """`[B, H, N, D]` to words `[B, 1, N, W]` uint32 and scales `[B, G, N, 1]`."""
        y = x.astype(mx.float32)
        if self.mean is not None:
            y = y - self.mean[:, None]
        y = self.turn.forward(y)
        sigma = self.sigma[:, None]
        norm = mx.maximum(mx.linalg.norm(y, axis=-1, keepdims=True), 1e-20)
        at = self.table.nearest(together(y / (norm * sigma)), self._starts, max(self.widths))
        shape = apart(self.table.levels(at), len(self.sigma)) * sigma
        fit = (y * shape).sum(-1, keepdims=True) / mx.maximum(
            mx.square(shape).sum(-1, keepdims=True), 1e-20
        )
        return pack_mixed(at - self._starts, self.widths), self.norm.encode(fit)

    def _shapes(self, packed: Packed) -> mx.array:
        at = unpack_mixed(packed[0], self.widths) + self._starts
        return apart(self.table.levels(at), len(self.sigma)) * self.sigma[:, None]
