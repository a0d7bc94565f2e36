"""Channels and tokens that need more: every kind written, opened again, and refused when wrong."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from velox_pack.manifests.artifact import Artifact
from velox_pack.manifests.artifacts_channels import Gear, Kitty, Outliers, Sinks
from velox_pack.manifests.errors import BundleError

LAYERS = (1, 4)


def made() -> dict[str, Artifact]:
    rng = np.random.default_rng(0)

    def positive(*shape: int) -> np.ndarray:
        return rng.uniform(0.1, 1, shape).astype(np.float32)

    order = np.broadcast_to(np.array([2, 0, 3, 1], np.uint16), (2, 2, 4)).copy()
    widths = np.broadcast_to(np.array([2, 2, 4, 2], np.uint8), (2, 2, 4)).copy()
    shares = ("threshold", "mass", "recall", "false_positives", "protected")
    where: dict[str, Any] = {"part": "keys", "before_rope": True, "layers": LAYERS}
    return {
        "kitty": Kitty(
            rule="boost",
            bits=2.5,
            order=order,
            widths=widths,
            sensitivity=positive(2, 2, 4),
            mean=positive(2, 2, 4),
            deviation=positive(2, 2, 4),
            **where,
        ),
        "outliers": Outliers(
            pairs=False,
            bits=2,
            outlier_bits=4,
            channels=np.broadcast_to(np.array([1, 3], np.uint16), (2, 2, 2)).copy(),
            mean=positive(2, 2, 4),
            deviation=positive(2, 2, 4),
            log_norm=positive(2, 2),
            threshold=positive(2),
            **where,
        ),
        "gear": Gear(
            axis="channel",
            bits=2,
            group=64,
            outliers=0.02,
            basis=np.linalg.qr(rng.standard_normal((2, 2, 4, 4)))[0][..., :3].astype(np.float16),
            captured=positive(2, 2),
            **where,
        ),
        "sinks": Sinks(
            skip_first=4,
            least=0.02,
            statistic=np.array([0, 3], np.uint8),
            keys=positive(2, 2),
            values=positive(2, 2),
            **{role: positive(2) for role in shares},
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
        {role: array.astype(np.int64)},
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
        opened(MADE[kind], **change)


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
    changed = {role: fault(MADE[kind].to_tensors()[role])}
    with pytest.raises(ValueError, match=message):
        opened(MADE[kind], **changed).check_values()


def test_heads_share_the_sum_of_widths() -> None:
    widths = MADE["kitty"].to_tensors()["widths"].copy()
    widths[0, 0] = 2
    with pytest.raises(ValueError, match="heads differ"):
        opened(MADE["kitty"], widths=widths).check_values()
