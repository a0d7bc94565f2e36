from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from bundles import make_artifacts

from velox_pack.manifests.artifacts import KINDS, Artifact, Codebook, QFilters, Rope
from velox_pack.manifests.errors import BundleError

MADE = make_artifacts()
BY_KIND = {artifact.kind: artifact for artifact in MADE.values()}
# Tested the same way in test_artifacts_attention, _channels, _scalar, _sharing and _vector.
ELSEWHERE = {
    "attention-filter", "budgets", "expected-attention", "filter-report",
    "gear", "kitty", "outliers", "sinks",
    "joint-spectral", "lowrank", "nuq",
    "correction", "minicache", "prediction", "xquant",
    "commvq", "rabitq", "vecinfer",
}  # fmt: skip


def opened(artifact: Artifact) -> Artifact:
    tensors = {role: mx.array(array) for role, array in artifact.to_tensors().items()}
    return type(artifact).from_tensors(artifact.parameters(), artifact.layers, tensors)


def test_every_kind_is_covered() -> None:
    assert set(BY_KIND) | ELSEWHERE == set(KINDS)
    assert not set(BY_KIND) & ELSEWHERE


@pytest.mark.parametrize("kind", sorted(BY_KIND))
def test_round_trip_is_exact(kind: str) -> None:
    fitted = BY_KIND[kind]
    again = opened(fitted)
    assert type(again) is type(fitted) is KINDS[kind]
    assert (again.layers, again.parameters()) == (fitted.layers, fitted.parameters())
    before, after = fitted.to_tensors(), again.to_tensors()
    assert before.keys() == after.keys()
    for role, array in before.items():
        assert array.dtype == after[role].dtype
        assert array.tobytes() == after[role].tobytes()


@pytest.mark.parametrize("kind", sorted(BY_KIND))
def test_wrong_type_shape_or_keys(kind: str) -> None:
    artifact = BY_KIND[kind]
    arrays = {role: mx.array(array) for role, array in artifact.to_tensors().items()}
    role = min(arrays)

    def attempt(
        parameters: dict[str, Any] | None = None,
        layers: tuple[int, ...] | None = None,
        **changes: mx.array,
    ) -> None:
        with pytest.raises(BundleError, match=kind) as caught:
            KINDS[kind].from_tensors(
                artifact.parameters() if parameters is None else parameters,
                artifact.layers if layers is None else layers,
                arrays | changes,
            )
        assert "\n" not in str(caught.value)

    attempt(**{role: arrays[role].astype(mx.int32)})
    attempt(**{role: arrays[role][None]})
    attempt(**{role: arrays[role][:0]})
    attempt(surplus=mx.zeros(1))
    attempt(parameters=artifact.parameters() | {"surplus": 1})
    attempt(layers=(0, 1, 2))
    attempt(layers=(1, 1))
    for name in artifact.parameters():
        attempt(parameters={k: v for k, v in artifact.parameters().items() if k != name})
        attempt(parameters=artifact.parameters() | {name: None})


def test_opening_evaluates_nothing() -> None:
    poisoned = mx.full((1, 2, 4), float("nan"))  # values are looked at by verify, not by open
    filters = QFilters.from_tensors({}, (0,), {"filters": poisoned})
    with pytest.raises(ValueError, match="NaN"):
        filters.check_values()


@pytest.mark.parametrize(
    ("kind", "role", "fault", "message"),
    [
        ("codebook", "levels_2", lambda a: a[::-1].copy(), "ascending"),
        ("spectral", "basis", lambda a: a * np.float16(0.5), "orthogonal"),
        ("spectral", "variance", lambda a: a[..., ::-1].copy(), "descending"),
        ("spectral", "mean", lambda a: a * np.float32(np.nan), "NaN"),
        ("center", "mean", lambda a: a / np.float32(0), "infinity"),
        ("rotation", "signs", lambda a: a * np.int8(2), "something else"),
        ("rotation", "mix", lambda a: a * np.float32(2), "orthogonal"),
        ("widths", "keys", lambda a: a + np.uint8(6), "above 8"),
        ("qfilters", "filters", lambda a: a * np.float32(2), "unit norm"),
        ("allocation", "values", lambda a: -a, "negative"),
        ("rope", "inv_freq", lambda a: a / np.float32(0), "infinity"),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_values_that_no_fit_may_return(kind: str, role: str, fault: Any, message: str) -> None:
    tensors = BY_KIND[kind].to_tensors()
    tensors[role] = fault(tensors[role])
    with pytest.raises(BundleError, match=message):
        KINDS[kind].from_tensors(BY_KIND[kind].parameters(), BY_KIND[kind].layers, tensors)


def test_constructor_names_the_field() -> None:
    with pytest.raises(ValueError, match="filters has type F16, not F32"):
        QFilters(filters=np.ones((1, 1, 1), np.float16), layers=(0,))
    with pytest.raises(ValueError, match="dims 5 is not twice 2"):
        Rope(dims=5, traditional=False, inv_freq=np.ones((1, 2), np.float32), layers=(0,))
    with pytest.raises(ValueError, match="all layers alike"):
        Codebook("gaussian", {1: np.array([-1, 1], np.float32)}, layers=(0,))
    with pytest.raises(ValueError, match="must be an array"):
        QFilters(filters=[[1.0]], layers=(0,))
