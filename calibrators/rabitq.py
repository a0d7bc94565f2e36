"""RaBitQ: coarse centroids, a random rotation, and codes whose inner products are unbiased.

Read: the proof of theorem 3.2 in RaBitQ, arXiv 2405.12497 (appendices B and C), the authors' code
of RaBitQ (`data/rabitq.py`) and of Extended RaBitQ (2409.09913, `Quantizer.hpp`), and the manual of
their library (quantizer, estimator).

A vector x belongs to the nearest centroid c; its residual r = x - c is rotated and its direction
o = (r R) / |r| is rounded to the direction of a grid point y of half-integers, the one of greatest
cosine <y, o> / |y|: with 1 bit the signs, with B bits all of +-0.5, +-1.5, ... +-(2**B - 1) / 2.
The inner product with any query q is then estimated as

    <x, q> ~ <c, q> + |r| <y, q R> / <y, o>

which is unbiased over the rotation, and off by more than |r| |q| sqrt(1 / cos**2 - 1) * e /
sqrt(D - 1) no more often than a coordinate of a random unit vector in D - 1 dimensions exceeds
e / sqrt(D - 1) (equation 58 to 62). One number is kept for each vector, |r| / cos, as an 8-bit code
(the authors keep two to four floats). Values, which meet no query, take |r| * cos instead: the
nearest vector of that direction.

Deviations: three structured rotations in place of a Haar matrix (as in the authors' library), and
queries stay in full precision (the authors round them to 4 bits for bitwise arithmetic).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from threadpoolctl import threadpool_limits

from velox_pack.calibrators.capture import LayerStatistics
from velox_pack.calibrators.product_quantizer import kmeans, nearest
from velox_pack.calibrators.spectral import norm_range
from velox_pack.calibrators.vector_tools import (
    decode_log,
    encode_log,
    half_precision,
    random_rotation,
    rotation_matrix,
)
from velox_pack.manifests.artifacts_vector import RaBitQ
from velox_pack.manifests.errors import CalibrationError

Array = np.ndarray

BITS = (1, 2, 3, 4)
MAX_CENTROIDS = 256
ROUNDS = 3
_ROWS = 1024  # rows whose rescaling factors are searched at once


def fit(
    statistics: Mapping[int, LayerStatistics], part: str, *, centroids: int = 64, seed: int = 0
) -> tuple[RaBitQ, ...]:
    """Centroids of "keys" (before RoPE where it can be undone) or "values" of all layers given.

    Layers that agree in shape and in standing before RoPE are stacked into one artifact. Raises
    CalibrationError for a number of centroids that is no power of two up to 256, or more than the
    sample can place.
    """
    if not 1 <= centroids <= MAX_CENTROIDS or centroids & (centroids - 1):
        raise CalibrationError(
            f"rabitq: centroids is {centroids}, not a power of two from 1 to {MAX_CENTROIDS}"
        )
    groups: dict[tuple[bool, tuple[int, ...]], list[int]] = {}
    for index in sorted(statistics):
        moments, _ = statistics[index].part(part)
        before = part == "keys" and statistics[index].rotated
        groups.setdefault((before, moments.total.shape), []).append(index)
    artifacts = []
    for (before, shape), layers in groups.items():
        fitted = [_fit_layer(statistics[i], part, centroids, seed) for i in layers]
        signs, mix = random_rotation(shape[1], ROUNDS, seed)
        artifacts.append(
            RaBitQ(
                part=part,
                before_rope=before,
                centroids=half_precision(np.stack([c for c, _ in fitted]), "rabitq centroids"),
                log_scale=np.stack([r for _, r in fitted]).astype(np.float32),
                signs=signs,
                mix=mix,
                layers=tuple(layers),
            )
        )
    return tuple(artifacts)


def _fit_layer(
    statistics: LayerStatistics, part: str, count: int, seed: int
) -> tuple[Array, Array]:
    moments, sample = statistics.part(part)
    if count == 1:
        found = moments.mean[:, None, :]
    else:
        found = np.stack([kmeans(head, count, seed=seed) for head in sample])
    residual = [x - c[nearest(x, c)] for x, c in zip(sample.astype(np.float64), found, strict=True)]
    return found, norm_range(np.stack(residual))


@dataclass(frozen=True, eq=False)
class Codes:
    """One layer's codes: `owner` uint8 [H, N], `grid` uint8 [H, N, D], `scale` uint8 [H, N]."""

    bits: int
    owner: Array
    grid: Array
    scale: Array


def encode(artifact: RaBitQ, layer: int, x: Array, bits: int, *, unbiased: bool = True) -> Codes:
    """Codes of x [H, N, D], as the artifact's part stands (keys before RoPE if it says so).

    With `unbiased=False` the scale makes the decoded row nearest to x (for values, which meet no
    query): the estimate then shrinks inner products by cos**2.
    """
    row = artifact.layers.index(layer)
    centroids = np.asarray(artifact.centroids[row], np.float64)
    rotation = rotation_matrix(artifact.signs, artifact.mix)
    with threadpool_limits(1):
        owner = np.stack([nearest(h, c) for h, c in zip(x, centroids, strict=True)])
        residual = x - np.take_along_axis(centroids, owner[:, :, None], axis=1)
        grid, scale, cosine = quantize(residual @ rotation, bits)
        if not unbiased:
            scale = scale * np.square(cosine)
    return Codes(bits, owner.astype(np.uint8), grid, encode_log(scale, artifact.log_scale[row]))


def decode(artifact: RaBitQ, layer: int, codes: Codes) -> Array:
    """x [H, N, D] float64 whose inner product with a query is the estimate."""
    row = artifact.layers.index(layer)
    centroids = np.asarray(artifact.centroids[row], np.float64)
    rotation = rotation_matrix(artifact.signs, artifact.mix)
    direction = unit(codes.grid, codes.bits) @ rotation.T
    scale = decode_log(codes.scale, artifact.log_scale[row])
    base = np.take_along_axis(centroids, codes.owner[:, :, None].astype(np.int64), axis=1)
    decoded: Array = base + scale[:, :, None] * direction
    return decoded


def bits_per_element(artifact: RaBitQ, bits: int) -> float:
    """Bits of state for each element: grid code, centroid and scale."""
    count, width = artifact.centroids.shape[-2:]
    return float(bits + (np.log2(count) + 8) / width)


def quantize(rows: Array, bits: int) -> tuple[Array, Array, Array]:
    """Grid codes uint8 [..., D] of rotated residuals r; |r| / cos and cos, float64 [...].

    Code u stands for y = u - (2**bits - 1) / 2, and cos is that of the angle between r and y. A
    residual of 0 has scale 0 and cos 1. Raises ValueError for bits other than 1 to 4.
    """
    if bits not in BITS:
        raise ValueError(f"rabitq: bits is {bits}, not 1 to 4")
    flat = np.asarray(rows, np.float64).reshape(-1, rows.shape[-1])
    magnitude = np.abs(flat)
    levels = np.zeros(flat.shape, np.int64)
    if bits > 1:
        for i in range(0, len(flat), _ROWS):
            levels[i : i + _ROWS] = _levels(magnitude[i : i + _ROWS], 2 ** (bits - 1))
    inner = ((levels + 0.5) * magnitude).sum(axis=1)
    length = np.sqrt(np.square(levels + 0.5).sum(axis=1))
    norm = np.linalg.norm(flat, axis=1)
    cosine = np.divide(inner, norm * length, out=np.ones(len(flat)), where=norm > 0)
    top = 2 ** (bits - 1)
    codes = np.where(flat > 0, top + levels, top - 1 - levels).astype(np.uint8)
    shape = rows.shape[:-1]
    return codes.reshape(rows.shape), (norm / cosine).reshape(shape), cosine.reshape(shape)


def _levels(magnitude: Array, count: int) -> Array:
    """Levels 0 to count - 1 of each |o_i|, so that level + 0.5 has the greatest cosine with |o|.

    The best levels are floor(t * |o|), clipped, for some t. They change where t * |o_i| crosses an
    integer m, which adds |o_i| to the inner product and 2 m to the square of the length: all
    crossings of a row are sorted by t, and both are summed up along them.
    """
    n, width = magnitude.shape
    steps = np.arange(1, count)
    with np.errstate(divide="ignore"):
        at = (steps / magnitude[:, :, None]).reshape(n, -1)  # zeros never cross
    order = np.argsort(at, axis=1, kind="stable")
    gain = np.repeat(magnitude, count - 1, axis=1)
    inner = np.cumsum(np.take_along_axis(gain, order, axis=1), axis=1)
    square = np.cumsum(np.take(np.tile(2.0 * steps, width), order), axis=1)
    start = 0.5 * magnitude.sum(axis=1, keepdims=True)
    cosine = np.concatenate([start, start + inner], axis=1)
    cosine /= np.sqrt(width / 4 + np.concatenate([np.zeros((n, 1)), square], axis=1))
    best = cosine.argmax(axis=1)
    crossed = np.zeros(at.shape, bool)
    np.put_along_axis(crossed, order, np.arange(at.shape[1])[None] < best[:, None], axis=1)
    levels: Array = crossed.reshape(n, width, count - 1).sum(axis=2)
    return levels


def unit(codes: Array, bits: int) -> Array:
    """Grid points of codes [..., D] as unit vectors, float64."""
    y = codes.astype(np.float64) - (2**bits - 1) / 2
    direction: Array = y / np.linalg.norm(y, axis=-1, keepdims=True)
    return direction
