"""Rotated scalar codes: take the mean off, rotate, divide by the norm, round to fixed levels.

With a random rotation and one width this is TurboQuant's MSE codec (2504.19874, from the
description in DESIGN); with a calibrated eigenbasis and water-filled widths it is the spectral
codec (from the description in DESIGN).
"""

from dataclasses import dataclass, field
from itertools import groupby
from typing import Protocol

import mlx.core as mx

from velox_pack.caches.codecs.base import Packed
from velox_pack.kernels.levels import midpoints, quantize_levels
from velox_pack.kernels.packing import pack_mixed, unpack_mixed
from velox_pack.kernels.rotation import StructuredRotation, rotate, rotate_transpose
from velox_pack.manifests.errors import RecipeError


class Turn(Protocol):
    """An orthogonal change of basis along the last axis."""

    def forward(self, x: mx.array) -> mx.array:
        """Into the coded basis."""

    def backward(self, x: mx.array) -> mx.array:
        """Back out of it."""

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

    Width b's levels start at `2^b - 1`; width 0 has the single level 0 (the mean).
    """

    def __init__(self, levels: dict[int, mx.array]) -> None:
        self.flat = mx.concatenate([mx.zeros((1,)), *[levels[b] for b in range(1, 9)]])
        self.boundaries = {b: midpoints(levels[b]) for b in range(1, 9)}
        mx.eval(self.flat, self.boundaries)

    def decode(self, codes: mx.array, starts: mx.array) -> mx.array:
        """Levels of codes [..., D], whose widths' levels start at `starts` [D]."""
        # Along an axis of its own: several times faster on the CPU than `mx.take`.
        at = (codes + starts).reshape(-1)
        return mx.take_along_axis(self.flat, at, axis=0).reshape(codes.shape)

    def encode(self, x: mx.array, widths: tuple[int, ...]) -> mx.array:
        """Nearest level of each column of `x` [..., D]; widths repeat in runs."""
        parts, at = [], 0
        for width, run in groupby(widths):
            n = len(list(run))
            part = x[..., at : at + n]
            if width:
                parts.append(quantize_levels(part, self.boundaries[width]).astype(mx.uint32))
            else:
                parts.append(mx.zeros(part.shape, mx.uint32))
            at += n
        return mx.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]

    def constants(self) -> list[mx.array]:
        """The table and its midpoints."""
        return [self.flat, *self.boundaries.values()]


@dataclass(frozen=True)
class RotatedScalar:
    """Scalar codes of a rotated, normalized row, with one scale per row.

    mean    [H, D] float32 taken off first, or None
    turn    orthogonal change of basis
    sigma   [H, D] float32, standard deviation of each rotated coordinate of a row of norm 1
    widths  bits of each rotated coordinate (0: it decodes to the mean), equal runs together
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
        """Check that there is a width for each coordinate."""
        if len(self.widths) != self.sigma.shape[-1]:
            raise RecipeError(
                f"{len(self.widths)} widths for rows of {self.sigma.shape[-1]} coordinates"
            )
        starts = mx.array([(1 << w) - 1 for w in self.widths], dtype=mx.uint32)
        object.__setattr__(self, "_starts", starts)

    def _shape(self, codes: mx.array) -> mx.array:
        """Unit-scale reconstruction in the rotated basis from codes [..., D]."""
        return self.table.decode(codes, self._starts) * self.sigma[:, None]

    def encode(self, x: mx.array, start: int) -> Packed:
        """`[B, H, N, D]` to words `[B, H, N, W]` uint32 and scales `[B, H, N, 1]`."""
        y = x.astype(mx.float32)
        if self.mean is not None:
            y = y - self.mean[:, None]
        y = self.turn.forward(y)
        norm = mx.maximum(mx.linalg.norm(y, axis=-1, keepdims=True), 1e-20)
        codes = self.table.encode(y / (norm * self.sigma[:, None]), self.widths)
        shape = self._shape(codes)
        fit = (y * shape).sum(-1, keepdims=True) / mx.maximum(
            (shape * shape).sum(-1, keepdims=True), 1e-20
        )
        return pack_mixed(codes, self.widths), self.norm.encode(fit)

    def decode(self, packed: Packed, start: int, dtype: mx.Dtype) -> mx.array:
        """Give `[B, H, N, D]` back in `dtype`."""
        words, scales = packed
        y = self._shape(unpack_mixed(words, self.widths)) * self.norm.decode(scales)
        x = self.turn.backward(y)
        if self.mean is not None:
            x = x + self.mean[:, None]
        return x.astype(dtype)

    def constants(self) -> list[mx.array]:
        """Basis, scales, mean and level table."""
        own = [a for a in (self.sigma, self.mean, self._starts) if a is not None]
        return [*self.turn.constants(), *own, *self.table.constants()]
