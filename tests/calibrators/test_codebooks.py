import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm

from velox_pack.calibrators.codebooks import distortions, fit, lloyd_max

# Max (1960), table I: 2, 4, 8, 16, 32 levels.
PUBLISHED = {1: 0.3634, 2: 0.1175, 3: 0.03454, 4: 0.009497, 5: 0.002499}


@pytest.mark.parametrize("bits", PUBLISHED)
def test_errors_are_the_published_ones(bits: int) -> None:
    # Max's own figures were computed by hand machine to about 1 in 500.
    assert lloyd_max(bits)[1] == pytest.approx(PUBLISHED[bits], rel=3e-3)
    if bits == 1:
        assert lloyd_max(1)[1] == pytest.approx(1 - 2 / np.pi, abs=1e-14)


@pytest.mark.parametrize("bits", range(1, 9))
def test_levels_are_a_fixed_point_of_lloyds_iteration(bits: int) -> None:
    levels, error = lloyd_max(bits)
    assert levels.shape == (2**bits,)
    np.testing.assert_array_equal(levels, -levels[::-1])
    edges = np.concatenate(([-np.inf], (levels[1:] + levels[:-1]) / 2, [np.inf]))
    half = 2 ** (bits - 1)  # the upper half, where tails lose no digits
    low, high = edges[half:-1], edges[half + 1 :]
    means = (norm.pdf(low) - norm.pdf(high)) / (norm.sf(low) - norm.sf(high))
    np.testing.assert_allclose(levels[half:], means, atol=1e-12)
    if bits <= 4:
        cells = zip(edges[:-1], edges[1:], levels, strict=True)
        integral = sum(
            quad(lambda x, c=c: (x - c) ** 2 * norm.pdf(x), a, b)[0] for a, b, c in cells
        )
        assert error == pytest.approx(integral, rel=1e-7)


def test_the_artifact_and_its_order() -> None:
    artifact = fit()
    assert artifact.parameters() == {"distribution": "gaussian"}
    assert set(artifact.to_tensors()) == {f"levels_{b}" for b in range(1, 9)}
    gains = -np.diff(distortions())
    assert np.all(np.diff(gains) < 0)  # each bit gains less: greedy water-filling is the optimum
    for bits in (0, 9):
        with pytest.raises(ValueError, match="1 to 8"):
            lloyd_max(bits)


def test_beats_levels_at_equal_distances() -> None:
    x = np.random.default_rng(0).standard_normal(200_000)
    levels, error = lloyd_max(3)
    uniform = np.linspace(-2.5, 2.5, 8)

    def coded(table: np.ndarray) -> float:
        codes = np.searchsorted((table[1:] + table[:-1]) / 2, x)
        return float(np.mean((x - table[codes]) ** 2))

    assert coded(levels) == pytest.approx(error, rel=0.02)
    assert coded(levels) < 0.95 * coded(uniform)
