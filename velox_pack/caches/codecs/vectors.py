"""What codes of whole vectors share: the stored rotation, scales of rows, blocks of tokens."""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from velox_pack.caches.codecs.base import Packed
from velox_pack.kernels.hadamard import largest_power_of_two
from velox_pack.kernels.rotation import StructuredRotation, rotate, rotate_transpose

ELEMENTS = 1 << 23  # distances that exist at once while a chunk is encoded
_ALIKE = 0.25  # a cosine below which the scale that keeps products would be too long
_TINY = 1e-20


@dataclass(frozen=True)
class Rounds:
    """Structured rotations one after another, as the artifacts of vector codes store them."""

    rotations: tuple[StructuredRotation, ...]

    @classmethod
    def stored(cls, signs: mx.array, mix: mx.array) -> "Rounds":
        """From `signs` int8 [R, D] and the `mix` float32 [M, M] of all rounds, [[1]] for none."""
        width, size = signs.shape[1], mix.shape[0]
        block = width // size if size > 1 else largest_power_of_two(width)
        shared = mix if size > 1 else None
        rows = signs.astype(mx.float32)
        return cls(tuple(StructuredRotation(row, block, shared) for row in rows))

    def forward(self, x: mx.array) -> mx.array:
        """Rotate the last axis."""
        for rotation in self.rotations:
            x = rotate(x, rotation)
        return x

    def backward(self, x: mx.array) -> mx.array:
        """Rotate it back."""
        for rotation in reversed(self.rotations):
            x = rotate_transpose(x, rotation)
        return x

    def constants(self) -> list[mx.array]:
        """Signs and the mix."""
        mix = self.rotations[0].mix
        return [*(r.signs for r in self.rotations), *(() if mix is None else (mix,))]


def unit_rows(x: mx.array) -> mx.array:
    """Rows `[..., D]` divided by their norms; rows of 0 stay 0."""
    return x / mx.maximum(mx.linalg.norm(x, axis=-1, keepdims=True), _TINY)


def fitting_scale(x: mx.array, shape: mx.array, *, unbiased: bool) -> mx.array:
    """Scales `[..., 1]` that bring rows `shape` to rows x, as calibrators.vector_tools has it.

    The nearest, or the one that keeps inner products with the row.
    """
    inner = (x * shape).sum(axis=-1, keepdims=True)
    size = mx.square(shape).sum(axis=-1, keepdims=True)
    if not unbiased:
        return inner / mx.maximum(size, _TINY)
    square = mx.square(x).sum(axis=-1, keepdims=True)
    return square / mx.maximum(mx.maximum(inner, mx.sqrt(square * size) * _ALIKE), _TINY)


def blockwise(work: Callable[[mx.array], Packed], x: mx.array, each: int) -> Packed:
    """`work` on x `[B, H, N, D]`, few tokens at a time if a row makes `each` numbers on the way.

    `work` gives arrays with tokens on axis 2. A block begins when the one before has its result,
    so that what all of them make on the way never exists at once.
    """
    B, H, N, _ = x.shape
    tokens = max(1, ELEMENTS // (B * H * each))
    parts: list[Packed] = []
    for first in range(0, N, tokens):
        piece = x[:, :, first : first + tokens]
        if parts:
            piece = mx.depends([piece], list(parts[-1]))[0]
        parts.append(work(piece))
    if len(parts) == 1:
        return parts[0]
    return tuple(mx.concatenate(list(same), axis=2) for same in zip(*parts, strict=True))
