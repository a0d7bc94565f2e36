"""Bits for each coordinate from the variances of the coordinates (reverse water-filling).

With Lloyd-Max distortions d(b), coordinate j costs variance_j * d(b_j). Marginal gains fall with
each bit, so giving every next bit where it gains most is the optimum among all integer widths.
"""

import heapq

import numpy as np

from velox_pack.calibrators.codebooks import MAX_BITS, distortions

Array = np.ndarray

WORD = 32  # codes of a row fill whole uint32 words


def widths(variances: Array, bits: float, *, word: int = WORD) -> tuple[Array, float]:
    """Widths uint8 [D] of 0 to 8 bits shared by all heads, and the achieved bits per coordinate.

    `variances` [H, D] or [D], each head sorted by descending variance; `bits` is the wanted average
    per coordinate. The sum of widths is the nearest multiple of `word`. What is minimized is the
    error summed over the heads, so a gain is the sum of the heads' gains. Widths never rise along a
    row. Raises ValueError for negative, unsorted or non-finite variances or impossible bits.
    """
    table = np.atleast_2d(np.asarray(variances, dtype=np.float64))
    if not np.all(np.isfinite(table)) or table.min() < 0 or np.any(np.diff(table, axis=1) > 0):
        raise ValueError("variances must be finite, not negative, and in descending order")
    count = table.shape[1]
    total = word * round(bits * count / word)
    if not 0 <= total <= MAX_BITS * count:
        raise ValueError(f"{bits} bits for {count} coordinates is not within 0 and {MAX_BITS}")
    result = spend(table.sum(axis=0), total)
    return result, total / count


def spend(weights: Array, total: int) -> Array:
    """Widths uint8 [D] that minimize sum(weights * d(width)) for a given sum of widths.

    Equal gains go to the lower index. `weights` must be in descending order.
    """
    gains = -np.diff(distortions())
    result = np.zeros(len(weights), dtype=np.uint8)
    heap = [(-weight * gains[0], j) for j, weight in enumerate(weights)]
    heapq.heapify(heap)
    for _ in range(total):
        _, j = heapq.heappop(heap)
        result[j] += 1
        if result[j] < MAX_BITS:
            heapq.heappush(heap, (-weights[j] * gains[result[j]], j))
    return result


def error(variances: Array, given: Array) -> Array:
    """Predicted error relative to the total variance of each head, [H] for [H, D]."""
    table = np.atleast_2d(np.asarray(variances, dtype=np.float64))
    ratio: Array = (table * distortions()[given]).sum(axis=1) / table.sum(axis=1)
    return ratio
