"""Rotary position embedding from angle tables, and its inverse.

The convention is that of `mx.fast.rope`: position p turns pair i by p * inv_freq[i]. Pairs are
(i, i + dims/2), or (2i, 2i + 1) when `traditional`. Only the first `dims` of the head are turned.
"""

import mlx.core as mx


def rope_angles(inv_freq: mx.array, positions: mx.array) -> tuple[mx.array, mx.array]:
    """Tables (cos, sin), float32 [..., dims/2], for positions [...] (tokens) and inv_freq [dims/2].

    Any linear scale of the positions belongs into inv_freq.
    """
    angles = positions.astype(mx.float32)[..., None] * inv_freq.astype(mx.float32)
    return mx.cos(angles), mx.sin(angles)


def apply_rope(x: mx.array, cos: mx.array, sin: mx.array, traditional: bool = False) -> mx.array:
    """Turn x [B, H, N, D] by tables [N, dims/2] or [B, 1, N, dims/2], dims <= D.

    Computed in float32 (the tables' dtype), returned in x's dtype; dimensions from `dims` on are
    passed through. Raises ValueError if dims > D.
    """
    half = cos.shape[-1]
    dims = 2 * half
    if dims > x.shape[-1]:
        raise ValueError(f"rope over {dims} dimensions of a head of {x.shape[-1]}")
    if traditional:
        pairs = x[..., :dims].reshape(*x.shape[:-1], half, 2)
        a, b = pairs[..., 0], pairs[..., 1]
        turned = mx.stack([a * cos - b * sin, a * sin + b * cos], axis=-1)
        parts = [turned.reshape(*x.shape[:-1], dims).astype(x.dtype)]
    else:
        a, b = x[..., :half], x[..., half:dims]
        parts = [(a * cos - b * sin).astype(x.dtype), (a * sin + b * cos).astype(x.dtype)]
    if dims < x.shape[-1]:
        parts.append(x[..., dims:])
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)


def undo_rope(x: mx.array, cos: mx.array, sin: mx.array, traditional: bool = False) -> mx.array:
    """Turn x back: the inverse of `apply_rope` with the same tables (float32 x loses least)."""
    return apply_rope(x, cos, -sin, traditional)
