"""A small artifact of each kind, by kind, and how to open one with something changed."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from bundles import make_artifacts

from velox_pack.manifests.artifact import Artifact
from velox_pack.manifests.artifacts_attention import (
    AttentionFilter,
    Budgets,
    ExpectedAttention,
    FilterReport,
)
from velox_pack.manifests.artifacts_channels import Gear, Kitty, Outliers, Sinks
from velox_pack.manifests.artifacts_scalar import JointSpectral, LowRank, Nuq
from velox_pack.manifests.artifacts_sharing import Correction, MiniCache, Prediction, XQuant
from velox_pack.manifests.artifacts_vector import CommVQ, RaBitQ, VecInfer


def attention() -> dict[str, Artifact]:
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
            layers=(0, 3),
        ),
        "attention-filter": AttentionFilter(
            frame="moving",
            lead=32,
            dims=4,
            traditional=True,
            filters=f32(2, 2, 6),
            norm=f32(2, 2),
            inv_freq=f32(2, 2),
            layers=(0, 3),
        ),
        "filter-report": FilterReport(
            **{role: share + np.float32(i) / 10 for i, role in enumerate(FilterReport.forms)},
            layers=(0, 3),
        ),
        "budgets": Budgets(
            method="ada",
            details={"safeguard": 0.2},
            ratios=np.array([0.125, 0.25, 0.5, 1], np.float32),
            shares=np.array(
                [[[1.5, 1.25, 1.5, 1], [0.5, 0.75, 0.5, 1]], [[1, 1, 1.25, 1], [1, 1, 0.75, 1]]],
                np.float32,
            ),
            layers=(0, 3),
        ),
    }


def channels() -> dict[str, Artifact]:
    rng = np.random.default_rng(0)

    def positive(*shape: int) -> np.ndarray:
        return rng.uniform(0.1, 1, shape).astype(np.float32)

    order = np.broadcast_to(np.array([2, 0, 3, 1], np.uint16), (2, 2, 4)).copy()
    widths = np.broadcast_to(np.array([2, 2, 4, 2], np.uint8), (2, 2, 4)).copy()
    shares = ("threshold", "mass", "recall", "false_positives", "protected")
    where: dict[str, Any] = {"part": "keys", "before_rope": True, "layers": (1, 4)}
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
            layers=(1, 4),
        ),
    }


def scalar() -> dict[str, Artifact]:
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
            layers=(0, 3),
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
            layers=(0, 3),
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
            layers=(0, 3),
        ),
    }


def sharing() -> dict[str, Artifact]:
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
    where: dict[str, Any] = {"before_rope": True, "layers": (2, 3)}
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


def vector() -> dict[str, Artifact]:
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
            layers=(0, 3),
        ),
        "commvq": CommVQ(
            dims=8,
            traditional=False,
            mean=f32(2, 3, 8),
            weight=weight,
            codebooks=f32(2, 3, 5, 4, 8).astype(np.float16),
            log_scale=log_scale,
            layers=(0, 3),
        ),
        "rabitq": RaBitQ(
            part="values",
            before_rope=False,
            centroids=f32(2, 3, 4, 8).astype(np.float16),
            log_scale=log_scale,
            signs=signs,
            mix=mix,
            layers=(0, 3),
        ),
    }


EXAMPLES: dict[str, Artifact] = {
    **{artifact.kind: artifact for artifact in make_artifacts().values()},
    **attention(),
    **channels(),
    **scalar(),
    **sharing(),
    **vector(),
}


def opened(artifact: Artifact, **changes: Any) -> Artifact:
    """Through MLX arrays and parameters, some of either replaced or added."""
    tensors = {role: mx.array(array) for role, array in artifact.to_tensors().items()}
    roles = {k: mx.array(v) for k, v in changes.items() if k in tensors}
    parameters = artifact.parameters() | {k: v for k, v in changes.items() if k not in tensors}
    return type(artifact).from_tensors(parameters, artifact.layers, tensors | roles)
