"""What holds for every kind of artifact, and what is refused of the first eight."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from artifact_examples import EXAMPLES, opened

from velox_pack.manifests.aligned import read_arrays, write_arrays
from velox_pack.manifests.artifacts import KINDS, Codebook, QFilters, Rope
from velox_pack.manifests.errors import BundleError


def test_every_kind_has_an_example() -> None:
    assert set(EXAMPLES) == set(KINDS)
    for kind, artifact in EXAMPLES.items():
        assert artifact.kind == kind
        assert type(artifact) is KINDS[kind]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_round_trip_through_a_file_is_exact(kind: str, tmp_path: Path) -> None:
    fitted = EXAMPLES[kind]
    before = fitted.to_tensors()
    write_arrays(tmp_path / "a.safetensors", before)
    parameters = json.loads(json.dumps(fitted.parameters(), allow_nan=False))
    again = KINDS[kind].from_tensors(
        parameters, fitted.layers, read_arrays(tmp_path / "a.safetensors")
    )
    assert type(again) is type(fitted)
    assert (again.layers, again.parameters()) == (fitted.layers, fitted.parameters())
    again.check_values()
    after = again.to_tensors()
    assert before.keys() == after.keys()
    for role, array in before.items():
        assert (after[role].dtype, after[role].shape) == (array.dtype, array.shape)
        assert after[role].tobytes() == array.tobytes()


def refused(
    kind: str,
    tensors: dict[str, mx.array],
    parameters: dict[str, Any] | None = None,
    layers: tuple[int, ...] | None = None,
) -> None:
    """Opening it fails, in one line that names the kind."""
    example = EXAMPLES[kind]
    with pytest.raises(BundleError, match=kind) as caught:
        KINDS[kind].from_tensors(
            example.parameters() if parameters is None else parameters,
            example.layers if layers is None else layers,
            tensors,
        )
    assert "\n" not in str(caught.value)


def arrays_of(kind: str) -> dict[str, mx.array]:
    return {role: mx.array(array) for role, array in EXAMPLES[kind].to_tensors().items()}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_tensors_of_another_type(kind: str) -> None:
    arrays = arrays_of(kind)
    for role, array in arrays.items():
        for other in {mx.int64, mx.int32, mx.uint16, mx.float32, mx.bfloat16} - {array.dtype}:
            refused(kind, arrays | {role: array.astype(other)})


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_tensors_of_another_shape(kind: str) -> None:
    arrays, forms = arrays_of(kind), KINDS[kind].forms
    for role, array in arrays.items():
        refused(kind, arrays | {role: array[None]})
        refused(kind, arrays | {role: array[:0]})
        if forms[role].dims.startswith("L"):
            refused(kind, arrays | {role: array[:1]})


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_tensors_too_many_or_too_few(kind: str) -> None:
    arrays = arrays_of(kind)
    refused(kind, arrays | {"surplus": mx.zeros(1)})
    refused(kind, {})
    if kind != "codebook":  # which has levels for any choice of bits
        for role in arrays:
            refused(kind, {other: a for other, a in arrays.items() if other != role})


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_parameters_too_many_too_few_or_null(kind: str) -> None:
    arrays, parameters = arrays_of(kind), EXAMPLES[kind].parameters()
    refused(kind, arrays, parameters | {"surplus": 1})
    for name in parameters:
        refused(kind, arrays, {k: v for k, v in parameters.items() if k != name})
        refused(kind, arrays, parameters | {name: None})
        refused(kind, arrays, parameters | {name: [[]]})  # nothing that can be hashed


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_other_layers(kind: str) -> None:
    arrays, layers = arrays_of(kind), EXAMPLES[kind].layers
    for wrong in ((0, 1, 2), (1, 1), (-1, 0), () if layers else (0,)):
        refused(kind, arrays, layers=wrong)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_numbers_that_are_not_finite(kind: str, number: float) -> None:
    example = EXAMPLES[kind]
    for role, array in example.to_tensors().items():
        if array.dtype.kind != "f":
            continue
        wrong = array.copy()
        wrong.flat[-1] = number
        lazy = opened(example, **{role: wrong})  # values are looked at by verify, not by open
        for reader in (lazy.check_values, lazy.to_tensors):
            with pytest.raises(ValueError, match=f"{kind}: {role} holds NaN or infinity"):
                reader()
        with pytest.raises(BundleError, match=f"{role} holds NaN or infinity"):
            KINDS[kind].from_tensors(
                example.parameters(), example.layers, example.to_tensors() | {role: wrong}
            )


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
    tensors = EXAMPLES[kind].to_tensors()
    tensors[role] = fault(tensors[role])
    with pytest.raises(BundleError, match=message):
        KINDS[kind].from_tensors(EXAMPLES[kind].parameters(), EXAMPLES[kind].layers, tensors)


def test_constructor_names_the_field() -> None:
    with pytest.raises(ValueError, match="filters has type F16, not F32"):
        QFilters(filters=np.ones((1, 1, 1), np.float16), layers=(0,))
    with pytest.raises(ValueError, match="dims 5 is not twice 2"):
        Rope(dims=5, traditional=False, inv_freq=np.ones((1, 2), np.float32), layers=(0,))
    with pytest.raises(ValueError, match="all layers alike"):
        Codebook("gaussian", {1: np.array([-1, 1], np.float32)}, layers=(0,))
    with pytest.raises(ValueError, match="must be an array"):
        QFilters(filters=[[1.0]], layers=(0,))
