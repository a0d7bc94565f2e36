"""What a layer takes from another: every kind written, opened again, and refused when wrong."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from velox_pack.manifests.artifact import Artifact
from velox_pack.manifests.artifacts_sharing import Correction, MiniCache, Prediction, XQuant
from velox_pack.manifests.errors import BundleError

LAYERS = (2, 3)


def made() -> dict[str, Artifact]:
    rng = np.random.default_rng(0)

    def positive(*shape: int) -> np.ndarray:
        return rng.uniform(0.1, 1, shape).astype(np.float32)

    linear: dict[str, Any] = {
        "weights": rng.integers(-127, 128, (2, 1, 12, 8)).astype(np.int8),
        "inputs": positive(2, 1, 12),
        "outputs": positive(2, 1, 8),
        "bias": positive(2, 2, 4),
    }
    square = linear | {"weights": linear["weights"][:, :, :8], "inputs": positive(2, 1, 8)}
    turn = np.linalg.qr(rng.standard_normal((2, 1, 8, 8)))[0].astype(np.float16)
    before = np.array([-1, 2], np.int32)
    where: dict[str, Any] = {"before_rope": True, "layers": LAYERS}
    return {
        "xquant": XQuant(
            part="keys",
            axis="channel",
            bits=2,
            group=64,
            relax=0.08,
            partner=before,
            shared=positive(2),
            own=positive(2),
            agreement=positive(2),
            **where,
        ),
        "prediction": Prediction(
            part="keys",
            group=2,
            sources=["previous keys", "previous values"],
            bits=2,
            previous=before,
            log_norm=positive(2, 2),
            left=positive(2),
            **linear,
            **where,
        ),
        "correction": Correction(
            part="keys",
            axis="channel",
            bits=2,
            group_size=64,
            group=2,
            plain=positive(2),
            corrected=positive(2),
            **square,
            **where,
        ),
        "minicache": MiniCache(
            part="keys",
            group=2,
            t=0.5,
            retained=0.05,
            partner=before,
            similarity=positive(2, 1),
            gamma=positive(2),
            mean=positive(2, 2, 4),
            turn=turn,
            error=positive(2),
            **where,
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
        {role: array.astype(np.uint16)},
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


def test_merging_without_alignment_needs_no_matrix() -> None:
    one = np.ones((2, 2, 1, 1), np.float16)
    again = opened(MADE["minicache"], group=1, turn=one, similarity=np.ones((2, 2), np.float32))
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
        ("correction", {"group_size": 0}, "groups of 0"),
        ("minicache", {"t": 1.5}, "not 0 to 1"),
        ("minicache", {"retained": -0.1}, "not 0 to 1"),
        ("minicache", {"group": 1}, "1 groups of 1 heads"),
    ],
)
def test_parameters_that_do_not_fit(kind: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(BundleError, match=message):
        opened(MADE[kind], **change)


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
    changed = {role: fault(MADE[kind].to_tensors()[role])}
    with pytest.raises(ValueError, match=message):
        opened(MADE[kind], **changed).check_values()
