"""Codebooks against published errors, closed forms and independent integration."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import gammaln

from velox_pack.calibrators import codebooks, scalar_codebooks
from velox_pack.calibrators.scalar_codebooks import coded, empirical, levels_of
from velox_pack.kernels import make_rotation, rotate
from velox_pack.manifests.errors import CalibrationError

# Maximum SNR in dB of Lloyd-Max codes of a Laplacian, as standard tables have it (1 to 7 bits), and
# TurboQuant's errors of a rotated unit vector at 1 to 4 bits (2504.19874), to the digits given.
LAPLACIAN_DB = [3.01, 7.54, 12.64, 18.13, 23.87, 29.74, 35.69]
TURBOQUANT = {1: 0.36, 2: 0.117, 3: 0.034, 4: 0.009}


def test_laplacian_errors_are_the_published_ones() -> None:
    found = [-10 * np.log10(levels_of("laplacian", b)[1]) for b in range(1, 8)]
    np.testing.assert_allclose(found, LAPLACIAN_DB, atol=0.006)
    assert levels_of("laplacian", 1)[1] == pytest.approx(0.5, abs=1e-14)


def test_gaussian_is_that_of_codebooks() -> None:
    for bits in range(1, 9):
        for mine, other in zip(levels_of("gaussian", bits), codebooks.lloyd_max(bits), strict=True):
            np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize("dim", [3, 4, 5, 16, 64, 256])
def test_rotated_unit_vectors_are_exact_in_their_dimension(dim: int) -> None:
    mean_abs = np.exp(gammaln(dim / 2) - gammaln((dim + 1) / 2)) / np.sqrt(np.pi)
    levels, error = levels_of(f"rotated-unit-{dim}", 1)
    assert levels[1] == pytest.approx(np.sqrt(dim) * mean_abs, rel=1e-7)
    assert error == pytest.approx(1 - dim * mean_abs**2, rel=1e-6)
    for bits in range(1, 9):
        levels, error = levels_of(f"rotated-unit-{dim}", bits)
        assert np.all(np.diff(levels) > 0)
        assert levels[-1] < np.sqrt(dim)
        if dim == 3:  # uniform, by Archimedes
            assert error == pytest.approx(4.0**-bits, rel=1e-6)
        assert error < codebooks.lloyd_max(bits)[1]  # bounded, so easier than a Gaussian
    for bits, published in TURBOQUANT.items():
        if dim == 256:
            assert levels_of(f"rotated-unit-{dim}", bits)[1] == pytest.approx(published, rel=0.06)


@pytest.mark.parametrize("source", [scalar_codebooks.laplacian(), scalar_codebooks.rotated_unit(6)])
def test_sources_are_what_they_say(source: codebooks.Source) -> None:
    end = min(source.end, 40.0)
    for x in (0.0, 0.3, 1.1, 2.2):
        point = np.array([x])
        assert source.tail(point)[0] == pytest.approx(quad(source.density, x, end)[0], abs=1e-8)
        first = quad(lambda t: t * source.density(t), x, end)[0]
        assert source.first(point)[0] == pytest.approx(first, abs=1e-8)
    assert 2 * quad(lambda t: t * t * source.density(t), 0, end)[0] == pytest.approx(1, abs=1e-6)
    levels, error = codebooks.solve(source, 3)
    edges = np.concatenate(([-end], (levels[1:] + levels[:-1]) / 2, [end]))
    integral = sum(
        quad(lambda x, c=c: (x - c) ** 2 * source.density(abs(x)), a, b, limit=200)[0]
        for a, b, c in zip(edges[:-1], edges[1:], levels, strict=True)
    )
    assert error == pytest.approx(integral, rel=1e-5)


def test_each_codebook_wins_on_its_own_source() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((40_000, 4))
    samples = {
        "laplacian": rng.laplace(size=100_000) / np.sqrt(2),
        "rotated-unit-4": (2 * x / np.linalg.norm(x, axis=1, keepdims=True)).ravel(),
        "gaussian": x.ravel(),
    }
    for bits in (2, 4):
        for name, values in samples.items():
            errors = {
                other: np.mean((values - coded(values, levels_of(other, bits)[0])) ** 2)
                for other in samples
            }
            assert min(errors, key=lambda n: errors[n]) == name
            assert errors[name] == pytest.approx(levels_of(name, bits)[1], rel=0.05)


@pytest.mark.parametrize("bits", range(1, 9))
def test_empirical_levels_are_near_the_optimum(bits: int) -> None:
    x = np.random.default_rng(1).laplace(size=100_000) / np.sqrt(2)
    levels, error = empirical(x, bits)
    assert error == pytest.approx(np.mean((x - coded(x, levels)) ** 2), rel=1e-9)
    assert error < 1.05 * np.mean((x - coded(x, levels_of("laplacian", bits)[0])) ** 2)


def test_empirical_levels_follow_shape_and_weights() -> None:
    rng = np.random.default_rng(2)
    x = np.concatenate([rng.normal(-3, 0.1, 5000), rng.normal(1, 0.1, 5000)])
    spread = (x - x.mean()) / x.std()
    _, own = empirical(spread, 2)
    gaussian = np.mean((spread - coded(spread, codebooks.lloyd_max(2)[0])) ** 2)
    assert own < 0.1 * gaussian
    right, _ = empirical(x, 2, np.where(x > 0, 1.0, 1e-9))
    assert np.sum(right > 0) >= 3
    for constant in (np.zeros(100), np.repeat([1.0, 2.0], 50)):
        levels, error = empirical(constant, 3)
        assert error == pytest.approx(0, abs=1e-12)
        assert np.all(np.diff(levels.astype(np.float32)) > 0)


def test_bad_input() -> None:
    for bits in (0, 9):
        with pytest.raises(ValueError, match="1 to 8"):
            codebooks.solve(scalar_codebooks.laplacian(), bits)
        with pytest.raises(ValueError, match="1 to 8"):
            empirical(np.arange(5000.0), bits)
    for source in ("cauchy", "rotated-unit-2", "rotated-unit-x"):
        with pytest.raises(ValueError, match=r"source|dimension"):
            scalar_codebooks.fit(source)
    with pytest.raises(CalibrationError, match="7 samples"):
        empirical(np.arange(7.0), 1)
    with pytest.raises(CalibrationError, match="not finite"):
        empirical(np.full(100, np.nan), 1)
    with pytest.raises(ValueError, match="weights"):
        empirical(np.arange(100.0), 1, np.zeros(100))


def test_artifacts_say_what_they_are_for() -> None:
    book = scalar_codebooks.fit("rotated-unit-64")
    assert book.parameters() == {"distribution": "rotated-unit-64"}
    assert set(book.to_tensors()) == {f"levels_{b}" for b in range(1, 9)}
    x = np.random.default_rng(0).standard_normal(1000)
    own = scalar_codebooks.fit_samples({2: (x, np.ones(1000)), 3: (x, np.ones(1000))})
    assert own.parameters() == {"distribution": "empirical"}
    assert set(own.to_tensors()) == {"levels_2", "levels_3"}


def test_trained_values_held_out_beat_plain_rounding_at_fewer_bits(demo: Any) -> None:
    """3 bits and a norm (3.25) against mlx's affine 3 bits group 64 (3.5)."""
    found: dict[str, list[float]] = {"unit": [], "laplacian": [], "affine": []}

    def hook(c: Any) -> None:
        x = c.values[:, 4:]
        turned = np.array(rotate(x, make_rotation(x.shape[-1], 0)))
        size = np.linalg.norm(turned, axis=-1, keepdims=True) / np.sqrt(x.shape[-1])
        for name, source in (("unit", "rotated-unit-64"), ("laplacian", "laplacian")):
            error = turned - size * coded(turned / size, levels_of(source, 3)[0])
            found[name].append(np.square(error).sum() / np.square(turned).sum())
        plain = mx.dequantize(*mx.quantize(x, group_size=64, bits=3), group_size=64, bits=3)
        found["affine"].append((mx.square(x - plain).sum() / mx.square(x).sum()).item())

    demo.streaming().run(demo.heldout, hook)
    mean = {name: np.mean(values) for name, values in found.items()}
    assert mean["unit"] < 0.85 * mean["affine"]
    assert mean["unit"] < mean["laplacian"]
    assert mean["unit"] == pytest.approx(levels_of("rotated-unit-64", 3)[1], rel=0.05)
