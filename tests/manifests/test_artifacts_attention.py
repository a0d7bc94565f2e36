from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from artifact_examples import EXAMPLES, opened

from velox_pack.manifests.artifacts_attention import Budgets
from velox_pack.manifests.errors import BundleError


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("expected-attention", {"horizon": 0}, "is not positive"),
        ("expected-attention", {"scale": -1.0}, "is not positive"),
        ("expected-attention", {"weights": np.ones((2, 3, 3), np.float32)}, "4 query heads for 3"),
        ("expected-attention", {"factor": np.ones((2, 4, 6, 7), np.float32)}, "7 directions of 6"),
        ("expected-attention", {"dims": 6}, "turns 6 of 6 coordinates with 2"),
        ("attention-filter", {"inv_freq": np.ones((2, 4), np.float32), "dims": 8}, "turns 8 of 6"),
        ("attention-filter", {"frame": "still"}, "not 'moving' or 'fixed'"),
        ("attention-filter", {"lead": -1}, "below 0"),
        ("budgets", {"method": "guess"}, "'guess'"),
    ],
)
def test_parameters_that_do_not_fit(kind: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(BundleError, match=message):
        opened(EXAMPLES[kind], **change)


@pytest.mark.parametrize(
    ("kind", "role", "fault", "message"),
    [
        ("expected-attention", "mean", lambda a: a * np.float32(np.nan), "NaN"),
        ("filter-report", "correlation", lambda a: a + np.float32(1), "within -1 and 1"),
        ("filter-report", "positive", lambda a: a - np.float32(1), "within 0 and 1"),
        ("budgets", "shares", lambda a: -a, "negative"),
        ("budgets", "shares", lambda a: a + np.float32(1), "more keys than there are"),
        ("budgets", "shares", lambda a: a * np.float32(0.9), "mean 1"),
        ("budgets", "ratios", lambda a: a[::-1].copy(), "do not rise"),
        ("budgets", "ratios", lambda a: a * np.float32(2), "within 0 and 1"),
    ],
)
def test_values_that_no_fit_may_return(kind: str, role: str, fault: Any, message: str) -> None:
    changed = {role: fault(EXAMPLES[kind].to_tensors()[role])}
    with pytest.raises(ValueError, match=message):
        opened(EXAMPLES[kind], **changed).check_values()


def test_budgets_between_ratios() -> None:
    fitted = opened(EXAMPLES["budgets"])
    assert isinstance(fitted, Budgets)
    np.testing.assert_allclose(fitted.at(0.25), [[1.25, 0.75], [1, 1]])
    np.testing.assert_allclose(fitted.at(0.25 * 2**0.5), [[1.375, 0.625], [1.125, 0.875]])
    np.testing.assert_allclose(fitted.at(0.001), [[1.5, 0.5], [1, 1]])  # the nearest end
    np.testing.assert_allclose(fitted.at(1), np.ones((2, 2)))
