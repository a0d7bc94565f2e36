from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from velox_pack.manifests.artifact import Artifact
from velox_pack.manifests.artifacts_vector import CommVQ, RaBitQ, VecInfer, rope_pairs
from velox_pack.manifests.errors import BundleError

LAYERS = (0, 3)


def made() -> dict[str, Artifact]:
    """One artifact of each kind: 2 layers, 3 heads of 8."""
    rng = np.random.default_rng(0)

    def f32(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    signs = np.where(rng.random((3, 8)) < 0.5, -1, 1).astype(np.int8)
    mix = np.ones((1, 1), np.float32)
    log_scale = np.array([[-1, 0.1], [0, 0.1]], np.float32)
    weight = np.repeat(np.abs(f32(2, 3, 1, 4)) + 1, 2, axis=2).reshape(2, 3, 8)
    return {
        "vecinfer": VecInfer(
            part="keys",
            before_rope=True,
            mean=f32(2, 3, 8),
            smoothing=np.abs(f32(2, 3, 8)) + 1,
            codebooks=f32(2, 3, 2, 16, 4).astype(np.float16),
            scaled=True,
            log_scale=log_scale,
            signs=signs[:1],
            mix=mix,
            layers=LAYERS,
        ),
        "commvq": CommVQ(
            dims=8,
            traditional=False,
            mean=f32(2, 3, 8),
            weight=weight,
            codebooks=f32(2, 3, 5, 4, 8).astype(np.float16),
            log_scale=log_scale,
            layers=LAYERS,
        ),
        "rabitq": RaBitQ(
            part="values",
            before_rope=False,
            centroids=f32(2, 3, 4, 8).astype(np.float16),
            log_scale=log_scale,
            signs=signs,
            mix=mix,
            layers=LAYERS,
        ),
    }


MADE = made()


def opened(artifact: Artifact, **changes: Any) -> Artifact:
    """Through tensors and parameters, some of either replaced."""
    tensors = artifact.to_tensors()
    parameters = artifact.parameters()
    for name, value in changes.items():
        (tensors if name in tensors else parameters)[name] = value
    arrays = {role: mx.array(array) for role, array in tensors.items()}
    return type(artifact).from_tensors(parameters, artifact.layers, arrays)


@pytest.mark.parametrize("kind", sorted(MADE))
def test_round_trip_is_exact(kind: str) -> None:
    fitted = MADE[kind]
    again = opened(fitted)
    assert (again.kind, again.layers) == (kind, LAYERS)
    assert again.parameters() == fitted.parameters()
    for role, array in fitted.to_tensors().items():
        stored = again.to_tensors()[role]
        assert (stored.dtype, stored.tobytes()) == (array.dtype, array.tobytes())


def _shape(kind: str, role: str, *shape: int) -> np.ndarray:
    return np.ones(shape, MADE[kind].to_tensors()[role].dtype)


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
        opened(MADE[kind], **changes)
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
    tensors = MADE[kind].to_tensors()
    with pytest.raises(ValueError, match=message):
        type(MADE[kind])(
            **MADE[kind].parameters(), **tensors | {role: fault(tensors[role])}, layers=LAYERS
        )


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize(("width", "dims"), [(8, 8), (12, 8), (16, 0)])
def test_pairs_cover_each_coordinate_once(width: int, dims: int, traditional: bool) -> None:
    first, second = rope_pairs(width, dims, traditional)
    assert sorted([*first, *second]) == list(range(width))
    step = 1 if traditional else dims // 2
    np.testing.assert_array_equal((second - first)[: dims // 2], np.full(dims // 2, step))
