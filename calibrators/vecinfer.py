"""VecInfer: product-quantizer codebooks of keys that were smoothed and rotated first.

Read: the abstract of VecInfer, arXiv 2510.06175, and a reader's account of its section 3 and
appendix with their formulas; the paper's body and code could not be had. There, after RoPE,

    s = (q diag(f) H) . (K diag(1/f) H)^T        f_i = sqrt(max |K_i|)

so that channels of great range do not starve the others, and H, a Hadamard rotation, makes all sub
vectors alike. Codebooks are made by k-means (30 rounds) and values are coded without smoothing.

Ours by default, since each step lowers the error on trained keys (`PAPER` keeps the original): keys
before RoPE with their mean taken off; smoothing that knows the queries (below); a codebook for each
sub vector; random signs before the Hadamard rotation, also for values; a scale for each row that
keeps the inner products of keys as long as they were (for values: the nearest).

Smoothing: a code of equal error e in all rotated coordinates costs sum_i f_i^2 q_i^2 * e, and e
grows with sum_j s_j^2 / f_j^2 (s standard deviations of keys, q root mean squares of queries). By
Cauchy's inequality the product is least for f_i = sqrt(s_i / q_i).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from threadpoolctl import threadpool_limits

from velox_pack.calibrators import product_quantizer
from velox_pack.calibrators.capture import LayerStatistics, Moments
from velox_pack.calibrators.product_quantizer import Sharing
from velox_pack.calibrators.spectral import norm_range
from velox_pack.calibrators.trace import LayerTrace
from velox_pack.calibrators.vector_tools import (
    decode_log,
    encode_log,
    fitting_scale,
    half_precision,
    query_power,
    random_rotation,
    rotation_matrix,
    unit_rows,
)
from velox_pack.manifests.artifacts_vector import VecInfer
from velox_pack.manifests.errors import CalibrationError

Array = np.ndarray
Smoothing = Literal["balanced", "maxima", "none"]

_FLOOR = 1e-4  # of the largest factor of a head: channels that are always 0 have none of their own


@dataclass(frozen=True)
class Options:
    """How keys are prepared and what a codebook serves.

    smoothing   "balanced" by queries and keys, "maxima" as in the paper, or "none"
    sharing     one codebook a "layer", a "head", or a "subspace" (each sub vector of each head)
    before_rope keys before RoPE where it can be undone
    centred     the mean is taken off first
    scaled      rows are divided by their norm, and a scale of 8 bits is kept for each
    """

    smoothing: Smoothing = "balanced"
    sharing: Sharing = "subspace"
    before_rope: bool = True
    centred: bool = True
    scaled: bool = True

    def __post_init__(self) -> None:
        """Reject unknown names."""
        if self.smoothing not in ("balanced", "maxima", "none"):
            raise ValueError(f"smoothing is {self.smoothing!r}, not balanced, maxima or none")
        if self.sharing not in ("layer", "head", "subspace"):
            raise ValueError(f"sharing is {self.sharing!r}, not layer, head or subspace")


PAPER = Options(smoothing="maxima", sharing="layer", before_rope=False, centred=False, scaled=False)


def fit(
    statistics: Mapping[int, LayerStatistics],
    traces: Sequence[LayerTrace],
    part: str,
    *,
    sub: int = 4,
    bits: int = 8,
    options: Options | None = None,
    seed: int = 0,
) -> tuple[VecInfer, ...]:
    """Codebooks for "keys" or "values" of all layers given: `bits` for sub vectors of `sub`.

    Values are never smoothed. Layers that agree in shape and in standing before RoPE are stacked
    into one artifact. Raises CalibrationError for sizes that do not fit or a sample smaller than a
    codebook.
    """
    options = options or Options()
    by_index = {t.index: t for t in traces}
    groups: dict[tuple[bool, tuple[int, ...]], list[int]] = {}
    for index in sorted(statistics):
        before = part == "keys" and options.before_rope and statistics[index].rotated
        moments, _ = _of(statistics[index], part, before)
        groups.setdefault((before, moments.total.shape), []).append(index)
    artifacts = []
    for (before, shape), layers in groups.items():
        signs, mix = random_rotation(shape[1], 1, seed)
        rotation = rotation_matrix(signs, mix)
        means, factors, books, ranges = [], [], [], []
        for i in layers:
            moments, sample = _of(statistics[i], part, before)
            mean = moments.mean if options.centred else np.zeros(shape)
            centred = sample.astype(np.float64) - mean[:, None]
            f = np.ones(shape)
            if part == "keys":
                f = _factors(statistics[i], by_index[i], moments, centred, options, before)
            with threadpool_limits(1):
                rows = (centred / f[:, None]) @ rotation
            ranges.append(norm_range(rows))
            rows = unit_rows(rows) if options.scaled else rows
            books.append(product_quantizer.fit(rows, sub, bits, options.sharing, seed))
            means.append(mean)
            factors.append(f)
        artifacts.append(
            VecInfer(
                part=part,
                before_rope=before,
                scaled=options.scaled,
                mean=np.stack(means).astype(np.float32),
                smoothing=np.stack(factors).astype(np.float32),
                codebooks=half_precision(np.stack(books), "vecinfer codebooks"),
                log_scale=np.stack(ranges).astype(np.float32),
                signs=signs,
                mix=mix,
                layers=tuple(layers),
            )
        )
    return tuple(artifacts)


def _of(statistics: LayerStatistics, part: str, before: bool) -> tuple[Moments, Array]:
    if part == "keys" and not before:
        return statistics.keys, statistics.sample_keys
    if part not in ("keys", "values"):
        raise CalibrationError(f"vecinfer: part is {part!r}, not keys or values")
    return statistics.part(part)


def _factors(
    statistics: LayerStatistics,
    trace: LayerTrace,
    moments: Moments,
    centred: Array,
    options: Options,
    before: bool,
) -> Array:
    """Smoothing [H, D], positive."""
    if options.smoothing == "none":
        return np.ones(moments.total.shape)
    if options.smoothing == "maxima":
        largest = np.abs(centred).max(axis=1) if options.centred else moments.largest
        found = np.sqrt(largest)
    else:
        spread = np.sqrt(np.maximum(np.diagonal(moments.covariance, axis1=1, axis2=2), 0))
        power = query_power(statistics, trace if before else None)
        found = np.sqrt(spread / np.sqrt(power))
    top = found.max(axis=1, keepdims=True)
    factors: Array = np.maximum(found, np.where(top > 0, _FLOOR * top, 1.0))
    return factors


@dataclass(frozen=True, eq=False)
class Codes:
    """One layer's codes: `index` uint8 [H, N, D / S], `scale` uint8 [H, N] or None."""

    index: Array
    scale: Array | None


def encode(artifact: VecInfer, layer: int, x: Array) -> Codes:
    """Codes of x [H, N, D], as the artifact's part stands."""
    row = artifact.layers.index(layer)
    mean, smoothing, books = _tables(artifact, row)
    rotation = rotation_matrix(artifact.signs, artifact.mix)
    with threadpool_limits(1):
        rows = ((x - mean) / smoothing) @ rotation
        if not artifact.scaled:
            return Codes(product_quantizer.encode(rows, books), None)
        index = product_quantizer.encode(unit_rows(rows), books)
    shape = product_quantizer.decode(index, books)
    scale = fitting_scale(rows, shape, unbiased=artifact.part == "keys")
    return Codes(index, encode_log(scale, artifact.log_scale[row]))


def decode(artifact: VecInfer, layer: int, codes: Codes) -> Array:
    """x float64 [H, N, D]."""
    row = artifact.layers.index(layer)
    mean, smoothing, books = _tables(artifact, row)
    rotation = rotation_matrix(artifact.signs, artifact.mix)
    rows = product_quantizer.decode(codes.index, books)
    if codes.scale is not None:
        rows = rows * decode_log(codes.scale, artifact.log_scale[row])[:, :, None]
    decoded: Array = rows @ rotation.T * smoothing + mean
    return decoded


def _tables(artifact: VecInfer, row: int) -> tuple[Array, Array, Array]:
    mean, smoothing, books = (
        np.asarray(a[row], np.float64)
        for a in (artifact.mean, artifact.smoothing, artifact.codebooks)
    )
    return mean[:, None], smoothing[:, None], books


def bits_per_element(artifact: VecInfer) -> float:
    """Bits of state for each element."""
    entries, sub = artifact.codebooks.shape[-2:]
    width = artifact.mean.shape[-1]
    return float(np.log2(entries) / sub + (8 / width if artifact.scaled else 0))
