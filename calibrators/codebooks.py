"""Lloyd-Max codebooks: scalar levels of least mean squared error, above all for a unit Gaussian.

Lloyd, "Least squares quantization in PCM", IEEE Trans. Inf. Theory 28 (1982) and Max (1960); from
the description in DESIGN. The levels are the fixed point of Lloyd's iteration (each level the mean
of its cell, each boundary halfway between levels); plain iteration needs many thousand rounds at 8
bits, so Newton's method solves for the same fixed point, and the residual is checked. Sources other
than the Gaussian are in `scalar_codebooks`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy.linalg import solve_banded
from scipy.stats import norm

from velox_pack.manifests.artifacts import Codebook
from velox_pack.manifests.errors import CalibrationError

Array = np.ndarray
Function = Callable[[Array], Array]

MAX_BITS = 8
_TOLERANCE = 1e-12
_ROUNDS = 300


@dataclass(frozen=True)
class Source:
    """A symmetric density of mean 0 and variance 1, by what Lloyd-Max needs of it at x >= 0.

    density     p(x)
    tail        integral of p from x to the end
    first       integral of t p(t) from x to the end
    companded   x for which a share u of the levels' ideal density, p^(1/3), lies above x (u <= 1/2)
    end         where the density ends, infinity for most
    """

    name: str
    density: Function
    tail: Function
    first: Function
    companded: Function
    end: float


def gaussian() -> Source:
    """The unit Gaussian."""
    return Source(
        "gaussian", norm.pdf, norm.sf, norm.pdf, lambda u: np.sqrt(3.0) * norm.isf(u), np.inf
    )


def solve(source: Source, bits: int) -> tuple[Array, float]:
    """Levels float64 [2**bits], ascending and odd-symmetric, and their mean squared error.

    Raises ValueError for bits out of 1 to 8, CalibrationError if Newton's method does not end.
    """
    if bits not in range(1, MAX_BITS + 1):
        raise ValueError(f"bits is {bits}, not 1 to {MAX_BITS}")
    count = 2 ** (bits - 1)
    # Start where the ideal point density puts the levels.
    half = source.companded(0.5 - (np.arange(count) + 0.5) / (2 * count))
    for _ in range(_ROUNDS):
        edges, mass, means = _cells(source, half)
        residual = means - half
        if np.abs(residual).max() < _TOLERANCE:
            break
        half = _newton(source, half, edges, mass, means)
    else:
        raise CalibrationError(f"Lloyd-Max levels of {source.name} at {bits} bits: no fixed point")
    _, mass, means = _cells(source, half)
    return np.concatenate((-half[::-1], half)), float(1.0 - 2 * np.sum(mass * means**2))


def _cells(source: Source, half: Array) -> tuple[Array, Array, Array]:
    """Boundaries [m + 1], probabilities [m] and means [m] of the cells of the positive levels."""
    edges = np.concatenate(([0.0], (half[1:] + half[:-1]) / 2, [source.end]))
    mass = -np.diff(source.tail(edges))
    return edges, mass, -np.diff(source.first(edges)) / mass


def _newton(source: Source, half: Array, edges: Array, mass: Array, means: Array) -> Array:
    """A step of Newton's method; of Lloyd's own iteration where that would cross levels."""
    density = source.density(edges[:-1])
    low = density * (means - edges[:-1]) / mass / 2  # d mean / d lower neighbour
    high = np.zeros_like(half)
    high[:-1] = density[1:] * (edges[1:-1] - means[:-1]) / mass[:-1] / 2
    low[0] = 0.0  # the boundary at 0 does not move
    jacobian = np.zeros((3, len(half)))
    jacobian[0, 1:], jacobian[1], jacobian[2, :-1] = high[:-1], low + high - 1, low[1:]
    moved: Array = half - solve_banded((1, 1), jacobian, means - half)
    ordered = moved[0] > 0 and np.all(np.diff(moved) > 0) and moved[-1] < source.end
    return moved if ordered else means


@cache
def _lloyd_max(bits: int) -> tuple[tuple[float, ...], float]:
    levels, error = solve(gaussian(), bits)
    return tuple(levels.tolist()), error


def lloyd_max(bits: int) -> tuple[Array, float]:
    """Levels float64 [2**bits] and mean squared error of the Gaussian, as `solve` gives them."""
    levels, error = _lloyd_max(bits)
    return np.array(levels), error


def distortions() -> Array:
    """Mean squared error at 0 to 8 bits, float64 [9]; no bits: the variance, 1."""
    return np.array([1.0] + [lloyd_max(bits)[1] for bits in range(1, MAX_BITS + 1)])


def fit() -> Codebook:
    """The artifact: levels for 1 to 8 bits, for all layers alike."""
    levels = {b: lloyd_max(b)[0].astype(np.float32) for b in range(1, MAX_BITS + 1)}
    return Codebook(distribution="gaussian", levels=levels)
