"""A change of basis for the heads of a group together."""

from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True)
class GroupedBasis:
    """One basis for each group of heads: into z by `forward`, back by its transpose and `undo`.

    `forward` [G, C, C] takes the coordinates of a group's heads, one head behind the other, C in
    all; `undo` [H, D, D], or [H, 1, 1] for a multiple of the identity, takes each head's share of
    z @ forward^T back to its own coordinates (the basis need not be orthogonal).
    """

    forward_basis: mx.array
    undo: mx.array
    group: int

    def forward(self, x: mx.array) -> mx.array:
        """`[B, H, N, D]` to `[B, G, N, C]`."""
        B, H, N, D = x.shape
        x = x.reshape(B, H // self.group, self.group, N, D).swapaxes(2, 3)
        return x.reshape(B, H // self.group, N, -1) @ self.forward_basis.astype(x.dtype)

    def backward(self, x: mx.array) -> mx.array:
        """`[B, G, N, C]` back to `[B, H, N, D]`."""
        B, G, N, C = x.shape
        x = x @ self.forward_basis.astype(x.dtype).swapaxes(-1, -2)
        x = x.reshape(B, G, N, self.group, C // self.group).swapaxes(2, 3)
        x = x.reshape(B, G * self.group, N, -1)
        undo = self.undo.astype(x.dtype)
        return x * undo if undo.shape[-1] == 1 else x @ undo

    def query(self, q: mx.array) -> mx.array:
        """`[B, H, R, D]` to `[B, H, R, C]`: head h's products with the codes of its group."""
        undo = self.undo.astype(q.dtype)
        q = q * undo if undo.shape[-1] == 1 else q @ undo.swapaxes(-1, -2)
        return q @ self._own(q.dtype)

    def mixed(self, z: mx.array) -> mx.array:
        """Mixtures of a group's codes `[B, H, R, C]` to head h's own `[B, H, R, D]`."""
        x = z @ self._own(z.dtype).swapaxes(-1, -2)
        undo = self.undo.astype(z.dtype)
        return x * undo if undo.shape[-1] == 1 else x @ undo

    def _own(self, dtype: mx.Dtype) -> mx.array:
        """Each head's rows of its group's basis, `[H, D, C]`."""
        G, C, _ = self.forward_basis.shape
        return self.forward_basis.astype(dtype).reshape(G * self.group, C // self.group, C)

    def constants(self) -> list[mx.array]:
        """Both matrices."""
        return [self.forward_basis, self.undo]
