"""Hadamard transform of power-of-two sizes, with a size check of our own.

`mx.hadamard_transform` passes sizes 12, 20 and 28 times any number and corrupts memory for some
of them, so it is only ever called here and only with powers of two that every backend has.
"""

import math

import mlx.core as mx

# Largest power of two that one call may do in float32 on Metal.
_LARGEST = 4096


def is_power_of_two(n: int) -> bool:
    """Whether n is 1, 2, 4, 8, ..."""
    return n > 0 and n & (n - 1) == 0


def largest_power_of_two(n: int) -> int:
    """Largest power of two that is at most n (n >= 1)."""
    return 1 << (n.bit_length() - 1)


def hadamard(x: mx.array) -> mx.array:
    """Orthonormal Walsh-Hadamard transform (Sylvester order) along the last axis.

    Its own inverse. The dtype is kept. Raises ValueError unless the last axis is a power of two.
    """
    n = x.shape[-1]
    if not is_power_of_two(n):
        raise ValueError(f"a Hadamard transform of size {n}; only powers of two are done")
    if n == 1 or x.size == 0:
        return x
    if n <= _LARGEST:
        return mx.hadamard_transform(x, scale=1.0 / math.sqrt(n))
    # H_n is the Kronecker product of two smaller ones: one on each axis of the folded row.
    folded = hadamard(x.reshape(*x.shape[:-1], n // _LARGEST, _LARGEST))
    folded = mx.swapaxes(hadamard(mx.swapaxes(folded, -1, -2)), -1, -2)
    return folded.reshape(x.shape)
