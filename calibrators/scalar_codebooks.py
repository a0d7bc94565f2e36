"""Lloyd-Max codebooks for other sources than a Gaussian: Laplacian, rotated unit vector, samples.

A unit vector of dimension d that is rotated at random has coordinates x of density proportional to
(1 - x^2)^((d - 3) / 2): a Beta distribution, x^2 ~ Beta(1/2, (d - 1)/2), which is what TurboQuant
(2504.19874, from the description in DESIGN) solves Lloyd-Max for. Here coordinates are scaled by
sqrt(d), so that every source has variance 1 and `Codebook` means the same for all of them.

Levels are the fixed point of Lloyd's iteration (IEEE Trans. Inf. Theory 28, 1982): for densities by
Newton's method (`codebooks.solve`), for samples by the iteration itself, which on sorted values
costs a search and two differences of running sums a round.
"""

from collections.abc import Mapping
from functools import cache

import numpy as np
from scipy.special import betainc, betaincinv, gammaln

from velox_pack.calibrators.codebooks import MAX_BITS, Source, gaussian, solve
from velox_pack.manifests.artifacts import Codebook
from velox_pack.manifests.errors import CalibrationError

Array = np.ndarray


def laplacian() -> Source:
    """Density exp(-sqrt(2) |x|) / sqrt(2)."""
    root = np.sqrt(2.0)

    def first(x: Array) -> Array:
        finite = np.where(np.isfinite(x), x, 0.0)
        value: Array = (finite / 2 + 1 / (2 * root)) * np.exp(-root * x)
        return value

    return Source(
        "laplacian",
        lambda x: np.exp(-root * x) / root,
        lambda x: np.exp(-root * x) / 2,
        first,
        lambda u: -3 / root * np.log(2 * u),
        np.inf,
    )


def rotated_unit(dim: int) -> Source:
    """sqrt(dim) times a coordinate of a random unit vector. Raises ValueError for dim < 3.

    In two dimensions the density is infinite at its ends (arcsine), in one it is two points.
    """
    if dim < 3:
        raise ValueError(f"a rotated unit vector of dimension {dim}, not 3 or more")
    scale, half = np.sqrt(float(dim)), (dim - 1) / 2
    constant = np.exp(gammaln(dim / 2) - gammaln(half)) / np.sqrt(np.pi)

    def room(x: Array) -> Array:
        """1 - (x / scale)^2."""
        left: Array = np.clip((scale - x) * (scale + x) / dim, 0.0, 1.0)
        return left

    wide = dim / 3 + 2  # the cube root of the density is that of this dimension
    return Source(
        f"rotated-unit-{dim}",
        lambda x: constant / scale * room(x) ** ((dim - 3) / 2),
        lambda x: betainc(half, 0.5, room(x)) / 2,
        lambda x: constant * scale / (dim - 1) * room(x) ** half,
        lambda u: scale * np.sqrt(1 - betaincinv((wide - 1) / 2, 0.5, 2 * u)),
        float(scale),
    )


@cache
def _solved(source: str, bits: int) -> tuple[tuple[float, ...], float]:
    levels, error = solve(_by_name(source), bits)
    return tuple(levels.tolist()), error


def _by_name(name: str) -> Source:
    if name == "gaussian":
        return gaussian()
    if name == "laplacian":
        return laplacian()
    kind, _, dim = name.rpartition("-")
    if kind != "rotated-unit" or not dim.isdigit():
        raise ValueError(f"{name!r} is no source; there are gaussian, laplacian, rotated-unit-<d>")
    return rotated_unit(int(dim))


def levels_of(source: str, bits: int) -> tuple[Array, float]:
    """Levels float64 [2**bits] and mean squared error of "laplacian", "rotated-unit-64", ..."""
    levels, error = _solved(source, bits)
    return np.array(levels), error


def fit(source: str) -> Codebook:
    """The artifact of a named source: levels for 1 to 8 bits, for all layers alike."""
    levels = {b: levels_of(source, b)[0].astype(np.float32) for b in range(1, MAX_BITS + 1)}
    return Codebook(distribution=source, levels=levels)


def fit_samples(
    samples: Mapping[int, tuple[Array, Array]], distribution: str = "empirical"
) -> Codebook:
    """The artifact of measured coordinates: for some of 1 to 8 bits, (values [n], weights [n]).

    Values are coordinates divided by their standard deviation, each set those that get that many
    bits; weights are what an error there costs (its standard deviation squared, for plain mean
    squared error). Raises CalibrationError as `empirical` does.
    """
    levels = {b: empirical(x, b, w)[0].astype(np.float32) for b, (x, w) in sorted(samples.items())}
    return Codebook(distribution=distribution, levels=levels)


def empirical(
    samples: Array, bits: int, weights: Array | None = None, *, rounds: int = 200
) -> tuple[Array, float]:
    """Levels float64 [2**bits] of least weighted squared error on `samples` [n], and that error.

    Lloyd's iteration from where the ideal point density, the cube root of the samples' own, puts
    the levels; a level without samples moves into the cell that has the largest error. Raises
    CalibrationError for samples that are not finite or fewer than four a level, ValueError for
    bits out of 1 to 8 and for weights that are negative or all 0.
    """
    if bits not in range(1, MAX_BITS + 1):
        raise ValueError(f"bits is {bits}, not 1 to {MAX_BITS}")
    count = 2**bits
    x = np.asarray(samples, np.float64).ravel()
    w = np.ones_like(x) if weights is None else np.asarray(weights, np.float64).ravel()
    if x.size < 4 * count or not np.all(np.isfinite(x)):
        raise CalibrationError(f"{x.size} samples, or not finite, for {count} levels")
    if w.shape != x.shape or w.min() < 0 or not 0 < w.sum() < np.inf:
        raise ValueError("weights must be as many as samples, not negative, and not all 0")
    order = np.argsort(x, kind="stable")
    x, w = x[order], w[order]
    sums = [np.concatenate(([0.0], np.cumsum(w * x**p))) for p in range(3)]
    mean = sums[1][-1] / sums[0][-1]
    deviation = np.sqrt(max(sums[2][-1] / sums[0][-1] - mean**2, 1e-30))
    levels = _companded(x, sums[0], count)
    for _ in range(rounds):
        mass, first, second = _sums(x, sums, levels)
        held = mass > 0
        moved = np.where(held, first / np.where(held, mass, 1.0), levels)
        spread = np.where(held, second - first * moved, -1.0)
        for empty in np.flatnonzero(~held):
            worst = int(np.argmax(spread))
            if spread[worst] <= 0:
                break
            moved[empty] = moved[worst] + np.sqrt(spread[worst] / mass[worst]) / 2
            spread[worst] = -1.0
        moved.sort()
        if np.abs(moved - levels).max() < 1e-9 * deviation:
            break
        levels = moved
    mass, first, second = _sums(x, sums, levels)
    error = np.sum(second - 2 * levels * first + levels**2 * mass) / sums[0][-1]
    return _apart(levels), max(float(error), 0.0)


def _apart(levels: Array) -> Array:
    """Levels that coincide (fewer distinct values than levels) moved up by next to nothing."""
    least = 1e-6 * max(float(np.abs(levels).max()), 1e-6)
    steps = np.arange(len(levels)) * least
    apart: Array = np.maximum.accumulate(levels - steps) + steps
    return apart


def _companded(x: Array, weight: Array, count: int) -> Array:
    """Start for `count` levels on sorted samples [n] of running weight [n + 1].

    The density is that of cells of equal weight, a few for each level.
    """
    cells = min(32 * count, len(x) // 4)
    places = np.interp(np.linspace(0, weight[-1], cells + 1), weight, np.arange(len(x) + 1))
    edges = np.interp(places, np.arange(len(x)) + 0.5, x)
    # A cell of mass m and width h holds a share of the levels like h * (m / h)^(1/3).
    ideal = np.concatenate(([0.0], np.cumsum(np.diff(edges) ** (2 / 3))))
    levels: Array = np.interp((np.arange(count) + 0.5) / count * ideal[-1], ideal, edges)
    return levels


def _sums(x: Array, sums: list[Array], levels: Array) -> list[Array]:
    """Weight, first and second moment [k] of the sorted samples nearest to each level."""
    edges = np.searchsorted(x, (levels[1:] + levels[:-1]) / 2)
    bounds = np.concatenate(([0], edges, [len(x)]))
    return [np.diff(s[bounds]) for s in sums]


def coded(x: Array, levels: Array) -> Array:
    """Each value of `x` replaced by the nearest of the ascending `levels`."""
    found: Array = levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, x)]
    return found
