from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from velox_pack.manifests.artifact import Artifact
from velox_pack.manifests.artifacts_scalar import JointSpectral, LowRank, Nuq
from velox_pack.manifests.errors import BundleError

LAYERS = (0, 3)


def made() -> dict[str, Artifact]:
    """One artifact of each kind: 2 layers, 2 heads of 4."""
    rng = np.random.default_rng(0)

    def f32(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    def falling(*shape: int) -> np.ndarray:
        return np.sort(np.abs(f32(*shape)), axis=-1)[..., ::-1].copy()

    turn = np.linalg.qr(f32(2, 1, 8, 8))[0]
    size = np.array([2.0, 0.5], np.float32)  # of each head
    levels = np.sort(f32(2, 4), axis=-1)
    log_norm = np.array([[-1, 0.1], [0, 0.1]], np.float32)
    return {
        "joint-spectral": JointSpectral(
            part="values",
            before_rope=False,
            group=2,
            metric="heads",
            power=0.5,
            mean=f32(2, 2, 4),
            forward=(np.repeat(size, 4)[:, None] * turn).astype(np.float16),
            undo=np.broadcast_to(size[None, :, None, None] ** -2, (2, 2, 1, 1)).astype(np.float16),
            variance=np.abs(f32(2, 1, 8)),
            cost=falling(2, 1, 8),
            isotropic=np.abs(f32(2, 1)),
            log_norm=log_norm,
            layers=LAYERS,
        ),
        "nuq": Nuq(
            part="values",
            before_rope=False,
            axis="token",
            bits=2,
            outliers=0.01,
            exact_first=1,
            levels=levels,
            edges=(levels[:, 1:] + levels[:, :-1]) / 2,
            low=np.full((2, 2, 4), -1, np.float32),
            high=np.full((2, 2, 4), 2, np.float32),
            layers=LAYERS,
        ),
        "lowrank": LowRank(
            part="keys",
            before_rope=True,
            group=2,
            mean=f32(2, 1, 8),
            basis=np.linalg.qr(f32(2, 1, 8, 8))[0][..., :3].astype(np.float16),
            variance=falling(2, 1, 3),
            widths=np.array([[[4, 2, 1]], [[8, 1, 1]]], np.uint8),
            log_norm=log_norm,
            layers=LAYERS,
        ),
    }


MADE = made()


def opened(artifact: Artifact, **changes: Any) -> Artifact:
    tensors = {role: mx.array(array) for role, array in artifact.to_tensors().items()}
    roles = {k: mx.array(v) for k, v in changes.items() if k in tensors}
    parameters = artifact.parameters() | {k: v for k, v in changes.items() if k not in tensors}
    return type(artifact).from_tensors(parameters, artifact.layers, tensors | roles)


@pytest.mark.parametrize("kind", sorted(MADE))
def test_round_trip_is_exact(kind: str) -> None:
    fitted = MADE[kind]
    assert fitted.kind == kind
    again = opened(fitted)
    assert (again.layers, again.parameters()) == (fitted.layers, fitted.parameters())
    for role, array in fitted.to_tensors().items():
        assert array.tobytes() == again.to_tensors()[role].tobytes()


@pytest.mark.parametrize("kind", sorted(MADE))
def test_wrong_type_shape_or_keys(kind: str) -> None:
    artifact = MADE[kind]
    role = min(artifact.forms)
    array = artifact.to_tensors()[role]
    changes: list[dict[str, Any]] = [
        {role: array.astype(np.int32)},
        {role: array[None]},
        {role: array[:0]},
        {role: array[:1]},
        {"surplus": 1},
        *({name: None} for name in artifact.parameters()),
    ]
    for change in changes:
        with pytest.raises(BundleError, match=kind) as caught:
            opened(artifact, **change)
        assert "\n" not in str(caught.value)


def test_undo_may_be_a_matrix_for_each_head() -> None:
    fitted = MADE["joint-spectral"]
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
        opened(MADE[kind], **change)


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
    changed = {role: fault(MADE[kind].to_tensors()[role])}
    with pytest.raises(ValueError, match=message):
        opened(MADE[kind], **changed).check_values()
