"""Artifacts that come from true attention: how to score keys, and how many of them to keep.

Letters in shapes: L stacked layers, H KV heads, Q query heads, D head dimension, F frequencies,
R directions, K budgets, G KV heads or 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from .artifact import Array, Artifact, Form, need
from .rules import check_count, check_shares

BUDGET_METHODS = ("uniform", "pyramid", "squeeze", "ada", "measured")


@dataclass(frozen=True)
class ExpectedAttention(Artifact):
    """Queries before RoPE as a Gaussian for each query head, to score keys (after RoPE) with.

    A key k scores at position t by three numbers for each query head: linear = m . k * scale,
    square = |k @ f|^2 * scale^2 / 2, and its norm |k|, where m and f are `mean` float32 [L, Q, D]
    and the columns of `factor` float32 [L, Q, D, R], each turned by the average of RoPE's rotations
    at positions t to t + horizon - 1 (`inv_freq` float32 [L, F]: angle(p, i) = p * inv_freq[i]).
    With weights (a, b, c) of the KV head (`weights` float32 [L, H, 3]) a query head's score is
    a * linear + b * square + c * |k|; a KV head's is the logarithm of the mean of its query heads'
    softmax over keys. (1, 1, 0) is the paper's, + means attended. Source: Expected Attention,
    2510.00636.
    """

    kind: ClassVar[str] = "expected-attention"
    forms: ClassVar[dict[str, Form]] = {
        "mean": Form("F32", "L Q D"),
        "factor": Form("F32", "L Q D R"),
        "weights": Form("F32", "L H 3"),
        "inv_freq": Form("F32", "L F"),
    }

    scale: float  # of q . k
    horizon: int  # coming positions that are averaged over
    dims: int
    traditional: bool
    mean: Array
    factor: Array
    weights: Array
    inv_freq: Array

    @classmethod
    def check_parameters(cls, parameters: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        """A positive scale and horizon, whole groups of query heads, RoPE that fits the head."""
        need(cls.kind, "scale", parameters["scale"], (int, float))
        need(cls.kind, "horizon", parameters["horizon"], int)
        if parameters["horizon"] < 1 or not parameters["scale"] > 0:
            raise ValueError(
                f"{cls.kind}: horizon {parameters['horizon']} or scale {parameters['scale']} "
                "is not positive"
            )
        if sizes["Q"] % sizes["H"]:
            raise ValueError(f"{cls.kind}: {sizes['Q']} query heads for {sizes['H']} KV heads")
        if sizes["R"] > sizes["D"]:
            raise ValueError(f"{cls.kind}: {sizes['R']} directions of {sizes['D']} coordinates")
        _check_rope(cls.kind, parameters, sizes)


@dataclass(frozen=True)
class AttentionFilter(Artifact):
    """A direction and a weight of the norm per layer and KV head, fitted to true log attention.

    A key k (after RoPE) scores filter . k + norm * |k|; + means attended. `filters` float32
    [L, H, D], `norm` float32 [L, H]. With `frame` "moving" the filter is turned by RoPE first, to
    position t + lead when t tokens have been seen: it is a query that stands for the coming
    ones (`inv_freq` float32 [L, F]: angle(p, i) = p * inv_freq[i]). With "fixed" it never turns, so
    that a key's score is known once and for all.
    """

    kind: ClassVar[str] = "attention-filter"
    forms: ClassVar[dict[str, Form]] = {
        "filters": Form("F32", "L H D"),
        "norm": Form("F32", "L H"),
        "inv_freq": Form("F32", "L F"),
    }

    frame: str  # "moving" or "fixed"
    lead: int  # positions ahead
    dims: int
    traditional: bool
    filters: Array
    norm: Array
    inv_freq: Array

    @classmethod
    def check_parameters(cls, parameters: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        """A known frame, a lead that is not negative, RoPE that fits the head."""
        if parameters["frame"] not in ("moving", "fixed"):
            raise ValueError(
                f"{cls.kind}: frame is {parameters['frame']!r}, not 'moving' or 'fixed'"
            )
        check_count(cls.kind, "lead", parameters["lead"])
        _check_rope(cls.kind, parameters, sizes)


@dataclass(frozen=True)
class FilterReport(Artifact):
    """How good Q-Filters are, per layer and KV head, float32 [L, H]; of no use to a cache.

    `projection` mean of q . filter, `positive` share of queries with q . filter > 0, `anisotropy`
    first singular value of the queries over the root mean square of the others, `second` over the
    second. Spearman correlations, on the calibration text, of true mean attention with the
    filter's scores, with minus the key's norm, and with the first direction of the keys.
    """

    kind: ClassVar[str] = "filter-report"
    forms: ClassVar[dict[str, Form]] = {
        role: Form("F32", "L H")
        for role in (
            "projection",
            "positive",
            "anisotropy",
            "second",
            "correlation",
            "correlation_norm",
            "correlation_keys",
        )
    }

    projection: Array
    positive: Array
    anisotropy: Array
    second: Array
    correlation: Array
    correlation_norm: Array
    correlation_keys: Array

    def check_values(self) -> None:
        """Finite, correlations within -1 and 1, shares within 0 and 1."""
        super().check_values()
        for role in ("correlation", "correlation_norm", "correlation_keys"):
            if np.abs(np.asarray(getattr(self, role))).max() > 1.0001:
                raise ValueError(f"{self.kind}: {role} is not within -1 and 1")
        check_shares(self, "positive")


@dataclass(frozen=True)
class Budgets(Artifact):
    """How a common budget of keys is shared: a head may keep share * budget of them.

    `shares` float32 [L, G, K], G = 1 where the heads of a layer have the same, at `ratios` float32
    [K], rising: the budget as a share of the keys that compete (neither sinks nor recent). Their
    mean over layers and heads is 1 at each ratio, and share * ratio is at most 1. In between,
    interpolate over the logarithm of the ratio, as `at` does.
    Sources: PyramidKV 2406.02069, SqueezeAttention 2404.04793, AdaKV 2407.11550.
    """

    kind: ClassVar[str] = "budgets"
    forms: ClassVar[dict[str, Form]] = {"shares": Form("F32", "L G K"), "ratios": Form("F32", "K")}

    method: str
    shares: Array
    ratios: Array
    details: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def check_parameters(cls, parameters: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        """A known method, an object."""
        if parameters["method"] not in BUDGET_METHODS:
            raise ValueError(f"budgets: method is {parameters['method']!r}, not {BUDGET_METHODS}")
        need(cls.kind, "details", parameters["details"], dict)

    def check_values(self) -> None:
        """Finite, not negative, of mean 1, of no more keys than there are."""
        super().check_values()
        shares, ratios = np.asarray(self.shares), np.asarray(self.ratios)
        if ratios.min() <= 0 or ratios.max() > 1 or np.any(np.diff(ratios) <= 0):
            raise ValueError("budgets: ratios do not rise within 0 and 1")
        if shares.min() < 0 or np.any(shares * ratios > 1.001):
            raise ValueError("budgets: shares are negative or of more keys than there are")
        if np.abs(shares.mean(axis=(0, 1), dtype=np.float64) - 1).max() > 1e-3:
            raise ValueError("budgets: shares do not have mean 1")

    def at(self, ratio: float) -> np.ndarray:
        """Shares float64 [L, G] when the budget is `ratio` of the keys; the nearest end outside."""
        ratios = np.log(np.asarray(self.ratios, np.float64))
        shares = np.asarray(self.shares, np.float64)
        place = np.clip(np.interp(np.log(ratio), ratios, np.arange(len(ratios))), 0, None)
        low = min(int(place), len(ratios) - 1)
        high = min(low + 1, len(ratios) - 1)
        between: np.ndarray = shares[..., low] + (place - low) * (
            shares[..., high] - shares[..., low]
        )
        return between


def _check_rope(kind: str, parameters: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    need(kind, "dims", parameters["dims"], int)
    need(kind, "traditional", parameters["traditional"], bool)
    if parameters["dims"] != 2 * sizes["F"] or parameters["dims"] > sizes["D"]:
        raise ValueError(
            f"{kind}: RoPE turns {parameters['dims']} of {sizes['D']} coordinates "
            f"with {sizes['F']} frequencies"
        )
