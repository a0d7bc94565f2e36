"""Kinds of artifact for codes of whole vectors: VecInfer, CommVQ, RaBitQ.

Letters in shapes: L stacked layers, H KV heads, D head dimension. A rotation is stored with each
artifact as `signs` int8 [R, D] of R structured rotations in a row and the `mix` float32 [M, M] that
they share ([[1]] where there is nothing to mix), as `kernels.rotation` applies them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from .artifact import Array, Artifact, Form, check_part, need
from .rules import check_positive, check_rotation

_ROTATION = {"signs": Form("I8", "R D"), "mix": Form("F32", "M M")}


@dataclass(frozen=True)
class VecInfer(Artifact):
    """Product-quantizer codebooks of smoothed and rotated rows: y = ((x - mean) / smoothing) @ R.

    `mean`, `smoothing` float32 [L, H, D], the latter positive; `codebooks` float16 [L, C, G, K, S]:
    K centroids for sub vectors of S, K a power of two from 16 to 256; C is H, or 1 where the heads
    share them, G is D / S, or 1 where the sub vectors of a row do. If `scaled`, codebooks are those
    of y / |y| and each row has an 8-bit code of ln scale on the grid (lo, step) of `log_scale`
    float32 [L, 2]: y ~ scale * decoded.
    Source: VecInfer, 2510.06175.
    """

    kind: ClassVar[str] = "vecinfer"
    forms: ClassVar[dict[str, Form]] = {
        "mean": Form("F32", "L H D"),
        "smoothing": Form("F32", "L H D"),
        "codebooks": Form("F16", "L C G K S"),
        "log_scale": Form("F32", "L 2"),
        **_ROTATION,
    }

    part: str  # "keys" or "values"
    before_rope: bool
    scaled: bool
    mean: Array
    smoothing: Array
    codebooks: Array
    log_scale: Array
    signs: Array
    mix: Array

    @classmethod
    def check_parameters(cls, parameters: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        """Sizes that make whole sub vectors and codes of 4 to 8 bits."""
        check_part(cls.kind, parameters)
        need(cls.kind, "scaled", parameters["scaled"], bool)
        _check_mix(cls.kind, sizes)
        if sizes["K"] not in (16, 32, 64, 128, 256):
            raise ValueError(f"vecinfer: {sizes['K']} centroids are not 16, 32, 64, 128 or 256")
        if sizes["D"] % sizes["S"] or sizes["G"] not in (1, sizes["D"] // sizes["S"]):
            raise ValueError(
                f"vecinfer: {sizes['G']} codebooks for sub vectors of {sizes['S']} do not make "
                f"rows of {sizes['D']}"
            )
        if sizes["C"] not in (1, sizes["H"]):
            raise ValueError(f"vecinfer: codebooks for {sizes['C']} of {sizes['H']} heads")

    def check_values(self) -> None:
        """Finite, smoothing positive, signs of +-1."""
        super().check_values()
        check_positive(self, "smoothing")
        check_rotation(self)


@dataclass(frozen=True)
class CommVQ(Artifact):
    """Additive codebooks of keys before RoPE; every entry commutes with the rotation.

    `codebooks` float16 [L, H, M, K, D]: M stages of K entries, each laid out like a key. Entry c
    stands for the block [[a, -b], [b, a]] of each pair (a, b) of its coordinates. A stage's code is
    (A, B), and k = mean + scale * sum over stages of (c_A + J c_B), J turning each pair by 90
    degrees. `mean` float32 [L, H, D]; `weight` float32 [L, H, D], positive and equal in both halves
    of a pair, is the metric of encoding: |weight * (k - decoded)|. `log_scale` float32 [L, 2] holds
    (lo, step) of the 8-bit codes of ln scale. The first `dims` coordinates are what
    RoPE turns (pairs of neighbours if `traditional`, else of halves); the rest, which it leaves
    alone, are paired by halves of their own.
    Source: CommVQ, 2506.18879.
    """

    kind: ClassVar[str] = "commvq"
    forms: ClassVar[dict[str, Form]] = {
        "mean": Form("F32", "L H D"),
        "weight": Form("F32", "L H D"),
        "codebooks": Form("F16", "L H M K D"),
        "log_scale": Form("F32", "L 2"),
    }

    dims: int
    traditional: bool
    mean: Array
    weight: Array
    codebooks: Array
    log_scale: Array

    @classmethod
    def check_parameters(cls, parameters: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        """Even sizes, and a power of two of entries."""
        need(cls.kind, "dims", parameters["dims"], int)
        need(cls.kind, "traditional", parameters["traditional"], bool)
        dims, width = parameters["dims"], sizes["D"]
        if not 0 <= dims <= width or dims % 2 or width % 2:
            raise ValueError(f"commvq: dims {dims} of {width} cannot be paired")
        if sizes["K"] not in (4, 8, 16, 32, 64):
            raise ValueError(f"commvq: {sizes['K']} entries are not 4, 8, 16, 32 or 64")

    def check_values(self) -> None:
        """Finite, weights positive and equal within each pair (else they would not commute)."""
        super().check_values()
        check_positive(self, "weight")
        weight = np.asarray(self.weight)
        first, second = rope_pairs(weight.shape[-1], self.dims, self.traditional)
        if not np.array_equal(weight[..., first], weight[..., second]):
            raise ValueError("commvq: weight differs within a pair of coordinates")


@dataclass(frozen=True)
class RaBitQ(Artifact):
    """Coarse centroids and the rotation of residuals for codes of 1 to 4 bits.

    `centroids` float16 [L, H, C, D], C a power of two up to 256; a row belongs to the nearest, and
    (x - centroid) @ R is rounded to a grid of half-integers. `log_scale` float32 [L, 2] holds
    (lo, step) of the 8-bit codes of ln scale: |residual| / cosine of residual and grid point, or
    |residual| * cosine for the nearest point instead of unbiased inner products.
    Source: RaBitQ, 2405.12497, and Extended RaBitQ, 2409.09913.
    """

    kind: ClassVar[str] = "rabitq"
    forms: ClassVar[dict[str, Form]] = {
        "centroids": Form("F16", "L H C D"),
        "log_scale": Form("F32", "L 2"),
        **_ROTATION,
    }

    part: str  # "keys" or "values"
    before_rope: bool
    centroids: Array
    log_scale: Array
    signs: Array
    mix: Array

    @classmethod
    def check_parameters(cls, parameters: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        """A number of centroids whose index fills whole bits."""
        check_part(cls.kind, parameters)
        _check_mix(cls.kind, sizes)
        count = sizes["C"]
        if count > 256 or count & (count - 1):
            raise ValueError(f"rabitq: {count} centroids are not a power of two up to 256")

    def check_values(self) -> None:
        """Finite, signs of +-1."""
        super().check_values()
        check_rotation(self)


def rope_pairs(width: int, dims: int, traditional: bool) -> tuple[np.ndarray, np.ndarray]:
    """Indices (first, second), [width / 2] each, of the coordinates that RoPE turns together.

    Coordinates from `dims` on, which RoPE leaves alone, follow as pairs of halves of their own.
    """
    turned, rest = np.arange(dims), np.arange(dims, width)
    first, second = (turned[::2], turned[1::2]) if traditional else np.split(turned, 2)
    low, high = np.split(rest, 2)
    return np.concatenate([first, low]), np.concatenate([second, high])


def _check_mix(kind: str, sizes: Mapping[str, int]) -> None:
    if sizes["D"] % sizes["M"]:
        raise ValueError(f"{kind}: a mix of {sizes['M']} does not divide rows of {sizes['D']}")
