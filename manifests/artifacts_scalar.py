"""Kinds of artifact for scalar codes: joint spectral bases, NUQ levels, low-rank bases.

Letters in shapes: L stacked layers, H KV heads, D head dimension, G head groups, C = coordinates of
a group, R ranks kept, K levels, E = K - 1 edges between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from .artifact import Array, Artifact, Form, check_part, need
from .rules import (
    check_axis,
    check_count,
    check_group,
    check_not_negative,
    check_share,
    check_variance,
    check_widths,
)

METRICS = ("queries", "heads", "fisher")
_FLOAT16_ROUNDING = 0.05  # of what should be the identity, entry by entry


@dataclass(frozen=True)
class JointSpectral(Artifact):
    """A basis for each group of KV heads, in a metric of what reads them: z = (x - mean) @ forward.

    The vectors of the `group` heads of a group stand behind one another: C = group * D coordinates.
    `mean` float32 [L, H, D]; `forward` float16 [L, G, C, C], not orthogonal. `undo` float16
    [L, H, E, E], E = D, or 1 for a multiple of the identity, takes z back:
    x = mean + (z @ forward^T), each head's D coordinates times its undo. `variance` float32
    [L, G, C] of the coordinates z. `cost` float32 [L, G, C], never rising, is what coordinate j
    costs at a relative error of 1 (nats where sensitivities were known), `isotropic` [L, G] what a
    group costs when each head's error has relative size 1 and no direction. `log_norm` float32
    [L, 2] holds (lo, step) of the 8-bit codes of ln |z| per token and group.
    """

    kind: ClassVar[str] = "joint-spectral"
    forms: ClassVar[dict[str, Form]] = {
        "mean": Form("F32", "L H D"),
        "forward": Form("F16", "L G C C"),
        "undo": Form("F16", "L H E E"),
        "variance": Form("F32", "L G C"),
        "cost": Form("F32", "L G C"),
        "isotropic": Form("F32", "L G"),
        "log_norm": Form("F32", "L 2"),
    }

    part: str  # "keys" or "values"
    before_rope: bool
    group: int  # heads in a group
    metric: str  # "queries", "heads" or "fisher"
    power: float
    mean: Array
    forward: Array
    undo: Array
    variance: Array
    cost: Array
    isotropic: Array
    log_norm: Array

    @classmethod
    def check_parameters(cls, parameters: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        """A part, a known metric, a power of 0 to 1, whole groups of heads."""
        check_part(cls.kind, parameters)
        if parameters["metric"] not in METRICS:
            raise ValueError(
                f"{cls.kind}: metric is {parameters['metric']!r}, not one of {METRICS}"
            )
        check_share(cls.kind, "power", parameters["power"], 1)
        check_group(cls.kind, parameters["group"], sizes)
        if sizes["E"] not in (1, sizes["D"]):
            raise ValueError(f"{cls.kind}: undo is {sizes['E']} wide, not 1 or {sizes['D']}")

    def check_values(self) -> None:
        """Finite, invertible as described, no negative variance, costs never rising."""
        super().check_values()
        forward = np.asarray(self.forward).astype(np.float32)
        undo = np.asarray(self.undo).astype(np.float32)
        layers, groups, width, _ = forward.shape
        split = np.swapaxes(forward, 2, 3).reshape(layers, groups, width, self.group, -1)
        by_head = undo.reshape(layers, groups, self.group, *undo.shape[-2:])
        if undo.shape[-1] == 1:
            back = split * by_head[:, :, None, :, 0]
        else:
            back = np.einsum("lgwnd,lgnde->lgwne", split, by_head)
        back = back.reshape(forward.shape)
        if np.abs(forward @ back - np.eye(width, dtype=np.float32)).max() > _FLOAT16_ROUNDING:
            raise ValueError(f"{self.kind}: undo does not take the basis back")
        check_not_negative(self, "variance")
        cost = np.asarray(self.cost)
        if cost.min() < 0 or np.any(np.diff(cost, axis=-1) > 0):
            raise ValueError(f"{self.kind}: cost is negative or rises")


@dataclass(frozen=True)
class Nuq(Artifact):
    """Levels of one layer's keys or values, for coordinates brought to [-1, 1].

    `levels` float32 [L, K] ascending, `edges` float32 [L, E] between them: a coordinate takes the
    level whose cell it is in (edges are not the midpoints where Q-Norm has moved the levels).
    `low`, `high` float32 [L, H, D] are what -1 and 1 stand for in each channel; what lies beyond is
    an outlier and kept apart. With `axis` "token" (values) they are found for each token from
    what is left of its H * D numbers without the `outliers` share that is largest and smallest, and
    `low`, `high` only say where tokens of the calibration lay. The first `exact_first` tokens of a
    sequence are not coded. Source: KVQuant, 2401.18079.
    """

    kind: ClassVar[str] = "nuq"
    forms: ClassVar[dict[str, Form]] = {
        "levels": Form("F32", "L K"),
        "edges": Form("F32", "L E"),
        "low": Form("F32", "L H D"),
        "high": Form("F32", "L H D"),
    }

    part: str  # "keys" or "values"
    before_rope: bool
    axis: str  # "channel" or "token"
    bits: int
    outliers: float
    exact_first: int
    levels: Array
    edges: Array
    low: Array
    high: Array

    @classmethod
    def check_parameters(cls, parameters: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        """Bits fit the levels, the share of outliers is below a half."""
        check_part(cls.kind, parameters)
        check_axis(cls.kind, parameters["axis"])
        need(cls.kind, "bits", parameters["bits"], int)
        bits = parameters["bits"]
        if not 1 <= bits <= 8 or sizes["K"] != 2**bits or sizes["E"] != sizes["K"] - 1:
            raise ValueError(f"nuq: {sizes['K']} levels, {sizes['E']} edges for {bits} bits")
        need(cls.kind, "outliers", parameters["outliers"], (int, float))
        if not 0 <= parameters["outliers"] < 0.5:
            raise ValueError(f"nuq: outliers is {parameters['outliers']}, not 0 to 0.5")
        check_count(cls.kind, "exact_first", parameters["exact_first"])

    def check_values(self) -> None:
        """Finite, ascending, a range for every channel."""
        super().check_values()
        for role in ("levels", "edges"):
            if np.any(np.diff(np.asarray(getattr(self, role)), axis=-1) < 0):
                raise ValueError(f"nuq: {role} are not ascending")
        if np.any(np.asarray(self.high) <= np.asarray(self.low)):
            raise ValueError("nuq: high is not above low")


@dataclass(frozen=True)
class LowRank(Artifact):
    """An orthonormal basis of few latents for each group of KV heads: y = (x - mean) @ basis.

    The vectors of the `group` heads of a group stand behind one another: C = group * head
    dimension. `mean` float32 [L, G, C]; `basis` float16 [L, G, C, R], columns by descending
    `variance` (float32 [L, G, R]); `widths` uint8 [L, G, R] bits of each latent, 0 where it is
    dropped (columns beyond a group's own rank are zeros). `log_norm` float32 [L, 2] holds
    (lo, step) of the 8-bit codes of ln |y| per token and group.
    Sources: SVDq, 2502.15304; PALU, 2407.21118.
    """

    kind: ClassVar[str] = "lowrank"
    forms: ClassVar[dict[str, Form]] = {
        "mean": Form("F32", "L G C"),
        "basis": Form("F16", "L G C R"),
        "variance": Form("F32", "L G R"),
        "widths": Form("U8", "L G R"),
        "log_norm": Form("F32", "L 2"),
    }

    part: str  # "keys" or "values"
    before_rope: bool
    group: int  # heads in a group
    mean: Array
    basis: Array
    variance: Array
    widths: Array
    log_norm: Array

    @classmethod
    def check_parameters(cls, parameters: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        """Whole heads in a group, no more latents than coordinates."""
        check_part(cls.kind, parameters)
        need(cls.kind, "group", parameters["group"], int)
        if parameters["group"] < 1 or sizes["C"] % parameters["group"]:
            raise ValueError(f"lowrank: {sizes['C']} coordinates for {parameters['group']} heads")
        if sizes["R"] > sizes["C"]:
            raise ValueError(f"lowrank: {sizes['R']} latents of {sizes['C']} coordinates")

    def check_values(self) -> None:
        """Finite, orthonormal where latents have bits, at most 8 bits, variances descending."""
        super().check_values()
        check_widths(self, "widths")
        basis = np.asarray(self.basis).astype(np.float32)
        gram = np.swapaxes(basis, -1, -2) @ basis
        used = np.asarray(self.widths) > 0
        wanted = np.eye(gram.shape[-1]) * used[..., None]
        wrong = np.abs(gram - wanted) * (used[..., None] & used[..., None, :])
        if wrong.max() > _FLOAT16_ROUNDING:
            raise ValueError("lowrank: basis is not orthonormal")
        check_variance(self)
