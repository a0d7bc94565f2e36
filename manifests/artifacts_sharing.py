"""Kinds of artifact for what a layer may take from another, or from its own codes.

Letters in shapes: L stacked layers, H KV heads, D head dimension, G head groups, C = coordinates of
a group, S coordinates that a map reads. A linear map is stored in 8 bits: the matrix of group g is
weights[g] / inputs[g][:, None] * outputs[g], and what it predicts is bias + x @ matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from .artifact import Array, Artifact, Form, check_part
from .rules import (
    check_bits,
    check_group,
    check_not_negative,
    check_positive,
    check_rounding,
    check_share,
    off_orthonormal,
)

SOURCES = ("own", "keys", "previous keys", "previous values")
_MAP = {
    "weights": Form("I8", "L G S C"),
    "inputs": Form("F32", "L G S"),
    "outputs": Form("F32", "L G C"),
    "bias": Form("F32", "L H D"),
}
_ORTHOGONAL = 0.05  # float16 rounding, entry by entry


@dataclass(frozen=True)
class XQuant(Artifact):
    """Which layers take the codes of the layer before, with offsets and steps of their own.

    `partner` int32 [L]: the layer whose codes layer l decodes, or -1. Rounding is affine, `bits`
    bits in groups of `group` along `axis`; `relax` brings the outermost levels nearer by that
    share of the range. `shared`, `own` float32 [L] are the relative squared errors with the
    partner's codes and with own ones, `agreement` [L] the mean correlation (0 to 1) of the codes
    before with this layer's numbers; 0 where there is no layer to share with.
    Source: XQuant, 2510.11236.
    """

    kind: ClassVar[str] = "xquant"
    forms: ClassVar[dict[str, Form]] = {
        "partner": Form("I32", "L"),
        "shared": Form("F32", "L"),
        "own": Form("F32", "L"),
        "agreement": Form("F32", "L"),
    }

    part: str  # "keys" or "values"
    before_rope: bool
    axis: str  # "channel" or "token"
    bits: int
    group: int
    relax: float
    partner: Array
    shared: Array
    own: Array
    agreement: Array

    @classmethod
    def check_parameters(cls, parameters: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        """A part, an axis, 1 to 8 bits, a group, levels that stay in order."""
        check_part(cls.kind, parameters)
        check_rounding(cls.kind, parameters)
        check_share(cls.kind, "relax", parameters["relax"], 0.5)

    def check_values(self) -> None:
        """Partners are the layers right before, and have codes of their own."""
        super().check_values()
        partner = np.asarray(self.partner)
        borrowers = {n for n, p in zip(self.layers, partner.tolist(), strict=True) if p >= 0}
        for layer, lender in zip(self.layers, partner.tolist(), strict=True):
            if lender < -1 or lender >= layer or lender in borrowers:
                raise ValueError(f"xquant: layer {layer} cannot take the codes of layer {lender}")
        check_not_negative(self, "shared", "own", "agreement")


@dataclass(frozen=True)
class Prediction(Artifact):
    """What decoded neighbours say of a layer's keys or values; only the rest is coded.

    `sources` are what the map of a group of `group` heads reads, one behind the other, S
    coordinates in all: "keys" are the same layer's, the others those of layer `previous` int32 [L]
    (-1: none, and its weights are 0). Keys are meant before RoPE where `before_rope`. The rest is
    coded at `bits` bits; `log_norm` float32 [L, 2] holds (lo, step) of the 8-bit codes of ln of its
    scale. `left` float32 [L] is the share of the centred variance that the map leaves over.
    """

    kind: ClassVar[str] = "prediction"
    forms: ClassVar[dict[str, Form]] = {
        **_MAP,
        "previous": Form("I32", "L"),
        "log_norm": Form("F32", "L 2"),
        "left": Form("F32", "L"),
    }

    part: str  # "keys" or "values"
    before_rope: bool
    group: int  # heads in a group
    sources: list[str]
    bits: int
    weights: Array
    inputs: Array
    outputs: Array
    bias: Array
    previous: Array
    log_norm: Array
    left: Array

    @classmethod
    def check_parameters(cls, parameters: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        """Known sources, whole groups."""
        check_part(cls.kind, parameters)
        check_group(cls.kind, parameters["group"], sizes)
        check_bits(cls.kind, "bits", parameters["bits"])
        sources = parameters["sources"]
        known = isinstance(sources, list) and all(source in SOURCES for source in sources)
        if not known or not sources:
            raise ValueError(f"prediction: sources {sources!r} are not a list of some of {SOURCES}")

    def check_values(self) -> None:
        """Finite; scales positive; a layer comes after the one that it is predicted from."""
        super().check_values()
        check_positive(self, "inputs", "outputs")
        if np.any(np.asarray(self.previous) >= np.array(self.layers)):
            raise ValueError("prediction: previous is not a layer before")
        check_not_negative(self, "left")


@dataclass(frozen=True)
class Correction(Artifact):
    """The nearest linear estimate of keys or values from their own rounded numbers.

    x ~ decoded + bias + decoded @ matrix, for `group` heads together, after affine rounding to
    `bits` bits in groups of `group_size` along `axis`: what rounding does wrong is taken back as
    far as other channels and heads know of it. Costs no byte of a token. `plain`, `corrected`
    float32 [L] are the relative squared errors without and with it.
    """

    kind: ClassVar[str] = "correction"
    forms: ClassVar[dict[str, Form]] = {
        **_MAP,
        "plain": Form("F32", "L"),
        "corrected": Form("F32", "L"),
    }

    part: str  # "keys" or "values"
    before_rope: bool
    axis: str  # "channel" or "token"
    bits: int
    group_size: int  # numbers that share an offset and a step
    group: int  # heads in a group
    weights: Array
    inputs: Array
    outputs: Array
    bias: Array
    plain: Array
    corrected: Array

    @classmethod
    def check_parameters(cls, parameters: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        """Rounding as for XQuant, whole groups."""
        check_part(cls.kind, parameters)
        check_rounding(cls.kind, dict(parameters) | {"group": parameters["group_size"]})
        check_group(cls.kind, parameters["group"], sizes)
        if sizes["S"] != sizes["C"]:
            raise ValueError(f"correction: reads {sizes['S']} coordinates, not {sizes['C']}")

    def check_values(self) -> None:
        """Finite; scales positive."""
        super().check_values()
        check_positive(self, "inputs", "outputs")
        check_not_negative(self, "plain", "corrected")


@dataclass(frozen=True)
class MiniCache(Artifact):
    """Pairs of layers that keep one direction for both: partner l keeps it, l has its own lengths.

    `partner` int32 [L], -1 where a layer is not merged. `similarity` float32 [L, H] is the mean
    cosine to the layer before. A token whose angular distance (angle / pi) is beyond `gamma`
    float32 [L] is kept unmerged, a share of `retained` of the tokens. Directions are those of
    (x - mean) @ turn for `group` heads together, `mean` float32 [L, H, D], `turn` float16
    [L, G, C, C] orthogonal (it brings a layer to the one before), or [L, G, 1, 1] of ones for
    x itself. `error` float32 [L]: relative squared error of the pair, at exact directions.
    Source: MiniCache, 2405.14366.
    """

    kind: ClassVar[str] = "minicache"
    forms: ClassVar[dict[str, Form]] = {
        "partner": Form("I32", "L"),
        "similarity": Form("F32", "L G"),
        "gamma": Form("F32", "L"),
        "mean": Form("F32", "L H D"),
        "turn": Form("F16", "L G E E"),
        "error": Form("F32", "L"),
    }

    part: str  # "keys" or "values"
    before_rope: bool
    group: int  # heads that have one direction
    t: float  # where between the layers the direction lies: 0 the earlier, 1 the later
    retained: float
    partner: Array
    similarity: Array
    gamma: Array
    mean: Array
    turn: Array
    error: Array

    @classmethod
    def check_parameters(cls, parameters: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        """Shares within 0 and 1, whole groups."""
        check_part(cls.kind, parameters)
        check_share(cls.kind, "t", parameters["t"], 1.0)
        check_share(cls.kind, "retained", parameters["retained"], 1.0)
        width = sizes["E"] if sizes["E"] > 1 else sizes["D"] * sizes["H"] // sizes["G"]
        check_group(cls.kind, parameters["group"], {**sizes, "C": width})

    def check_values(self) -> None:
        """Orthogonal turns, pairs of neighbours."""
        super().check_values()
        if off_orthonormal(self.turn) > _ORTHOGONAL:
            raise ValueError("minicache: turn is not orthogonal")
        if np.any(np.asarray(self.partner) >= np.array(self.layers)):
            raise ValueError("minicache: partner is not a layer before")
        if np.abs(np.asarray(self.similarity)).max() > 1 + 1e-3:
            raise ValueError("minicache: similarity is no cosine")
        check_not_negative(self, "gamma", "error")
