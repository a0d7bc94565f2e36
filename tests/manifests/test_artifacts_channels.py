"""Channels and tokens that need more: what is refused, kind by kind."""

from typing import Any

import numpy as np
import pytest
from artifact_examples import EXAMPLES, opened

from velox_pack.manifests.errors import BundleError


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("kitty", {"rule": "dog"}, "not one of"),
        ("kitty", {"bits": 9}, "not 0 to 8"),
        ("outliers", {"bits": 0}, "not 1 to 8"),
        ("outliers", {"channels": np.zeros((2, 2, 4), np.uint16)}, "4 of 4 channels"),
        ("gear", {"axis": "head"}, "not 'channel' or 'token'"),
        ("gear", {"outliers": 0.7}, "not 0 to 0.5"),
        ("gear", {"basis": np.zeros((2, 2, 4, 5), np.float16)}, "5 directions of 4"),
        ("sinks", {"skip_first": -1}, "below 0"),
        ("sinks", {"least": 2.0}, "not 0 to 1"),
    ],
)
def test_parameters_that_do_not_fit(kind: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(BundleError, match=message):
        opened(EXAMPLES[kind], **change)


@pytest.mark.parametrize(
    ("kind", "role", "fault", "message"),
    [
        ("kitty", "order", lambda a: a * 0, "every channel once"),
        ("kitty", "widths", lambda a: a[..., ::-1].copy(), "rise along the order"),
        ("kitty", "deviation", lambda a: -a, "0 or below"),
        ("kitty", "sensitivity", lambda a: -a, "negative"),
        ("outliers", "channels", lambda a: a + np.uint16(1), "does not exist"),
        ("outliers", "channels", lambda a: a[..., ::-1].copy(), "not ascending"),
        ("outliers", "mean", lambda a: a * np.float32(np.inf), "NaN or infinity"),
        ("gear", "basis", lambda a: a * np.float16(2), "orthonormal"),
        ("gear", "captured", lambda a: -a, "negative"),
        ("sinks", "statistic", lambda a: a + np.uint8(4), "none of"),
        ("sinks", "recall", lambda a: a + 1, "within 0 and 1"),
        ("sinks", "keys", lambda a: a * 0, "0 or below"),
    ],
)
def test_values_that_no_fit_may_return(kind: str, role: str, fault: Any, message: str) -> None:
    changed = {role: fault(EXAMPLES[kind].to_tensors()[role])}
    with pytest.raises(ValueError, match=message):
        opened(EXAMPLES[kind], **changed).check_values()


def test_heads_share_the_sum_of_widths() -> None:
    widths = EXAMPLES["kitty"].to_tensors()["widths"].copy()
    widths[0, 0] = 2
    with pytest.raises(ValueError, match="heads differ"):
        opened(EXAMPLES["kitty"], widths=widths).check_values()
