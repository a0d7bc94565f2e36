from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from velox_pack.manifests.artifact import Artifact
from velox_pack.manifests.artifacts_attention import (
    AttentionFilter,
    Budgets,
    ExpectedAttention,
    FilterReport,
)
from velox_pack.manifests.errors import BundleError

LAYERS = (0, 3)


def made() -> dict[str, Artifact]:
    """One artifact of each kind: 2 layers, 4 query heads, 2 KV heads of 6."""
    rng = np.random.default_rng(0)

    def f32(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    share = rng.random((2, 2)).astype(np.float32) / 4
    return {
        "expected-attention": ExpectedAttention(
            scale=0.4,
            horizon=64,
            dims=4,
            traditional=False,
            mean=f32(2, 4, 6),
            factor=f32(2, 4, 6, 5),
            weights=f32(2, 2, 3),
            inv_freq=f32(2, 2),
            layers=LAYERS,
        ),
        "attention-filter": AttentionFilter(
            frame="moving",
            lead=32,
            dims=4,
            traditional=True,
            filters=f32(2, 2, 6),
            norm=f32(2, 2),
            inv_freq=f32(2, 2),
            layers=LAYERS,
        ),
        "filter-report": FilterReport(
            **{role: share + np.float32(i) / 10 for i, role in enumerate(FilterReport.forms)},
            layers=LAYERS,
        ),
        "budgets": Budgets(
            method="ada",
            details={"safeguard": 0.2},
            ratios=np.array([0.125, 0.25, 0.5, 1], np.float32),
            shares=np.array(
                [[[1.5, 1.25, 1.5, 1], [0.5, 0.75, 0.5, 1]], [[1, 1, 1.25, 1], [1, 1, 0.75, 1]]],
                np.float32,
            ),
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
        ("expected-attention", {"horizon": 0}, "is not positive"),
        ("expected-attention", {"scale": -1.0}, "is not positive"),
        ("expected-attention", {"weights": np.ones((2, 3, 3), np.float32)}, "4 query heads for 3"),
        ("expected-attention", {"factor": np.ones((2, 4, 6, 7), np.float32)}, "7 directions of 6"),
        ("expected-attention", {"dims": 6}, "turns 6 of 6 coordinates with 2"),
        ("attention-filter", {"inv_freq": np.ones((2, 4), np.float32), "dims": 8}, "turns 8 of 6"),
        ("attention-filter", {"frame": "still"}, "not 'moving' or 'fixed'"),
        ("attention-filter", {"lead": -1}, "below 0"),
        ("budgets", {"method": "guess"}, "'guess'"),
    ],
)
def test_parameters_that_do_not_fit(kind: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(BundleError, match=message):
        opened(MADE[kind], **change)


@pytest.mark.parametrize(
    ("kind", "role", "fault", "message"),
    [
        ("expected-attention", "mean", lambda a: a * np.float32(np.nan), "NaN"),
        ("filter-report", "correlation", lambda a: a + np.float32(1), "within -1 and 1"),
        ("filter-report", "positive", lambda a: a - np.float32(1), "within 0 and 1"),
        ("budgets", "shares", lambda a: -a, "negative"),
        ("budgets", "shares", lambda a: a + np.float32(1), "more keys than there are"),
        ("budgets", "shares", lambda a: a * np.float32(0.9), "mean 1"),
        ("budgets", "ratios", lambda a: a[::-1].copy(), "do not rise"),
        ("budgets", "ratios", lambda a: a * np.float32(2), "within 0 and 1"),
    ],
)
def test_values_that_no_fit_may_return(kind: str, role: str, fault: Any, message: str) -> None:
    changed = {role: fault(MADE[kind].to_tensors()[role])}
    with pytest.raises(ValueError, match=message):
        opened(MADE[kind], **changed).check_values()


def test_budgets_between_ratios() -> None:
    fitted = opened(MADE["budgets"])
    assert isinstance(fitted, Budgets)
    np.testing.assert_allclose(fitted.at(0.25), [[1.25, 0.75], [1, 1]])
    np.testing.assert_allclose(fitted.at(0.25 * 2**0.5), [[1.375, 0.625], [1.125, 0.875]])
    np.testing.assert_allclose(fitted.at(0.001), [[1.5, 0.5], [1, 1]])  # the nearest end
    np.testing.assert_allclose(fitted.at(1), np.ones((2, 2)))
