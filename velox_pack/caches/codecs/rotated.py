"""Rotated scalar codes: take the mean off, rotate, divide by the norm, round to fixed levels.

With a random rotation and one width this is TurboQuant's MSE codec (2504.19874, from the
description in DESIGN); with a calibrated eigenbasis and water-filled widths it is the spectral
codec (from the description in DESIGN).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import mlx.core as mx

from velox_pack.caches.codecs.base import Packed
from velox_pack.kernels.levels import midpoints
from velox_pack.kernels.packing import MAX_BITS, pack_mixed, unpack_mixed
from velox_pack.kernels.rotation import StructuredRotation, rotate, rotate_transpose
from velox_pack.manifests.errors import RecipeError


class Turn(Protocol):
    """An orthogonal change of basis along the last axis."""

    def forward(self, x: mx.array) -> mx.array:
        """Into the coded basis."""

    def backward(self, x: mx.array) -> mx.array:
        """Back out of it."""

    def query(self, q: mx.array) -> mx.array:
        """What the products of `q` [B, H, R, D] with coded rows are taken with in that basis."""

    def mixed(self, z: mx.array) -> mx.array:
        """A mixture of coded rows for each query [B, H, R, C], back out of the basis."""

    def constants(self) -> list[mx.array]:
        """Arrays held."""


@dataclass(frozen=True)
class Eigenbasis:
    """A basis per KV head: `columns` [H, D, D], eigenvectors in columns."""

    columns: mx.array

    def forward(self, x: mx.array) -> mx.array:
        """`[B, H, N, D] @ columns`."""
        return x @ self.columns.astype(x.dtype)

    def backward(self, x: mx.array) -> mx.array:
        """`x @ columns^T`."""
        return x @ self.columns.astype(x.dtype).swapaxes(-1, -2)

    query, mixed = forward, backward  # an orthogonal turn keeps products

    def constants(self) -> list[mx.array]:
        """The basis."""
        return [self.columns]


@dataclass(frozen=True)
class Structured:
    """One structured rotation for all heads."""

    rotation: StructuredRotation

    def forward(self, x: mx.array) -> mx.array:
        """Rotate the last axis."""
        return rotate(x, self.rotation)

    def backward(self, x: mx.array) -> mx.array:
        """Rotate it back."""
        return rotate_transpose(x, self.rotation)

    query, mixed = forward, backward

    def constants(self) -> list[mx.array]:
        """Signs and mix."""
        r = self.rotation
        return [a for a in (r.signs, r.mix) if isinstance(a, mx.array)]


@dataclass(frozen=True)
class LogNorm:
    """8-bit codes of a positive scale on a logarithmic grid: exp(lo + code * step).

    The largest relative error inside the range is step / 2; beyond it the scale is clipped.
    """

    lo: float
    step: float

    def encode(self, s: mx.array) -> mx.array:
        """`[..., 1]` positive float32 to uint8."""
        code = mx.round((mx.log(mx.maximum(s, 1e-30)) - self.lo) / self.step)
        return mx.clip(code, 0, 255).astype(mx.uint8)

    def decode(self, code: mx.array) -> mx.array:
        """Back to float32."""
        return mx.exp(self.lo + code.astype(mx.float32) * self.step)


@dataclass(frozen=True)
class PlainNorm:
    """The scale as bfloat16: no calibration needed, and no bfloat16 key can overflow it."""

    def encode(self, s: mx.array) -> mx.array:
        """Round to bfloat16 (relative error at most 2^-9)."""
        return s.astype(mx.bfloat16)

    def decode(self, code: mx.array) -> mx.array:
        """Back to float32."""
        return code.astype(mx.float32)


class LevelTable:
    """Sorted levels for 0 to 8 bits of a unit-variance source, in one flat table.

    Width b's levels start at `2^b - 1`; width 0 has the single level 0 (the mean). The upper
    edges of the levels' cells lie in the same places of a second table.
    """

    def __init__(self, levels: Mapping[int, mx.array]) -> None:
        end = mx.array([mx.inf])
        edges = [part for b in range(1, 9) for part in (midpoints(levels[b]), end)]
        self.flat = mx.concatenate([mx.zeros((1,)), *[levels[b] for b in range(1, 9)]])
        self.edges = mx.concatenate([end, *edges])
        mx.eval(self.flat, self.edges)

    def nearest(self, x: mx.array, starts: mx.array, bits: int) -> mx.array:
        """Places in `flat`, uint32, of the level nearest to each value of `x` [..., D].

        The levels of column j start at `starts[j]`; `bits` is the largest of their widths. One
        search by halves for all columns, whatever their widths, keeps the graph small: a token
        leaves the window in a group of few, and then the number of operations is what counts.
        """
        at = starts
        for k in range(1, bits + 1):
            step = (starts + 1) >> k  # 0 in columns that are done
            edges = _entries(self.edges, at + (mx.maximum(step, 1) - 1))
            at = at + (x > edges).astype(mx.uint32) * step
        return mx.broadcast_to(at, x.shape)

    def levels(self, at: mx.array) -> mx.array:
        """The levels at these places."""
        return _entries(self.flat, at)

    def constants(self) -> list[mx.array]:
        """Both tables."""
        return [self.flat, self.edges]


def _entries(table: mx.array, at: mx.array) -> mx.array:
    # Along the axis of a flat table: ten times faster than `mx.take` on the CPU.
    return mx.take_along_axis(table, at.reshape(-1), axis=0).reshape(at.shape)


@dataclass(frozen=True)
class RotatedScalar:
    """Scalar codes of a rotated, normalized row, with one scale per row.

    mean    [H, D] float32 taken off first, or None
    turn    orthogonal change of basis
    sigma   [H, D] float32, standard deviation of each rotated coordinate of a row of norm 1
    widths  bits of each rotated coordinate, 0 to 8 (0: it decodes to the mean)
    norm    how the row's scale is stored

    The stored scale is not the norm but the factor that brings the decoded row closest to the
    original (least squares), which costs nothing and takes part of the rounding error back.
    """

    turn: Turn
    sigma: mx.array
    widths: tuple[int, ...]
    table: LevelTable
    norm: LogNorm | PlainNorm
    mean: mx.array | None = None
    granularity: int = 1
    _starts: mx.array = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Check the widths: the level tables are read without bounds."""
        if len(self.widths) != self.sigma.shape[-1]:
            raise RecipeError(
                f"{len(self.widths)} widths for rows of {self.sigma.shape[-1]} coordinates"
            )
        if min(self.widths) < 0 or max(self.widths) > MAX_BITS:
            raise RecipeError(f"widths are {min(self.widths)} to {max(self.widths)}, not 0 to 8")
        starts = mx.array([(1 << w) - 1 for w in self.widths], dtype=mx.uint32)
        object.__setattr__(self, "_starts", starts)

    def encode(self, x: mx.array, start: int) -> Packed:
        """`[B, H, N, D]` to words `[B, H, N, W]` uint32 and scales `[B, H, N, 1]`."""
        y = x.astype(mx.float32)
        if self.mean is not None:
            y = y - self.mean[:, None]
        y = self.turn.forward(y)
        sigma = self.sigma[:, None]
        norm = mx.maximum(mx.linalg.norm(y, axis=-1, keepdims=True), 1e-20)
        at = self.table.nearest(y / (norm * sigma), self._starts, max(self.widths))
        shape = self.table.levels(at) * sigma
        fit = (y * shape).sum(-1, keepdims=True) / mx.maximum(
            (shape * shape).sum(-1, keepdims=True), 1e-20
        )
        return pack_mixed(at - self._starts, self.widths), self.norm.encode(fit)

    def decode(self, packed: Packed, start: int, dtype: mx.Dtype) -> mx.array:
        """Give `[B, H, N, D]` back in `dtype`."""
        x = self.turn.backward(self._shapes(packed) * self.norm.decode(packed[1]))
        if self.mean is not None:
            x = x + self.mean[:, None]
        return x.astype(dtype)

    def scores(self, q: mx.array, packed: Packed, start: int) -> mx.array:
        """Products `[B, H, R, N]` of queries `[B, H, R, D]` with coded keys, float32.

        The queries are rotated instead of the keys, and norms multiply products.
        """
        turned = self.turn.query(q)
        found = self._by_group(turned) @ self._shapes(packed).swapaxes(-1, -2)
        found = found * self.norm.decode(packed[1]).swapaxes(-1, -2)
        found = found.reshape(*q.shape[:3], -1)
        if self.mean is not None:
            found = found + (q * self.mean[:, None]).sum(-1, keepdims=True)
        return found

    def mix(self, p: mx.array, packed: Packed, start: int) -> mx.array:
        """Mixtures `[B, H, R, D]` of coded values with weights `[B, H, R, N]`, float32."""
        scales = self.norm.decode(packed[1]).swapaxes(-1, -2)
        found = (self._by_group(p) * scales) @ self._shapes(packed)
        out = self.turn.mixed(found.reshape(*p.shape[:3], -1))
        if self.mean is not None:
            out = out + p.sum(-1, keepdims=True) * self.mean[:, None]
        return out

    def _by_group(self, x: mx.array) -> mx.array:
        """`[B, H, R, X]` with the heads that share rows of codes one behind the other."""
        return x.reshape(x.shape[0], self.sigma.shape[0], -1, x.shape[-1])

    def _shapes(self, packed: Packed) -> mx.array:
        """Decoded rows in the turned basis but for their scale, `[B, H, N, C]`."""
        at = unpack_mixed(packed[0], self.widths) + self._starts
        return self.table.levels(at) * self.sigma[:, None]

    def constants(self) -> list[mx.array]:
        """Basis, scales, mean and level table."""
        own = [a for a in (self.sigma, self.mean, self._starts) if a is not None]
        return [*self.turn.constants(), *own, *self.table.constants()]
