"""Codecs for the benchmark of calibrations: the runtime's own, or any pair of NumPy functions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from velox_pack.caches.codecs.affine import Affine
from velox_pack.caches.codecs.base import Codec
from velox_pack.caches.codecs.rotated import LevelTable, LogNorm, RotatedScalar
from velox_pack.calibrators import (
    codebooks,
    lowrank,
    nuq,
    spectral,
    spectral_metric,
    waterfill,
)
from velox_pack.calibrators.capture import LayerStatistics
from velox_pack.kernels import make_rotation, rotate
from velox_pack.manifests.artifacts import Artifact, Codebook, Spectral
from velox_pack.manifests.artifacts_scalar import JointSpectral, LowRank, Nuq

Array = np.ndarray
Make = Callable[[int], Codec]  # layer -> codec
Bits = float | dict[int, float]  # for all layers alike, or by layer


def rows_of(artifacts: Sequence[Any]) -> dict[int, tuple[Any, int]]:
    """Layer -> its artifact and its row there."""
    return {layer: (a, n) for a in artifacts for n, layer in enumerate(a.layers)}


def size_of(artifacts: Sequence[Artifact]) -> int:
    """Bytes of all tensors."""
    return sum(int(t.nbytes) for a in artifacts for t in a.to_tensors().values())


def table_of(book: Codebook) -> LevelTable:
    """Levels for 1 to 8 bits: the Gaussian's where the book has none."""
    levels = {**codebooks.fit().levels, **book.levels}
    return LevelTable({b: mx.array(level) for b, level in levels.items()})


GAUSSIAN = table_of(codebooks.fit())


def at(bits: Bits, layer: int) -> float:
    return bits[layer] if isinstance(bits, dict) else bits


@dataclass(frozen=True)
class Turned:
    """A change of basis of groups of heads; matrices [G, C, C], not always orthogonal."""

    into: mx.array
    out: mx.array
    group: int = 1

    def forward(self, x: mx.array) -> mx.array:
        B, _, N, D = x.shape
        x = x.reshape(B, -1, self.group, N, D).swapaxes(2, 3).reshape(B, -1, N, self.group * D)
        return x @ self.into

    def backward(self, z: mx.array) -> mx.array:
        x = z @ self.out
        B, G, N, _ = x.shape
        x = x.reshape(B, G, N, self.group, -1).swapaxes(2, 3)
        return x.reshape(B, G * self.group, N, -1)

    def constants(self) -> list[mx.array]:
        return [self.into, self.out]


@dataclass
class InNumpy:
    """A codec whose decoded vectors come from a NumPy function of [H, N, D] and a position."""

    through: Callable[[Array, int], Array]
    granularity: int = 1

    def encode(self, x: mx.array, start: int) -> tuple[mx.array]:
        rows = np.array(x[0].astype(mx.float32)).astype(np.float64)
        return (mx.array(self.through(rows, start).astype(np.float32))[None],)

    def decode(self, packed: Any, start: int, dtype: mx.Dtype) -> mx.array:
        return packed[0].astype(dtype)

    def constants(self) -> list[mx.array]:
        return []


def levels(
    mean: Array,
    into: Array,
    out: Array,
    variance: Array,
    widths: Array,
    log_norm: Array,
    table: LevelTable = GAUSSIAN,
    group: int = 1,
) -> RotatedScalar:
    """The runtime's scalar code in any basis: mean off, an 8-bit norm, levels by coordinate."""
    share = variance / np.maximum(variance.sum(axis=-1, keepdims=True), 1e-30)
    return RotatedScalar(
        turn=Turned(mx.array(into.astype(np.float32)), mx.array(out.astype(np.float32)), group),
        sigma=mx.array(np.maximum(np.sqrt(share), 1e-6).astype(np.float32)),
        widths=tuple(int(w) for w in widths),
        table=table,
        norm=LogNorm(*log_norm.tolist()),
        mean=mx.array(mean.astype(np.float32)),
    )


def affine(bits: int, dim: int) -> Make:
    return lambda layer: Affine(bits, 64, dim)


def rotation(dim: int) -> Array:
    turned: Array = np.array(rotate(mx.eye(dim), make_rotation(dim, 0)), np.float64)
    return turned


def rotated(
    statistics: dict[int, LayerStatistics], part: str, bits: Bits, table: LevelTable = GAUSSIAN
) -> Make:
    """Mean off and a random rotation: what any code with a basis of its own has to beat."""

    def make(layer: int) -> Codec:
        moments, sample = statistics[layer].part(part)
        heads, dim = moments.mean.shape
        into = np.broadcast_to(rotation(dim), (heads, dim, dim))
        same = np.ones((heads, dim))
        given = waterfill.widths(same, at(bits, layer))[0]
        norm = spectral.norm_range(sample - moments.mean[:, None])
        out = np.swapaxes(into, 1, 2)
        return levels(moments.mean, into, out, same, given, norm, table)

    return make


def by_head(artifacts: Sequence[Spectral], bits: Bits) -> Make:
    """The `spectral` recipe's basis for each head."""

    def make(layer: int) -> Codec:
        a, n = rows_of(artifacts)[layer]
        basis = a.basis[n].astype(np.float64)
        share = a.variance[n] / a.variance[n].sum(axis=-1, keepdims=True)
        given = waterfill.widths(share, at(bits, layer))[0]
        return levels(
            a.mean[n], basis, np.swapaxes(basis, 1, 2), a.variance[n], given, a.log_norm[n]
        )

    return make


def joint(artifacts: Sequence[JointSpectral], bits: Bits, spread: bool = True) -> Make:
    """Joint bases; with `spread` coordinates of equal width are turned among themselves."""
    if spread:
        rows = [
            [spectral_metric.widths(a, n, at(bits, i))[0] for n, i in enumerate(a.layers)]
            for a in artifacts
        ]
        artifacts = tuple(
            spectral_metric.spread(a, np.stack(r)) for a, r in zip(artifacts, rows, strict=True)
        )

    def make(layer: int) -> Codec:
        a, n = rows_of(artifacts)[layer]
        given = spectral_metric.widths(a, n, at(bits, layer))[0]
        out = spectral_metric.backward(a, n)
        own = (a.mean[n], a.forward[n], out, a.variance[n], given, a.log_norm[n])
        return levels(*own, group=a.group)

    return make


def nuq_codec(artifacts: Sequence[Nuq], part: str, counted: list[float]) -> Make:
    """`counted` collects the true bits, which vary with the outliers."""
    found = rows_of([a for a in artifacts if a.part == part])

    def make(layer: int) -> Codec:
        a, n = found[layer]

        def through(x: Array, start: int) -> Array:
            codes = nuq.encode(a, n, x, start)
            counted.append(codes.bits_per_element(a.bits))
            return nuq.decode(a, n, codes)

        return InNumpy(through)

    return make


def lowrank_codec(artifacts: Sequence[LowRank]) -> Make:
    found = rows_of(artifacts)

    def make(layer: int) -> Codec:
        a, n = found[layer]
        return InNumpy(lambda x, _: lowrank.decode(a, n, *lowrank.encode(a, n, x)))

    return make


def through(
    artifacts: Sequence[Artifact], encode: Callable[..., Any], decode: Callable[..., Array]
) -> Make:
    """`encode(artifact, layer, x)` and `decode(artifact, layer, codes)`."""
    found = rows_of(artifacts)

    def make(layer: int) -> Codec:
        a, _ = found[layer]
        return InNumpy(lambda x, _: decode(a, layer, encode(a, layer, x)))

    return make
