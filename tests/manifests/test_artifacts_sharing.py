"""What a layer takes from another: what is refused, kind by kind."""

from typing import Any

import numpy as np
import pytest
from artifact_examples import EXAMPLES, opened

from velox_pack.manifests.errors import BundleError


def test_merging_without_alignment_needs_no_matrix() -> None:
    one = np.ones((2, 2, 1, 1), np.float16)
    again = opened(EXAMPLES["minicache"], group=1, turn=one, similarity=np.ones((2, 2), np.float32))
    again.check_values()


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("xquant", {"part": "queries"}, "not 'keys' or 'values'"),
        ("xquant", {"axis": "head"}, "not 'channel' or 'token'"),
        ("xquant", {"bits": 9}, "not 1 to 8"),
        ("xquant", {"group": 0}, "groups of 0"),
        ("xquant", {"relax": 0.6}, "not 0 to 0.5"),
        ("prediction", {"group": 1}, "1 groups of 1 heads"),
        ("prediction", {"sources": ["next keys"]}, "are not a list of some of"),
        ("prediction", {"sources": [[]]}, "are not a list of some of"),
        ("correction", {"group_size": 0}, "groups of 0"),
        ("minicache", {"t": 1.5}, "not 0 to 1"),
        ("minicache", {"retained": -0.1}, "not 0 to 1"),
        ("minicache", {"group": 1}, "1 groups of 1 heads"),
    ],
)
def test_parameters_that_do_not_fit(kind: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(BundleError, match=message):
        opened(EXAMPLES[kind], **change)


@pytest.mark.parametrize(
    ("kind", "role", "fault", "message"),
    [
        ("xquant", "partner", lambda a: a + 1, "cannot take the codes"),
        ("xquant", "shared", lambda a: -a, "negative"),
        ("prediction", "previous", lambda a: a + 1, "not a layer before"),
        ("prediction", "inputs", lambda a: a * 0, "0 or below"),
        ("prediction", "bias", lambda a: a * np.float32(np.nan), "NaN"),
        ("correction", "outputs", lambda a: -a, "0 or below"),
        ("correction", "plain", lambda a: -a, "negative"),
        ("minicache", "turn", lambda a: a * np.float16(2), "orthogonal"),
        ("minicache", "partner", lambda a: a + 1, "not a layer before"),
        ("minicache", "similarity", lambda a: a + 1, "no cosine"),
    ],
)
def test_values_that_no_fit_may_return(kind: str, role: str, fault: Any, message: str) -> None:
    changed = {role: fault(EXAMPLES[kind].to_tensors()[role])}
    with pytest.raises(ValueError, match=message):
        opened(EXAMPLES[kind], **changed).check_values()
