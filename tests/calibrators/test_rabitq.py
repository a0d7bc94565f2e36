"""The estimate is unbiased and within the paper's bound, codes are the best of the grid, and coarse
centroids find planted clusters where one mean loses."""

from itertools import product
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from scipy.stats import beta

from velox_pack.calibrators import rabitq
from velox_pack.calibrators.capture import LayerStatistics, Moments
from velox_pack.calibrators.codebooks import lloyd_max
from velox_pack.calibrators.stream import Captured
from velox_pack.calibrators.vector_tools import random_rotation, rotation_matrix
from velox_pack.kernels import make_rotation, rotate
from velox_pack.manifests.errors import CalibrationError

BITS = (1, 2, 3, 4)


def statistics(values: np.ndarray) -> LayerStatistics:
    """A layer whose values are given, [H, S, D] float32."""
    wide = values.astype(np.float64)
    moments = Moments(
        values.shape[1],
        wide.sum(axis=1),
        np.swapaxes(wide, 1, 2) @ wide,
        np.abs(wide).max(axis=1),
    )
    return LayerStatistics(
        index=0,
        rotated=False,
        queries=moments,
        keys=moments,
        keys_before=moments,
        values=moments,
        sample_keys=values,
        sample_keys_before=values,
        sample_values=values,
        sample_sequences=np.zeros(values.shape[:2], int),
        sample_positions=np.zeros(values.shape[:2], int),
    )


def heads(demo: Any) -> tuple[np.ndarray, np.ndarray]:
    """Unit residuals and queries of a trained layer, [n, 64] each."""
    layer = demo.statistics[1]
    keys = (layer.sample_keys - layer.keys.mean[:, None]).reshape(-1, 64)
    rng = np.random.default_rng(0)
    root = np.linalg.cholesky(layer.queries.uncentred[0] + 1e-6 * np.eye(64))
    queries = rng.standard_normal((len(keys), 64)) @ root.T
    return tuple(x / np.linalg.norm(x, axis=1, keepdims=True) for x in (keys, queries))  # type: ignore[return-value]


def estimates(
    o: np.ndarray, q: np.ndarray, bits: int, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Estimated and true <o, q> of unit rows, and the cosines, for one random rotation."""
    rotation = rotation_matrix(*random_rotation(o.shape[1], rabitq.ROUNDS, seed))
    codes, scale, cosine = rabitq.quantize(o @ rotation, bits)
    found = scale * np.einsum("nd,nd->n", rabitq.unit(codes, bits), q @ rotation)
    return found, np.einsum("nd,nd->n", o, q), cosine


def spiky(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Vectors with nearly all their length in one or two coordinates: the hard case for grids."""
    rng = np.random.default_rng(3)
    o, q = rng.standard_normal((2, n, 64)) * 0.05
    o[np.arange(n), rng.integers(64, size=n)] += 1
    q[np.arange(n), rng.integers(64, size=n)] += 1
    return tuple(x / np.linalg.norm(x, axis=1, keepdims=True) for x in (o, q))  # type: ignore[return-value]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("kind", ["trained", "spiky"])
def test_error_bound_of_the_paper(kind: str, bits: int, demo: Any) -> None:
    """Equations 58 to 62: the error exceeds its bound no oftener than a coordinate of a random unit
    vector in D - 1 dimensions exceeds e / sqrt(D - 1), whose tail is a beta distribution's."""
    o, q = heads(demo) if kind == "trained" else spiky(400)
    d = o.shape[1]
    rounds = [estimates(o, q, bits, seed) for seed in range(40)]
    found, true, cosine = (np.concatenate(x) for x in zip(*rounds, strict=True))
    unit = np.sqrt(1 / cosine**2 - 1) / np.sqrt(d - 1)
    for e in (1.0, 1.9, 3.0, 4.0):
        exceeded = np.mean(np.abs(found - true) > unit * e)
        allowed = beta.sf(e**2 / (d - 1), 0.5, (d - 2) / 2)  # of a squared coordinate
        assert exceeded <= 1.1 * allowed + 5e-4
    assert np.mean(np.abs(found - true) > unit * 0.5) > 0.3  # the bound is not empty


@pytest.mark.parametrize("bits", BITS)
def test_inner_products_are_unbiased(bits: int, demo: Any) -> None:
    """Averaged over rotations the estimate is the truth; that of the nearest vector is not."""
    o, _ = heads(demo)
    o = o[:64]
    q = o + 0.2 * np.random.default_rng(1).standard_normal(o.shape) / 8  # inner products near 1
    q /= np.linalg.norm(q, axis=1, keepdims=True)
    runs = [estimates(o, q, bits, seed) for seed in range(400)]
    bias = np.mean([found - true for found, true, _ in runs], axis=0)
    shrunk = np.mean([found * cosine**2 - true for found, true, cosine in runs], axis=0)
    noise = np.std([found - true for found, true, _ in runs]) / np.sqrt(400)
    assert abs(bias.mean()) < 4 * noise / np.sqrt(len(o))
    assert shrunk.mean() < -0.002
    if bits == 1:
        assert shrunk.mean() < -0.3


@pytest.mark.parametrize("bits", [2, 3])
def test_codes_have_the_greatest_cosine_of_all_grid_points(bits: int) -> None:
    rows = np.random.default_rng(0).standard_normal((50, 5))
    rows[0, :2] = 0.0
    grid = np.array(list(product(range(2**bits), repeat=5)), np.uint8)
    points = rabitq.unit(grid, bits)
    best = (rows @ points.T).max(axis=1) / np.linalg.norm(rows, axis=1)
    codes, scale, cosine = rabitq.quantize(rows, bits)
    found = np.einsum("nd,nd->n", rows, rabitq.unit(codes, bits)) / np.linalg.norm(rows, axis=1)
    np.testing.assert_allclose(found, best, atol=1e-12)
    np.testing.assert_allclose(cosine, best, atol=1e-12)
    np.testing.assert_allclose(scale, np.linalg.norm(rows, axis=1) / best, rtol=1e-12)


def test_one_bit_is_the_sign_and_zero_is_zero() -> None:
    rows = np.array([[1.0, -2.0, 0.5, -0.1], [0.0, 0.0, 0.0, 0.0]])
    codes, scale, cosine = rabitq.quantize(rows, 1)
    np.testing.assert_array_equal(codes[0], [1, 0, 1, 0])
    assert (scale[1], cosine[1]) == (0.0, 1.0)
    for bits in BITS:
        assert rabitq.quantize(rows, bits)[0].max() < 2**bits
    with pytest.raises(ValueError, match="bits is 5"):
        rabitq.quantize(rows, 5)


def clustered(rng: np.random.Generator, centres: np.ndarray, n: int) -> np.ndarray:
    noise = 0.3 * rng.standard_normal((2, n, centres.shape[2]))
    at = rng.integers(centres.shape[1], size=(2, n))
    return np.asarray(np.take_along_axis(centres, at[:, :, None], 1) + noise, np.float32)


def rotated_levels(x: np.ndarray, mean: np.ndarray, bits: int) -> np.ndarray:
    """TurboQuant's way: mean and norm apart, rotation, Lloyd-Max levels."""
    d = x.shape[-1]
    rotation = np.array(rotate(mx.eye(d), make_rotation(d, 0)))
    norm = np.linalg.norm(x - mean, axis=-1, keepdims=True) / np.sqrt(d)
    levels = lloyd_max(bits)[0]
    codes = np.searchsorted((levels[1:] + levels[:-1]) / 2, (x - mean) @ rotation / norm)
    return np.asarray(levels[codes] * norm @ rotation.T + mean)


def test_planted_clusters() -> None:
    """Sixteen clusters: their centroids are found, and a code around one mean loses clearly."""
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((2, 16, 64))
    layer = statistics(clustered(rng, centres, 1500))
    (artifact,) = rabitq.fit({0: layer}, "values", centroids=16)
    assert artifact.part == "values"
    assert not artifact.before_rope
    for h in range(2):
        distance = np.linalg.norm(artifact.centroids[0, h][:, None] - centres[h][None], axis=-1)
        assert distance.min(axis=0).max() < 0.8  # of 11.3 between two centres
    x = clustered(rng, centres, 300)
    plain = rotated_levels(x, layer.values.mean[:, None], 2)
    lost = np.square(plain - x).sum()
    for bits, unbiased in ((1, False), (1, True), (2, True)):
        codes = rabitq.encode(artifact, 0, x, bits, unbiased=unbiased)
        decoded = rabitq.decode(artifact, 0, codes)
        # 1 bit and a centroid against 2 bits: 1.19 bits (and a norm) against 2 (and a norm).
        assert np.square(decoded - x).sum() < 0.6 * lost
    assert rabitq.bits_per_element(artifact, 1) == 1 + (4 + 8) / 64


def test_nearest_scale_is_nearer_and_unbiased_scale_is_longer() -> None:
    rng = np.random.default_rng(0)
    layer = statistics(rng.standard_normal((2, 600, 64)).astype(np.float32))
    (artifact,) = rabitq.fit({0: layer}, "values", centroids=1)
    np.testing.assert_allclose(artifact.centroids[0, :, 0], layer.values.mean, atol=2e-3)
    x = rng.standard_normal((2, 200, 64))
    decoded = [
        rabitq.decode(artifact, 0, rabitq.encode(artifact, 0, x, 1, unbiased=u))
        for u in (True, False)
    ]
    far, near = (np.square(y - x).sum() / np.square(x).sum() for y in decoded)
    assert near == pytest.approx(1 - 2 / np.pi, abs=0.02)
    assert far == pytest.approx(np.pi / 2 - 1, abs=0.03)


def test_trained_keys_beat_rotated_levels_at_equal_bits(demo: Any) -> None:
    """Held-out keys before RoPE at 2 bits: centroid and scale cost 13 bits, the norm 8."""
    (artifact,) = rabitq.fit(demo.statistics, "keys", centroids=32)
    assert artifact.before_rope
    ratios: list[float] = []

    def hook(c: Captured) -> None:
        keys = np.array(c.keys_before, np.float64)[:, 4:]
        codes = rabitq.encode(artifact, c.layer, keys, 2)
        decoded = rabitq.decode(artifact, c.layer, codes)
        plain = rotated_levels(keys, demo.statistics[c.layer].keys_before.mean[:, None], 2)
        ratios.append(np.square(decoded - keys).sum() / np.square(plain - keys).sum())

    demo.streaming().run(demo.heldout, hook)
    # 5 bits more for 64 coordinates are worth a factor of 2 ** (-2 * 5 / 64) = 0.90.
    assert max(ratios) < 0.8


@pytest.mark.parametrize("width", [64, 80, 96, 128, 7])
def test_the_stored_rotation_is_orthogonal(width: int) -> None:
    signs, mix = random_rotation(width, 3, 5)
    matrix = rotation_matrix(signs, mix)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(width), atol=1e-5)
    again = mx.eye(width)
    for n in range(3):
        again = rotate(again, make_rotation(width, 5 + n))
    np.testing.assert_array_equal(matrix, np.array(again).astype(np.float64))


def test_same_input_same_bytes_and_bad_options(demo: Any) -> None:
    few = {0: demo.statistics[0]}
    once, again = (rabitq.fit(few, "keys", centroids=8, seed=1)[0] for _ in range(2))
    for role, tensor in once.to_tensors().items():
        assert tensor.tobytes() == again.to_tensors()[role].tobytes()
    for count in (0, 3, 512):
        with pytest.raises(CalibrationError, match="power of two"):
            rabitq.fit(few, "keys", centroids=count)
    layer = statistics(np.zeros((1, 10, 4), np.float32))
    with pytest.raises(CalibrationError, match="at least 16 vectors"):
        rabitq.fit({0: layer}, "values", centroids=16)
