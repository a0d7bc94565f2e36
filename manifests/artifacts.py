"""The kinds of artifact of format 1, one frozen dataclass each, and the registry `KINDS`.

Letters in shapes: L stacked layers, H KV heads, D head dimension. Float types on disk are given
by `forms`; a fit computes in float64 and casts once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np

from .artifact import Array, Artifact, Form, HasForm, check_part, need, same_keys
from .artifacts_attention import AttentionFilter, Budgets, ExpectedAttention, FilterReport
from .artifacts_channels import Gear, Kitty, Outliers, Sinks
from .artifacts_scalar import JointSpectral, LowRank, Nuq
from .artifacts_sharing import Correction, MiniCache, Prediction, XQuant
from .artifacts_vector import CommVQ, RaBitQ, VecInfer
from .rules import check_rotation, check_variance, check_widths, off_orthonormal

__all__ = [
    "KINDS",
    "Allocation",
    "Artifact",
    "Center",
    "Codebook",
    "QFilters",
    "Rope",
    "Rotation",
    "Spectral",
    "Widths",
]


@dataclass(frozen=True)
class Codebook(Artifact):
    """Scalar levels for a source of mean 0 and variance 1, for any of 1 to 8 bits.

    `levels[b]` is float32 [2**b], strictly ascending; boundaries are the midpoints.
    """

    kind: ClassVar[str] = "codebook"
    forms: ClassVar[dict[str, Form]] = {f"levels_{b}": Form("F32", str(2**b)) for b in range(1, 9)}

    distribution: str
    levels: Mapping[int, Array]

    def _tensors(self) -> dict[str, Array]:
        return {f"levels_{bits}": value for bits, value in sorted(self.levels.items())}

    def parameters(self) -> dict[str, Any]:
        """The distribution that the levels are optimal for."""
        return {"distribution": self.distribution}

    @classmethod
    def _build(
        cls, parameters: Mapping[str, Any], layers: tuple[int, ...], tensors: Mapping[str, mx.array]
    ) -> Codebook:
        levels = {int(role.removeprefix("levels_")): tensor for role, tensor in tensors.items()}
        return cls(**parameters, levels=levels, layers=layers)

    @classmethod
    def check_keys(cls, parameters: Mapping[str, Any], roles: Mapping[str, object]) -> None:
        """As the base, but any non-empty choice of bits will do."""
        same_keys("codebook: parameters", set(parameters), {"distribution"})
        unknown = sorted(set(roles) - set(cls.forms))
        if unknown or not roles:
            raise ValueError(
                f"codebook: tensors: unknown {unknown}" if roles else "codebook: empty"
            )

    @classmethod
    def check_forms(
        cls, parameters: Mapping[str, Any], layers: tuple[int, ...], forms: Mapping[str, HasForm]
    ) -> None:
        """As the base, for the bits that are there."""
        cls.check_keys(parameters, forms)
        if layers:
            raise ValueError("codebook: is for all layers alike, so layers must be empty")
        need("codebook", "distribution", parameters["distribution"], str)
        for role, found in forms.items():
            problem = cls.forms[role].problem(found.dtype, tuple(found.shape), {})
            if problem:
                raise ValueError(f"codebook: {role} {problem}")

    def check_values(self) -> None:
        """Finite and strictly ascending."""
        super().check_values()
        for bits, value in self.levels.items():
            if np.any(np.diff(np.asarray(value)) <= 0):
                raise ValueError(f"codebook: levels_{bits} is not strictly ascending")


@dataclass(frozen=True)
class Rope(Artifact):
    """Rotary embedding as the model applies it: angle(position p, pair i) = p * inv_freq[i].

    `inv_freq` float32 [L, dims/2] in radians per position; `dims` leading coordinates of a head
    are rotated; `traditional` pairs neighbours (2i, 2i+1), otherwise halves (i, i + dims/2).
    """

    kind: ClassVar[str] = "rope"
    forms: ClassVar[dict[str, Form]] = {"inv_freq": Form("F32", "L F")}

    dims: int
    traditional: bool
    inv_freq: Array

    @classmethod
    def check_parameters(cls, parameters: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        """`dims` is twice the frequencies."""
        need(cls.kind, "dims", parameters["dims"], int)
        need(cls.kind, "traditional", parameters["traditional"], bool)
        if parameters["dims"] != 2 * sizes["F"]:
            raise ValueError(
                f"rope: dims {parameters['dims']} is not twice {sizes['F']} frequencies"
            )


@dataclass(frozen=True)
class Spectral(Artifact):
    """An orthogonal basis per layer and KV head: y = (x - mean) @ basis.

    `mean` float32 [L, H, D]; `basis` float16 [L, H, D, D], its COLUMNS eigenvectors of the
    centred second moment by descending `variance` (float32 [L, H, D]); `log_norm` float32 [L, 2]
    holds (lo, step) of the 8-bit codes of ln |x - mean| per token: ln norm = lo + code * step.
    """

    kind: ClassVar[str] = "spectral"
    forms: ClassVar[dict[str, Form]] = {
        "mean": Form("F32", "L H D"),
        "basis": Form("F16", "L H D D"),
        "variance": Form("F32", "L H D"),
        "log_norm": Form("F32", "L 2"),
    }

    part: str  # "keys" or "values"
    before_rope: bool
    mean: Array
    basis: Array
    variance: Array
    log_norm: Array

    @classmethod
    def check_parameters(cls, parameters: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        """A part."""
        check_part(cls.kind, parameters)

    def check_values(self) -> None:
        """Finite, the basis orthogonal to float16 rounding, variances descending."""
        super().check_values()
        if off_orthonormal(self.basis) > 0.02:
            raise ValueError("spectral: basis is not orthogonal")
        check_variance(self)


@dataclass(frozen=True)
class Widths(Artifact):
    """Bits for each rotated coordinate: `keys` uint8 [L, Dk], `values` uint8 [L, Dv], 0 to 8.

    Coordinates are sorted by variance, so the heads of a layer share one row. `plan` names the
    rule that chose them, `bits` the average that it aimed for.
    """

    kind: ClassVar[str] = "widths"
    forms: ClassVar[dict[str, Form]] = {"keys": Form("U8", "L K"), "values": Form("U8", "L V")}

    plan: str
    bits: float
    keys: Array
    values: Array

    @classmethod
    def check_parameters(cls, parameters: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        """A name and a number."""
        need(cls.kind, "plan", parameters["plan"], str)
        need(cls.kind, "bits", parameters["bits"], (int, float))

    def check_values(self) -> None:
        """At most 8 bits."""
        check_widths(self, "keys", "values")


@dataclass(frozen=True)
class QFilters(Artifact):
    """One direction per layer and KV head: `filters` float32 [L, H, D], unit norm.

    A key's score is its dot product with the filter, after RoPE; larger means attended.
    Source: Q-Filters, 2503.02812, section 3.
    """

    kind: ClassVar[str] = "qfilters"
    forms: ClassVar[dict[str, Form]] = {"filters": Form("F32", "L H D")}

    filters: Array

    def check_values(self) -> None:
        """Unit norm."""
        super().check_values()
        norms = np.linalg.norm(np.asarray(self.filters), axis=-1)
        if np.abs(norms - 1).max() > 1e-3:
            raise ValueError("qfilters: filters are not of unit norm")


@dataclass(frozen=True)
class Allocation(Artifact):
    """Bits per layer for keys and for values: float32 [L] each, and what they were chosen from.

    `sensitivity_keys`, `sensitivity_values` float32 [L, H]; `target` and `achieved` are average
    bits per element; `details` is whatever else the fit wants to record.
    Source: RateQuant, 2605.06675.
    """

    kind: ClassVar[str] = "allocation"
    forms: ClassVar[dict[str, Form]] = {
        "keys": Form("F32", "L"),
        "values": Form("F32", "L"),
        "sensitivity_keys": Form("F32", "L H"),
        "sensitivity_values": Form("F32", "L H"),
    }

    target: float
    achieved: float
    keys: Array
    values: Array
    sensitivity_keys: Array
    sensitivity_values: Array
    details: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def check_parameters(cls, parameters: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        """Two numbers and an object."""
        need(cls.kind, "target", parameters["target"], (int, float))
        need(cls.kind, "achieved", parameters["achieved"], (int, float))
        need(cls.kind, "details", parameters["details"], dict)

    def check_values(self) -> None:
        """No negative bits."""
        super().check_values()
        for role in ("keys", "values"):
            if np.asarray(getattr(self, role)).min() < 0:
                raise ValueError(f"allocation: {role} holds negative bits")


@dataclass(frozen=True)
class Center(Artifact):
    """Mean and range of norms per layer and KV head, for codes that need no basis of their own.

    `mean` float32 [L, H, D]; `log_norm` float32 [L, 2] holds (lo, step) of the 8-bit codes of
    ln |x - mean| per token: ln norm = lo + code * step.
    """

    kind: ClassVar[str] = "center"
    forms: ClassVar[dict[str, Form]] = {
        "mean": Form("F32", "L H D"),
        "log_norm": Form("F32", "L 2"),
    }

    part: str  # "keys" or "values"
    before_rope: bool
    mean: Array
    log_norm: Array

    @classmethod
    def check_parameters(cls, parameters: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        """A part."""
        check_part(cls.kind, parameters)


@dataclass(frozen=True)
class Rotation(Artifact):
    """A structured random rotation of one width, as `kernels.rotation` applies it.

    `signs` int8 [D] of +-1; `mix` float32 [M, M] orthogonal across the D / block blocks ([[1]]
    where there is nothing to mix).
    """

    kind: ClassVar[str] = "rotation"
    forms: ClassVar[dict[str, Form]] = {"signs": Form("I8", "D"), "mix": Form("F32", "M M")}

    width: int
    block: int
    signs: Array
    mix: Array

    @classmethod
    def check_parameters(cls, parameters: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        """`width` is the number of signs, `block` a power of two that fits the mix."""
        need(cls.kind, "width", parameters["width"], int)
        need(cls.kind, "block", parameters["block"], int)
        width, block = parameters["width"], parameters["block"]
        if width != sizes["D"]:
            raise ValueError(f"rotation: width {width} is not {sizes['D']} signs")
        if block < 1 or block & (block - 1) or (sizes["M"] > 1 and block * sizes["M"] != width):
            raise ValueError(f"rotation: block {block} does not fit width {width}")

    def check_values(self) -> None:
        """Signs of +-1, an orthogonal mix."""
        super().check_values()
        check_rotation(self)


KINDS: dict[str, type[Artifact]] = {
    kind.kind: kind
    for kind in (
        Codebook, Rope, Spectral, Center, Rotation, Widths, QFilters, Allocation,
        JointSpectral, Nuq, LowRank, VecInfer, CommVQ, RaBitQ,
        ExpectedAttention, AttentionFilter, FilterReport, Budgets,
        XQuant, Prediction, Correction, MiniCache, Kitty, Outliers, Gear, Sinks,
    )
}  # fmt: skip
