"""k-means finds planted clusters where random centroids and a uniform grid lose; same bytes."""

import numpy as np
import pytest

from velox_pack.calibrators import product_quantizer
from velox_pack.calibrators.product_quantizer import decode, encode, fit, kmeans, nearest
from velox_pack.manifests.errors import CalibrationError

CLUSTERS, SPREAD = 64, 0.05


def planted(n: int, sub: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Points [n, sub] around 64 centres, some of them far more often than others."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(1).standard_normal((CLUSTERS, sub)) * 3
    often = np.geomspace(1, 40, CLUSTERS)
    owner = rng.choice(CLUSTERS, n, p=often / often.sum())
    return centres[owner] + SPREAD * rng.standard_normal((n, sub)), centres


def error(points: np.ndarray, centroids: np.ndarray) -> float:
    """Mean squared error of a coordinate."""
    return float(np.square(points - centroids[nearest(points, centroids)]).mean())


@pytest.mark.parametrize("sub", [2, 4, 8])
def test_planted_clusters_are_found(sub: int) -> None:
    points, centres = planted(6000, sub)
    held_out, _ = planted(2000, sub, seed=7)
    found = kmeans(points, CLUSTERS, seed=0)
    assert error(held_out, found) < 2 * error(held_out, centres)
    drawn = points[np.random.default_rng(2).choice(len(points), CLUSTERS, replace=False)]
    assert error(held_out, found) < 0.1 * error(held_out, drawn)
    # A uniform grid of as many points over the range of each coordinate.
    side = round(CLUSTERS ** (1 / sub))
    low, high = points.min(axis=0), points.max(axis=0)
    step = (high - low) / side
    cell = np.clip(np.floor((held_out - low) / step), 0, side - 1)
    grid = float(np.square(held_out - (low + (cell + 0.5) * step)).mean())
    assert error(held_out, found) < 0.1 * grid


@pytest.mark.parametrize("sharing", ["layer", "head", "subspace"])
def test_codebooks_beat_levels_on_what_goes_together(sharing: product_quantizer.Sharing) -> None:
    """Pairs of coordinates on a ring: any code of each alone wastes bits on its inside."""
    rng = np.random.default_rng(0)
    angle = rng.random((2, 3000, 8)) * 2 * np.pi
    rows = np.stack([np.cos(angle), np.sin(angle)], axis=-1).reshape(2, 3000, 16)
    books = fit(rows[:, :2000], 2, 4, sharing, 0)
    new = rows[:, 2000:]
    found = np.square(decode(encode(new, books), books) - new).mean()
    levels = kmeans(rows.reshape(-1, 1)[:8000], 4, seed=0)  # the best 2 bits for a coordinate alone
    alone = error(new.reshape(-1, 1), levels)
    assert found < 0.5 * alone


def test_nearest_is_the_nearest_and_ties_go_to_the_lower() -> None:
    rng = np.random.default_rng(0)
    points, centroids = rng.standard_normal((5000, 3)), rng.standard_normal((77, 3))
    far = np.square(points[:, None] - centroids).sum(axis=2)
    found = nearest(points, centroids)
    np.testing.assert_array_equal(found, far.argmin(axis=1))
    assert found.dtype == np.int64
    np.testing.assert_array_equal(nearest(np.zeros((2, 1)), np.array([[1.0], [1.0], [-1.0]])), 0)
    assert nearest(points[:0], centroids).shape == (0,)


def test_each_round_lowers_the_error() -> None:
    points, _ = planted(2000, 4)
    errors = [error(points, kmeans(points, 16, seed=0, iterations=n)) for n in range(8)]
    assert np.all(np.diff(errors) <= 1e-12)
    assert errors[-1] < errors[0]


def test_seeds_are_points_and_far_apart() -> None:
    """Every seed is one of the points, and all clusters get one although some are rare."""
    points, centres = planted(6000, 4)
    seeds = kmeans(points, CLUSTERS, seed=3, iterations=0)
    assert all((points == seed).all(axis=1).any() for seed in seeds)
    assert len(set(nearest(seeds, centres).tolist())) > 0.95 * CLUSTERS


def test_same_bytes_for_the_same_seed() -> None:
    points, _ = planted(3000, 4)
    first = kmeans(points, 32, seed=5)
    assert kmeans(points.copy(order="F"), 32, seed=5).tobytes() == first.tobytes()
    assert kmeans(points.astype(np.float32).astype(np.float64), 32, seed=6).tobytes() != (
        first.tobytes()
    )
    rows = np.random.default_rng(0).standard_normal((2, 2000, 16))
    made = [fit(rows, 4, 5, "layer", 1).tobytes() for _ in range(2)]  # draws some of many points
    assert made[0] == made[1]


def test_a_centroid_without_points_moves_to_the_farthest() -> None:
    points = np.concatenate([np.zeros((10, 2)), np.full((1, 2), 9.0)])
    moved = product_quantizer._means(points, np.zeros(11, np.int64), np.zeros((2, 2)))
    np.testing.assert_array_equal(moved[1], [9.0, 9.0])


def test_what_does_not_fit_is_refused() -> None:
    rows = np.zeros((1, 100, 12))
    for sub, bits in ((3, 4), (8, 4), (4, 3), (4, 9)):
        with pytest.raises(CalibrationError, match=f"sub vectors of {sub} with {bits} bits"):
            fit(rows, sub, bits, "head", 0)
    with pytest.raises(CalibrationError, match="sharing is 'token'"):
        fit(rows, 4, 4, "token", 0)  # type: ignore[arg-type]
    with pytest.raises(CalibrationError, match="needs at least 256 vectors, got 100"):
        fit(rows, 4, 8, "subspace", 0)
    rows[0, 3, 3] = np.inf
    with pytest.raises(CalibrationError, match="NaN or infinity"):
        fit(rows, 4, 4, "head", 0)
