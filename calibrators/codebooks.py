"""Lloyd-Max codebooks: the scalar levels of least mean squared error for a unit Gaussian.

Lloyd, "Least squares quantization in PCM", IEEE Trans. Inf. Theory 28 (1982) and Max (1960); from
the description in DESIGN. The levels are the fixed point of Lloyd's iteration (each level the mean
of its cell, each boundary halfway between levels); plain iteration needs many thousand rounds at 8
bits, so Newton's method solves for the same fixed point, and the residual is checked.
"""

from functools import cache

import numpy as np
from scipy.linalg import solve_banded
from scipy.stats import norm

from velox_pack.manifests.artifacts import Codebook
from velox_pack.manifests.errors import CalibrationError

Array = np.ndarray

MAX_BITS = 8
_TOLERANCE = 1e-12


def _cells(half: Array) -> tuple[Array, Array, Array]:
    """Boundaries [m + 1], probabilities [m] and means [m] of the cells of the positive levels."""
    edges = np.concatenate(([0.0], (half[1:] + half[:-1]) / 2, [np.inf]))
    mass = norm.sf(edges[:-1]) - norm.sf(edges[1:])
    density = norm.pdf(edges)
    return edges, mass, (density[:-1] - density[1:]) / mass


@cache
def _lloyd_max(bits: int) -> tuple[tuple[float, ...], float]:
    count = 2 ** (bits - 1)
    # Start where the ideal point density, that of a Gaussian of variance 3, puts the levels.
    half = np.sqrt(3.0) * norm.ppf(0.5 + (np.arange(count) + 0.5) / (2 * count))
    for _ in range(100):
        edges, mass, means = _cells(half)
        residual = means - half
        if np.abs(residual).max() < _TOLERANCE:
            break
        density = norm.pdf(edges)
        low = density[:-1] * (means - edges[:-1]) / mass / 2  # d mean / d lower neighbour
        high = np.zeros(count)
        high[:-1] = density[1:-1] * (edges[1:-1] - means[:-1]) / mass[:-1] / 2
        low[0] = 0.0  # the boundary at 0 does not move
        jacobian = np.zeros((3, count))
        jacobian[0, 1:], jacobian[1], jacobian[2, :-1] = high[:-1], low + high - 1, low[1:]
        half = half - solve_banded((1, 1), jacobian, residual)
    else:
        raise CalibrationError(f"Lloyd-Max levels for {bits} bits did not converge")
    _, mass, means = _cells(half)
    levels = np.concatenate((-half[::-1], half))
    return tuple(float(x) for x in levels), float(1.0 - 2 * np.sum(mass * means**2))


def lloyd_max(bits: int) -> tuple[Array, float]:
    """Levels, float64 [2**bits] ascending and odd-symmetric, and their mean squared error."""
    if bits not in range(1, MAX_BITS + 1):
        raise ValueError(f"bits is {bits}, not 1 to {MAX_BITS}")
    levels, error = _lloyd_max(bits)
    return np.array(levels), error


def distortions() -> Array:
    """Mean squared error at 0 to 8 bits, float64 [9]; no bits: the variance, 1."""
    return np.array([1.0] + [lloyd_max(bits)[1] for bits in range(1, MAX_BITS + 1)])


def fit() -> Codebook:
    """The artifact: levels for 1 to 8 bits, for all layers alike."""
    levels = {b: lloyd_max(b)[0].astype(np.float32) for b in range(1, MAX_BITS + 1)}
    return Codebook(distribution="gaussian", levels=levels)
