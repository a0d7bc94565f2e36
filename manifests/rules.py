"""Rules that several kinds of artifact share, for parameters and for values.

Each raises ValueError with one line that names the kind and the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .artifact import Array, need


def check_count(kind: str, name: str, value: Any) -> None:
    """ValueError unless a whole number of at least 0."""
    need(kind, name, value, int)
    if value < 0:
        raise ValueError(f"{kind}: {name} is {value}, below 0")


def check_bits(kind: str, name: str, bits: Any) -> None:
    """ValueError unless 1 to 8."""
    need(kind, name, bits, int)
    if not 1 <= bits <= 8:
        raise ValueError(f"{kind}: {name} is {bits}, not 1 to 8")


def check_share(kind: str, name: str, value: Any, top: float) -> None:
    """ValueError unless a number from 0 to `top`."""
    need(kind, name, value, (int, float))
    if not 0 <= value <= top:
        raise ValueError(f"{kind}: {name} is {value}, not 0 to {top}")


def check_axis(kind: str, axis: Any) -> None:
    """ValueError unless rounding goes along channels or tokens."""
    if axis not in ("channel", "token"):
        raise ValueError(f"{kind}: axis is {axis!r}, not 'channel' or 'token'")


def check_rounding(kind: str, parameters: Mapping[str, Any]) -> None:
    """ValueError unless axis, bits and group of affine rounding make sense."""
    check_axis(kind, parameters["axis"])
    check_bits(kind, "bits", parameters["bits"])
    need(kind, "group", parameters["group"], int)
    if parameters["group"] < 1:
        raise ValueError(f"{kind}: groups of {parameters['group']} numbers")


def check_group(kind: str, group: Any, sizes: Mapping[str, int]) -> None:
    """ValueError unless G groups of `group` heads of D make H heads and C coordinates."""
    need(kind, "group", group, int)
    if (sizes["G"] * group, sizes["C"]) != (sizes["H"], sizes["D"] * group):
        raise ValueError(
            f"{kind}: {sizes['G']} groups of {group} heads and {sizes['C']} coordinates "
            f"for {sizes['H']} heads of {sizes['D']}"
        )


def check_positive(artifact: Any, *roles: str) -> None:
    """ValueError unless every number is above 0."""
    for role in roles:
        if np.asarray(getattr(artifact, role)).min() <= 0:
            raise ValueError(f"{artifact.kind}: {role} is not positive: it holds 0 or below")


def check_not_negative(artifact: Any, *roles: str) -> None:
    """ValueError if a number is below 0."""
    for role in roles:
        if np.asarray(getattr(artifact, role)).min() < 0:
            raise ValueError(f"{artifact.kind}: {role} is negative")


def check_shares(artifact: Any, *roles: str) -> None:
    """ValueError unless every number is from 0 to 1."""
    for role in roles:
        value = np.asarray(getattr(artifact, role))
        if value.min() < 0 or value.max() > 1:
            raise ValueError(f"{artifact.kind}: {role} is not within 0 and 1")


def check_widths(artifact: Any, *roles: str) -> None:
    """ValueError unless widths of codes are at most 8 bits."""
    for role in roles:
        if np.asarray(getattr(artifact, role)).max() > 8:
            raise ValueError(f"{artifact.kind}: {role} holds a width above 8 bits")


def check_variance(artifact: Any) -> None:
    """ValueError unless `variance` falls along its last axis and is never negative."""
    variance = np.asarray(artifact.variance)
    if np.any(variance < 0) or np.any(np.diff(variance, axis=-1) > 0):
        raise ValueError(f"{artifact.kind}: variance is negative or not in descending order")


def check_rotation(artifact: Any) -> None:
    """ValueError unless `signs` are +-1 and `mix` is orthogonal."""
    if np.any(np.abs(np.asarray(artifact.signs)) != 1):
        raise ValueError(f"{artifact.kind}: signs holds something else than +-1")
    mix = np.asarray(artifact.mix, np.float64)
    if np.abs(mix.T @ mix - np.eye(len(mix))).max() > 1e-4:
        raise ValueError(f"{artifact.kind}: mix is not orthogonal")


def off_orthonormal(columns: Array) -> float:
    """Largest entry of |A^T A - 1| over matrices A [..., N, M], computed in float32."""
    matrix = np.asarray(columns).astype(np.float32)
    gram = np.swapaxes(matrix, -1, -2) @ matrix
    return float(np.abs(gram - np.eye(gram.shape[-1], dtype=np.float32)).max())
