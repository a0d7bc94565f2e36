"""Heads of a token one behind another: one row of codes for all, so that only its end is padded."""

import mlx.core as mx


def together(x: mx.array) -> mx.array:
    """`[B, H, N, D]` to `[B, 1, N, H * D]`."""
    B, H, N, D = x.shape
    return x.swapaxes(1, 2).reshape(B, 1, N, H * D)


def apart(x: mx.array, heads: int) -> mx.array:
    """`[B, 1, N, H * D]` back to `[B, H, N, D]`."""
    B, _, N, C = x.shape
    return x.reshape(B, N, heads, C // heads).swapaxes(1, 2)
