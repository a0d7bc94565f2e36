"""Nearest level of a sorted codebook, and nearest centroid of a vector codebook.

The nearest of sorted levels is found on the midpoints between neighbours, never by comparing
each value with each level in memory: no array with a 2^bits axis is ever made.
"""

import mlx.core as mx

# Below this many boundaries a sum of comparisons is faster than a search.
_COMPARE_UP_TO = 64
# Distances [rows, k] held at once by nearest_centroid, in elements.
_BLOCK_ELEMENTS = 1 << 22


def midpoints(levels: mx.array) -> mx.array:
    """Boundaries [k - 1] between neighbours of sorted levels [k], float32."""
    levels = levels.astype(mx.float32)
    return (levels[:-1] + levels[1:]) / 2


def quantize_levels(x: mx.array, boundaries: mx.array) -> mx.array:
    """Codes uint32, shaped like x: the number of boundaries [k - 1] (sorted) below each value.

    With `midpoints(levels)` as boundaries this is the index of the nearest level; a value exactly
    on a boundary takes the lower level, NaN takes code 0 or k - 1. Compared in float32.
    Raises ValueError unless there is one axis of boundaries.
    """
    if boundaries.ndim != 1:
        raise ValueError(f"boundaries must have one axis, not shape {boundaries.shape}")
    count = boundaries.shape[0]
    x = x.astype(mx.float32)
    boundaries = boundaries.astype(mx.float32)
    if count < _COMPARE_UP_TO:
        # Counted in bytes: a quarter of the memory traffic.
        below = mx.zeros(x.shape, mx.uint8)
        for i in range(count):
            below = below + (x > boundaries[i]).view(mx.uint8)
        return below.astype(mx.uint32)
    # Branchless binary search: after each step `codes` boundaries are known to lie below x.
    codes = mx.zeros(x.shape, mx.uint32)
    step = 1 << (count.bit_length() - 1)
    padded = mx.concatenate([boundaries, mx.full((2 * step - count,), mx.inf)])
    while step:
        passed = x > mx.take(padded, codes + (step - 1))
        codes = codes + passed.astype(mx.uint32) * step
        step >>= 1
    return codes


def nearest_centroid(x: mx.array, centroids: mx.array) -> mx.array:
    """Index uint32 [...] of the centroid [k, d] nearest to each vector of x [..., d].

    Euclidean, in float32; ties take the lower index. Distances are made for a block of rows at a
    time. Raises ValueError if the dimensions differ.
    """
    if centroids.ndim != 2 or x.shape[-1] != centroids.shape[-1]:
        raise ValueError(f"vectors {x.shape} and centroids {centroids.shape} do not fit")
    centroids = centroids.astype(mx.float32)
    # |x - c|^2 without |x|^2, which is the same for all centroids; halved.
    offset = mx.sum(mx.square(centroids), axis=-1) / 2
    rows = x.reshape(-1, x.shape[-1]).astype(mx.float32)
    block = max(1, _BLOCK_ELEMENTS // centroids.shape[0])
    parts = [
        mx.argmin(offset - rows[i : i + block] @ centroids.T, axis=-1)
        for i in range(0, rows.shape[0], block)
    ]
    found = mx.concatenate(parts) if parts else mx.zeros((0,), mx.uint32)
    return found.reshape(x.shape[:-1])
