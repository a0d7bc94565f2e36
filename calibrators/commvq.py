"""CommVQ: additive codebooks for keys before RoPE whose entries commute with the rotation.

Read: the abstract of CommVQ, arXiv 2506.18879, and the authors' EM training as a fork of their
repository carries it (`training/quantize_key_cache.py`); the paper's body could not be had.

RoPE turns each pair of coordinates (a, b) by an angle: it multiplies a + ib by exp(i angle). So a
key is a complex vector of P = D / 2 pairs, and a stage's codebook has K entries c_k of the same
form, each standing for a block [[a, -b], [b, a]] in each pair. A code is two indices (A, B):

    decoded = c_A + i c_B        2 log2(K) bits a stage; a key is a scale times the sum of M stages

i turns each pair by 90 degrees and the blocks commute with every rotation: RoPE may be applied to
what was decoded, or to the coefficients (1, i) before they meet the codebook (`decode_turned`).

EM fits one stage after another to what the stages before have left (`additive_em`). Deviations,
which lower the error on trained keys: the mean is taken off first (it turns with RoPE like a
codebook of one entry); errors are weighed by the mean square of the queries in each pair; a scale
is kept for each head (8 bits; the authors keep one for all heads of a token, 16 bits); stages are
fitted together again after the first pass, and encoding follows several candidates.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from threadpoolctl import threadpool_limits

from velox_pack.calibrators.additive_em import fit_codebooks, search
from velox_pack.calibrators.capture import LayerStatistics
from velox_pack.calibrators.spectral import norm_range
from velox_pack.calibrators.trace import LayerTrace
from velox_pack.calibrators.vector_tools import (
    decode_log,
    encode_log,
    fitting_scale,
    half_precision,
    query_power,
    unit_rows,
)
from velox_pack.manifests.artifacts_vector import CommVQ, rope_pairs
from velox_pack.manifests.errors import CalibrationError

Array = np.ndarray

ENTRIES = (4, 8, 16, 32, 64)
SCALE_BITS = 8
BEAM = 4


def fit(
    statistics: Mapping[int, LayerStatistics],
    traces: Sequence[LayerTrace],
    *,
    bits: float = 2.0,
    entries: int = 16,
    seed: int = 0,
) -> tuple[CommVQ, ...]:
    """Codebooks for the keys, before RoPE, of all layers given.

    `bits` per element, those of the scale included, give as many stages of 2 log2(entries) bits as
    fit. Layers that agree in shape
    and RoPE's pairing are stacked into one artifact; a layer without RoPE has dims 0. Raises
    CalibrationError for odd sizes, impossible bits, or a sample smaller than a codebook.
    """
    if entries not in ENTRIES:
        raise CalibrationError(f"commvq: entries is {entries}, not one of {ENTRIES}")
    by_index = {t.index: t for t in traces}
    groups: dict[tuple[tuple[int, ...], int, bool], list[int]] = {}
    for index in sorted(statistics):
        rope = by_index[index].rope
        turned = (0, False) if rope is None else (rope.dims, rope.traditional)
        groups.setdefault((statistics[index].keys.total.shape, *turned), []).append(index)
    artifacts = []
    for (shape, dims, traditional), layers in groups.items():
        stages = _stages(shape[1], dims, bits, entries)
        with threadpool_limits(1):
            fitted = [
                _fit_layer(statistics[i], by_index[i], dims, traditional, stages, entries, seed)
                for i in layers
            ]
        mean, weight, codebooks, ranges = (np.stack(x) for x in zip(*fitted, strict=True))
        artifacts.append(
            CommVQ(
                dims=dims,
                traditional=traditional,
                mean=mean.astype(np.float32),
                weight=weight.astype(np.float32),
                codebooks=half_precision(codebooks, "commvq codebooks"),
                log_scale=ranges.astype(np.float32),
                layers=tuple(layers),
            )
        )
    return tuple(artifacts)


def _stages(width: int, dims: int, bits: float, entries: int) -> int:
    if width % 2 or dims % 2:
        raise CalibrationError(f"commvq: {width} coordinates, {dims} of them turned, make no pairs")
    stages = math.floor((bits * width - SCALE_BITS) / (2 * math.log2(entries)) + 1e-9)
    if not 1 <= stages <= 8 * width:
        raise CalibrationError(f"commvq: {bits} bits for {width} coordinates make {stages} stages")
    return stages


def _fit_layer(
    statistics: LayerStatistics,
    trace: LayerTrace,
    dims: int,
    traditional: bool,
    stages: int,
    entries: int,
    seed: int,
) -> tuple[Array, Array, Array, Array]:
    mean = statistics.keys_before.mean
    pairs = rope_pairs(mean.shape[1], dims, traditional)
    power = query_power(statistics, trace)
    # A code turns pairs, those too that RoPE leaves alone: both coordinates of each weigh alike.
    power[:, pairs[0]] = power[:, pairs[1]] = (power[:, pairs[0]] + power[:, pairs[1]]) / 2
    weight = np.sqrt(power)
    weight /= weight.mean(axis=1, keepdims=True)
    keys = (statistics.sample_keys_before.astype(np.float64) - mean[:, None]) * weight[:, None]
    books = [
        fit_codebooks(to_pairs(head, pairs), stages, entries, seed, beam=BEAM)
        for head in unit_rows(keys)
    ]
    codebooks = from_pairs(np.stack(books), pairs) / weight[:, None, None]
    return mean, weight, codebooks, norm_range(keys)


@dataclass(frozen=True, eq=False)
class Codes:
    """One layer's codes: `entry` uint8 [H, N, M, 2] (A and B), `scale` uint8 [H, N]."""

    entry: Array
    scale: Array


def encode(artifact: CommVQ, layer: int, keys: Array, *, beam: int = BEAM) -> Codes:
    """Codes of keys [H, N, D] before RoPE."""
    row = artifact.layers.index(layer)
    pairs = rope_pairs(keys.shape[2], artifact.dims, artifact.traditional)
    weight = np.asarray(artifact.weight[row], np.float64)[:, None]
    centred = (keys - np.asarray(artifact.mean[row], np.float64)[:, None]) * weight
    books = np.asarray(artifact.codebooks[row], np.float64) * weight[:, None]
    entries, scales = [], []
    with threadpool_limits(1):
        for x, c in zip(centred, books, strict=True):
            unit = unit_rows(x)
            codes, left = search(to_pairs(unit, pairs), to_pairs(c, pairs), beam)
            entries.append(codes)
            scales.append(fitting_scale(x, unit - from_pairs(left, pairs), unbiased=False))
    return Codes(np.stack(entries), encode_log(np.stack(scales), artifact.log_scale[row]))


def decode(artifact: CommVQ, layer: int, codes: Codes) -> Array:
    """Keys before RoPE, float64 [H, N, D]."""
    pairs = rope_pairs(artifact.mean.shape[-1], artifact.dims, artifact.traditional)
    first, second = _sums(artifact, layer, codes, pairs)
    return _with_mean(artifact, layer, first + 1j * second, pairs)


def decode_turned(artifact: CommVQ, layer: int, codes: Codes, cos: Array, sin: Array) -> Array:
    """Keys after RoPE, float64 [H, N, D], for the tables [N, dims / 2] of their positions.

    The rotation is applied to the coefficients of the code, never to a decoded key: with it, entry
    A of each pair counts (cos, sin) and entry B counts (-sin, cos).
    """
    pairs = rope_pairs(artifact.mean.shape[-1], artifact.dims, artifact.traditional)
    first, second = _sums(artifact, layer, codes, pairs)
    one = np.ones((len(cos), len(pairs[0])), complex)
    one[:, : cos.shape[1]] = cos + 1j * sin
    turned = first * one + second * (1j * one)
    return _with_mean(artifact, layer, turned, pairs, one)


def bits_per_element(artifact: CommVQ) -> float:
    """Bits of state for each element."""
    _, _, stages, entries, width = artifact.codebooks.shape
    return float((stages * 2 * math.log2(entries) + SCALE_BITS) / width)


def to_pairs(x: Array, pairs: tuple[Array, Array]) -> Array:
    """Rows [..., D] as complex [..., D / 2]."""
    z: Array = x[..., pairs[0]] + 1j * x[..., pairs[1]]
    return z


def from_pairs(z: Array, pairs: tuple[Array, Array]) -> Array:
    """Complex [..., D / 2] as rows [..., D]."""
    x = np.empty((*z.shape[:-1], 2 * z.shape[-1]))
    x[..., pairs[0]], x[..., pairs[1]] = z.real, z.imag
    return x


def _sums(
    artifact: CommVQ, layer: int, codes: Codes, pairs: tuple[Array, Array]
) -> tuple[Array, Array]:
    """Scaled sums over the stages of entries A and of entries B, complex [H, N, P] each."""
    row = artifact.layers.index(layer)
    books = to_pairs(np.asarray(artifact.codebooks[row], np.float64), pairs)
    heads = np.arange(len(books))[:, None]
    shape = (*codes.scale.shape, books.shape[-1])
    first, second = np.zeros(shape, complex), np.zeros(shape, complex)
    for stage in range(codes.entry.shape[2]):
        first += books[heads, stage, codes.entry[:, :, stage, 0]]
        second += books[heads, stage, codes.entry[:, :, stage, 1]]
    scale = decode_log(codes.scale, artifact.log_scale[row])[:, :, None]
    return first * scale, second * scale


def _with_mean(
    artifact: CommVQ,
    layer: int,
    z: Array,
    pairs: tuple[Array, Array],
    one: Array | float = 1.0,
) -> Array:
    row = artifact.layers.index(layer)
    mean = to_pairs(np.asarray(artifact.mean[row], np.float64), pairs)[:, None]
    return from_pairs(z + mean * one, pairs)
