"""Spectral rotation: per layer and KV head the eigenbasis of the centred second moment.

From the description in DESIGN (SpectralQuant); keys are taken before RoPE, where their directions
do not turn with the position, and with their mean removed: see the table in the benchmark.
"""

from collections.abc import Mapping

import numpy as np
from threadpoolctl import threadpool_limits

from velox_pack.calibrators.capture import LayerStatistics
from velox_pack.manifests.artifacts import Spectral
from velox_pack.manifests.errors import CalibrationError

Array = np.ndarray

NORM_CODES = 256
NORM_MARGIN = float(np.log(2.0))  # room for norms twice beyond the sample's, at either end


def fit(statistics: Mapping[int, LayerStatistics], part: str) -> tuple[Spectral, ...]:
    """Bases for "keys" (before RoPE where it can be undone) or "values" of all layers given.

    Layers that agree in shape and in standing before RoPE are stacked into one artifact. Raises
    CalibrationError for statistics that are not finite.
    """
    groups: dict[tuple[bool, tuple[int, ...]], list[int]] = {}
    for index in sorted(statistics):
        moments, _ = statistics[index].part(part)
        before = part == "keys" and statistics[index].rotated
        groups.setdefault((before, moments.total.shape), []).append(index)
    artifacts = []
    for (before, _), layers in groups.items():
        fitted = [_fit_layer(index, statistics[index], part) for index in layers]
        mean, basis, variance, log_norm = (np.stack(x) for x in zip(*fitted, strict=True))
        artifacts.append(
            Spectral(
                part=part,
                before_rope=before,
                mean=mean.astype(np.float32),
                basis=basis.astype(np.float16),
                variance=variance.astype(np.float32),
                log_norm=log_norm.astype(np.float32),
                layers=tuple(layers),
            )
        )
    return tuple(artifacts)


def _fit_layer(
    index: int, statistics: LayerStatistics, part: str
) -> tuple[Array, Array, Array, Array]:
    moments, sample = statistics.part(part)
    if not np.all(np.isfinite(moments.second)):
        raise CalibrationError(f"layer {index}: {part} have no finite second moments")
    basis, variance = eigenbasis(moments.covariance)
    return moments.mean, basis, variance, norm_range(sample - moments.mean[:, None, :])


def eigenbasis(covariance: Array) -> tuple[Array, Array]:
    """Eigenvectors as COLUMNS [H, D, D] and variances [H, D], descending, of [H, D, D] float64.

    The sign of a column makes its entry of largest magnitude positive, so that the basis does not
    depend on LAPACK's choice; negative rounding of variances is set to 0.
    """
    with threadpool_limits(1):  # LAPACK's result differs between one and two threads
        variance, basis = np.linalg.eigh(covariance)
    variance, basis = np.maximum(variance[:, ::-1], 0.0), basis[:, :, ::-1]
    pivot = np.take_along_axis(basis, np.abs(basis).argmax(axis=1)[:, None, :], axis=1)
    return basis * np.where(pivot < 0, -1.0, 1.0), variance


def participation_ratio(variance: Array) -> Array:
    """(sum v)^2 / sum v^2 over the last axis: how many coordinates carry the variance, 1 to D."""
    variance = np.asarray(variance, np.float64)
    top = variance.max(axis=-1, keepdims=True)
    shares = variance / np.where(top > 0, top, 1.0)
    ratio: Array = shares.sum(axis=-1) ** 2 / np.maximum(np.square(shares).sum(axis=-1), 1e-30)
    return ratio


def norm_range(centred: Array) -> Array:
    """(lo, step) of 8-bit codes for the natural log of norms: ln |x| = lo + code * step.

    `centred` [H, S, D]. One range for all heads of a layer, with a margin at both ends for tokens
    that the sample does not have; zero vectors are left out.
    """
    norms = np.linalg.norm(centred.astype(np.float64), axis=-1)
    logs = np.log(norms[norms > 0]) if np.any(norms > 0) else np.zeros(1)
    low, high = logs.min() - NORM_MARGIN, logs.max() + NORM_MARGIN
    return np.array([low, (high - low) / (NORM_CODES - 1)])
