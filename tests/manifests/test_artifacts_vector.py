from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from artifact_examples import EXAMPLES, opened

from velox_pack.manifests.artifacts_vector import rope_pairs
from velox_pack.manifests.errors import BundleError


def _shape(kind: str, role: str, *shape: int) -> np.ndarray:
    return np.ones(shape, EXAMPLES[kind].to_tensors()[role].dtype)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("vecinfer", {"part": "queries"}, "part is 'queries'"),
        ("vecinfer", {"before_rope": 1}, "before_rope is 1, not bool"),
        ("vecinfer", {"codebooks": _shape("vecinfer", "codebooks", 2, 3, 2, 20, 4)}, "20 centr"),
        ("vecinfer", {"codebooks": _shape("vecinfer", "codebooks", 2, 3, 2, 16, 3)}, "sub vectors"),
        ("vecinfer", {"codebooks": _shape("vecinfer", "codebooks", 2, 3, 4, 16, 4)}, "4 codebooks"),
        (
            "vecinfer",
            {"codebooks": _shape("vecinfer", "codebooks", 2, 2, 2, 16, 4)},
            "2 of 3 heads",
        ),
        ("vecinfer", {"signs": _shape("vecinfer", "signs", 1, 4)}, "signs has shape"),
        ("vecinfer", {"mix": _shape("vecinfer", "mix", 3, 3)}, "mix of 3"),
        ("commvq", {"dims": 7}, "dims 7 of 8"),
        ("commvq", {"dims": 10}, "dims 10 of 8"),
        ("commvq", {"traditional": None}, "traditional is None"),
        ("commvq", {"codebooks": _shape("commvq", "codebooks", 2, 3, 5, 6, 8)}, "6 entries"),
        ("rabitq", {"part": ""}, "part is ''"),
        ("rabitq", {"centroids": _shape("rabitq", "centroids", 2, 3, 6, 8)}, "6 centroids"),
        ("rabitq", {"centroids": _shape("rabitq", "centroids", 2, 3, 512, 8)}, "512 centroids"),
        ("rabitq", {"log_scale": _shape("rabitq", "log_scale", 2, 3)}, "log_scale has shape"),
    ],
)
def test_what_does_not_fit_is_refused(kind: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BundleError, match=message) as caught:
        opened(EXAMPLES[kind], **changes)
    assert kind in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "role", "fault", "message"),
    [
        ("vecinfer", "smoothing", lambda a: a * 0, "not positive"),
        ("vecinfer", "mean", lambda a: a * np.float32(np.nan), "NaN"),
        ("vecinfer", "signs", lambda a: a * np.int8(0), "something else"),
        ("commvq", "weight", lambda a: -a, "not positive"),
        ("commvq", "weight", lambda a: a + np.arange(8, dtype=np.float32), "within a pair"),
        ("commvq", "codebooks", lambda a: a * np.float16(np.inf), "infinity"),
        ("rabitq", "signs", lambda a: a * np.int8(3), "something else"),
        ("rabitq", "mix", lambda a: a * np.float32(2), "not orthogonal"),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value")
def test_values_that_no_fit_may_return(kind: str, role: str, fault: Any, message: str) -> None:
    tensors = EXAMPLES[kind].to_tensors()
    with pytest.raises(ValueError, match=message):
        type(EXAMPLES[kind])(
            **EXAMPLES[kind].parameters(),
            **tensors | {role: fault(tensors[role])},
            layers=EXAMPLES[kind].layers,
        )


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize(("width", "dims"), [(8, 8), (12, 8), (16, 0)])
def test_pairs_cover_each_coordinate_once(width: int, dims: int, traditional: bool) -> None:
    first, second = rope_pairs(width, dims, traditional)
    assert sorted([*first, *second]) == list(range(width))
    step = 1 if traditional else dims // 2
    np.testing.assert_array_equal((second - first)[: dims // 2], np.full(dims // 2, step))
