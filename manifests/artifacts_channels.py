"""Kinds of artifact for channels and tokens that need more than the others.

Letters in shapes: L stacked layers, H KV heads, D head dimension, K outlier channels, R directions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from .artifact import Array, Artifact, Form, check_part, need
from .rules import (
    check_bits,
    check_count,
    check_not_negative,
    check_positive,
    check_rounding,
    check_share,
    check_shares,
    off_orthonormal,
)

KITTY_RULES = ("boost", "water")
STATISTICS = ("none", "short keys", "long keys", "short values", "long values")
_ORTHONORMAL = 0.05  # float16 rounding, entry by entry


@dataclass(frozen=True)
class Kitty(Artifact):
    """Bits for each channel, from what its error costs.

    `order` uint16 [L, H, D] channels by falling `sensitivity` (float32 [L, H, D], by channel);
    `widths` uint8 [L, H, D] bits by channel, the same sum in all heads. `rule` "boost": a share of
    the channels has 2 bits more (the paper's), "water": every bit where it gains most. `mean`,
    `deviation` float32 [L, H, D] place the levels of a unit Gaussian in each channel, so that no
    range is found or stored at run time. Source: Kitty, 2511.18643.
    """

    kind: ClassVar[str] = "kitty"
    forms: ClassVar[dict[str, Form]] = {
        "order": Form("U16", "L H D"),
        "widths": Form("U8", "L H D"),
        "sensitivity": Form("F32", "L H D"),
        "mean": Form("F32", "L H D"),
        "deviation": Form("F32", "L H D"),
    }

    part: str  # "keys" or "values"
    before_rope: bool
    rule: str
    bits: float  # average over the channels
    order: Array
    widths: Array
    sensitivity: Array
    mean: Array
    deviation: Array

    @classmethod
    def check_parameters(cls, parameters: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        """A known rule, a number of bits."""
        check_part(cls.kind, parameters)
        if parameters["rule"] not in KITTY_RULES:
            raise ValueError(f"kitty: rule is {parameters['rule']!r}, not one of {KITTY_RULES}")
        check_share(cls.kind, "bits", parameters["bits"], 8)

    def check_values(self) -> None:
        """An order of all channels, widths that never rise along it, positive deviations."""
        super().check_values()
        order = np.asarray(self.order).astype(np.int64)
        if np.any(np.sort(order, axis=-1) != np.arange(order.shape[-1])):
            raise ValueError("kitty: order does not name every channel once")
        widths = np.take_along_axis(np.asarray(self.widths).astype(np.int64), order, axis=-1)
        if widths.max() > 8 or np.any(np.diff(widths, axis=-1) > 0):
            raise ValueError("kitty: widths are above 8 bits or rise along the order")
        if np.any(widths.sum(axis=-1) != widths.sum(axis=-1).flat[0]):
            raise ValueError("kitty: heads differ in the sum of their widths")
        check_not_negative(self, "sensitivity")
        check_positive(self, "deviation")


@dataclass(frozen=True)
class Outliers(Artifact):
    """Channels that are coded apart, with more bits, from the rest of their vector.

    `channels` uint16 [L, H, K] ascending, coded at `outlier_bits` by the levels of a unit Gaussian
    at `mean`, `deviation` float32 [L, H, D]; the other D - K channels, in order and less their
    mean, are rotated and coded at `bits` with an 8-bit code of ln of their scale, `log_norm`
    float32 [L, 2] (lo, step). With `pairs` the two channels that RoPE turns together go together.
    `threshold` float32 [L] is the least ratio of an outlier's deviation to the median one.
    """

    kind: ClassVar[str] = "outliers"
    forms: ClassVar[dict[str, Form]] = {
        "channels": Form("U16", "L H K"),
        "mean": Form("F32", "L H D"),
        "deviation": Form("F32", "L H D"),
        "log_norm": Form("F32", "L 2"),
        "threshold": Form("F32", "L"),
    }

    part: str  # "keys" or "values"
    before_rope: bool
    pairs: bool
    bits: int
    outlier_bits: int
    channels: Array
    mean: Array
    deviation: Array
    log_norm: Array
    threshold: Array

    @classmethod
    def check_parameters(cls, parameters: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        """Bits of both streams; not all channels are outliers."""
        check_part(cls.kind, parameters)
        need(cls.kind, "pairs", parameters["pairs"], bool)
        check_bits(cls.kind, "bits", parameters["bits"])
        check_bits(cls.kind, "outlier_bits", parameters["outlier_bits"])
        if sizes["K"] >= sizes["D"]:
            raise ValueError(f"outliers: {sizes['K']} of {sizes['D']} channels")

    def check_values(self) -> None:
        """Ascending channels that exist, positive deviations."""
        super().check_values()
        channels = np.asarray(self.channels).astype(np.int64)
        if channels.max() >= np.asarray(self.mean).shape[-1]:
            raise ValueError("outliers: channels names a channel that does not exist")
        if np.any(np.diff(channels, axis=-1) <= 0):
            raise ValueError("outliers: channels are not ascending")
        check_positive(self, "deviation")


@dataclass(frozen=True)
class Gear(Artifact):
    """A fixed basis of what affine rounding leaves over, and the share of outliers kept apart.

    `basis` float16 [L, H, D, R], orthonormal columns; `captured` float32 [L, H] is the share of the
    residual's energy in it (R / D if the residual has no direction). `outliers` is the share of
    each group's numbers kept in 16 bits. Source: GEAR, 2403.05527.
    """

    kind: ClassVar[str] = "gear"
    forms: ClassVar[dict[str, Form]] = {
        "basis": Form("F16", "L H D R"),
        "captured": Form("F32", "L H"),
    }

    part: str  # "keys" or "values"
    before_rope: bool
    axis: str  # "channel" or "token"
    bits: int
    group: int  # numbers that share an offset and a step
    outliers: float
    basis: Array
    captured: Array

    @classmethod
    def check_parameters(cls, parameters: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        """Rounding as for XQuant; no more directions than channels."""
        check_part(cls.kind, parameters)
        check_rounding(cls.kind, parameters)
        check_share(cls.kind, "outliers", parameters["outliers"], 0.5)
        if sizes["R"] > sizes["D"]:
            raise ValueError(f"gear: {sizes['R']} directions of {sizes['D']}")

    def check_values(self) -> None:
        """Orthonormal columns."""
        super().check_values()
        if off_orthonormal(self.basis) > _ORTHONORMAL:
            raise ValueError("gear: basis is not orthonormal")
        check_not_negative(self, "captured")


@dataclass(frozen=True)
class Sinks(Artifact):
    """How to tell a token that collects attention (a sink) by the length of its key or value.

    `statistic` uint8 [L] is a place in STATISTICS, 0 where the layer has no sinks of its own or
    lengths do not tell them; the statistic of a token is the mean over heads of ln(length /
    median), with `keys`, `values` float32 [L, H] the medians, negative for the "short" ones; a
    token at or above `threshold` float32 [L] is a sink. On the calibration text: `mass` [L] is the
    share of attention that tokens called sinks hold, `recall` [L] the share of them found,
    `false_positives` [L] the share of other tokens taken for sinks, `protected` [L] the share of
    all tokens kept exactly. The first `skip_first` tokens do not count.
    Source: KVSink, 2508.04257 (which finds sinks by their hidden states).
    """

    kind: ClassVar[str] = "sinks"
    forms: ClassVar[dict[str, Form]] = {
        "statistic": Form("U8", "L"),
        "keys": Form("F32", "L H"),
        "values": Form("F32", "L H"),
        **{
            role: Form("F32", "L")
            for role in ("threshold", "mass", "recall", "false_positives", "protected")
        },
    }

    skip_first: int
    least: float  # mean attention of later queries that makes a sink
    statistic: Array
    keys: Array
    values: Array
    threshold: Array
    mass: Array
    recall: Array
    false_positives: Array
    protected: Array

    @classmethod
    def check_parameters(cls, parameters: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        """A count and a share."""
        check_count(cls.kind, "skip_first", parameters["skip_first"])
        check_share(cls.kind, "least", parameters["least"], 1.0)

    def check_values(self) -> None:
        """Known statistics, positive medians, shares within 0 and 1."""
        super().check_values()
        if np.asarray(self.statistic).max() >= len(STATISTICS):
            raise ValueError(f"sinks: statistic is none of {STATISTICS}")
        check_positive(self, "keys", "values")
        check_shares(self, "mass", "recall", "false_positives", "protected")
