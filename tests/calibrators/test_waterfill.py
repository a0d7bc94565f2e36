from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from velox_pack.calibrators.codebooks import distortions
from velox_pack.calibrators.waterfill import error, spend, widths


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=64), st.floats(0, 8))
def test_the_total_is_exact_and_widths_never_rise(values: list[float], bits: float) -> None:
    variances = np.sort(np.array(values))[::-1]
    result, achieved = widths(variances, bits, word=1)
    assert result.sum() == round(bits * len(values)) == round(achieved * len(values))
    assert np.all(np.diff(result.astype(int)) <= 0)
    assert result.max() <= 8


def test_is_the_optimum_among_all_integer_widths() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        weights = np.sort(np.exp(2 * rng.standard_normal(4)))[::-1]
        total = int(rng.integers(0, 17))
        best = min(
            (weights @ distortions()[list(w)], w)
            for w in product(range(9), repeat=4)
            if sum(w) == total
        )
        assert weights @ distortions()[spend(weights, total)] == pytest.approx(best[0])


def test_rows_fill_whole_words() -> None:
    variances = np.sort(np.random.default_rng(1).exponential(size=(3, 64)), axis=1)[:, ::-1]
    for bits in (1.9, 2.0, 2.5, 3.3):
        result, achieved = widths(variances, bits)
        assert result.sum() % 32 == 0
        assert abs(achieved - bits) <= 0.25
    assert widths(np.ones((1, 64)), 3.5)[0].tolist() == [4] * 32 + [3] * 32


def test_beats_equal_widths_on_uneven_variances_only() -> None:
    uneven = np.exp(-np.arange(64) / 8)
    three = np.full(64, 3, np.uint8)
    given_, _ = widths(uneven, 3)
    assert error(uneven, given_) < 0.4 * error(uneven, three)
    np.testing.assert_array_equal(widths(np.ones(64), 3)[0], three)


@pytest.mark.parametrize(
    ("variances", "bits"),
    [([1.0, 2.0], 1), ([1.0, -1.0], 1), ([np.nan, 1.0], 1), ([2.0, 1.0], 9), ([2.0, 1.0], -1)],
)
def test_bad_input(variances: list[float], bits: float) -> None:
    with pytest.raises(ValueError, match=r"variances|bits"):
        widths(np.array(variances), bits, word=1)
