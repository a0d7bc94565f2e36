from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from artifact_examples import EXAMPLES, opened

from velox_pack.manifests.errors import BundleError


def test_undo_may_be_a_matrix_for_each_head() -> None:
    fitted = EXAMPLES["joint-spectral"]
    small = fitted.to_tensors()["undo"]
    again = opened(fitted, undo=np.eye(4, dtype=np.float16) * small)
    again.check_values()
    with pytest.raises(BundleError, match="3 wide"):
        opened(fitted, undo=np.ones((2, 2, 3, 3), np.float16))


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("joint-spectral", {"part": "queries"}, "not 'keys' or 'values'"),
        ("joint-spectral", {"metric": "euclid"}, "not one of"),
        ("joint-spectral", {"power": 2.0}, "not 0 to 1"),
        ("joint-spectral", {"group": 1}, "1 groups of 1 heads"),
        ("nuq", {"axis": "head"}, "not 'channel' or 'token'"),
        ("nuq", {"bits": 3}, "4 levels, 3 edges for 3 bits"),
        ("nuq", {"outliers": 0.5}, "not 0 to 0.5"),
        ("nuq", {"exact_first": -1}, "below 0"),
        ("lowrank", {"group": 3}, "8 coordinates for 3 heads"),
    ],
)
def test_parameters_that_do_not_fit(kind: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(BundleError, match=message):
        opened(EXAMPLES[kind], **change)


@pytest.mark.parametrize(
    ("kind", "role", "fault", "message"),
    [
        ("joint-spectral", "undo", lambda a: a * np.float16(1.1), "take the basis back"),
        ("joint-spectral", "variance", lambda a: -a, "negative"),
        ("joint-spectral", "cost", lambda a: a[..., ::-1].copy(), "rises"),
        ("joint-spectral", "mean", lambda a: a * np.float32(np.nan), "NaN"),
        ("nuq", "levels", lambda a: a[..., ::-1].copy(), "ascending"),
        ("nuq", "high", lambda a: a - 3, "not above low"),
        ("lowrank", "basis", lambda a: a * np.float16(2), "orthonormal"),
        ("lowrank", "widths", lambda a: a + np.uint8(6), "above 8"),
        ("lowrank", "variance", lambda a: a[..., ::-1].copy(), "descending"),
    ],
)
def test_values_that_no_fit_may_return(kind: str, role: str, fault: Any, message: str) -> None:
    changed = {role: fault(EXAMPLES[kind].to_tensors()[role])}
    with pytest.raises(ValueError, match=message):
        opened(EXAMPLES[kind], **changed).check_values()
