"""What every kind of artifact has in common: named tensors of a fixed form, and plain parameters.

A kind is a frozen dataclass. Fields listed in `forms` are tensors (NumPy when fitted, lazy MLX
arrays when opened from a bundle); `layers` says which layers of the model axis 0 stacks; every
other field is a parameter that goes into velox.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Protocol, TypeVar

import mlx.core as mx
import numpy as np

from .dtypes import dtype_name
from .errors import BundleError

Array = Any  # np.ndarray when fitted, mx.array when opened; a union would need a cast at each use
A = TypeVar("A", bound="Artifact")
PARTS = ("keys", "values")


class HasForm(Protocol):
    """Anything with a safetensors type name and a shape: TensorSpec, Entry."""

    @property
    def dtype(self) -> str:
        """Safetensors type name."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes."""


@dataclass(frozen=True)
class Form:
    """Type and symbolic shape of a tensor, such as `Form("F16", "L H D D")`.

    L is the number of layers; another letter is any size of at least 1, the same wherever it
    occurs in the artifact; a number is itself.
    """

    dtype: str
    dims: str

    def problem(self, dtype: str, shape: tuple[int, ...], sizes: dict[str, int]) -> str | None:
        """What is wrong with a tensor, or None; `sizes` collects what each letter stands for."""
        if dtype != self.dtype:
            return f"has type {dtype}, not {self.dtype}"
        dims = self.dims.split()
        if len(dims) != len(shape):
            return f"has shape {list(shape)}, not [{', '.join(dims)}]"
        for letter, size in zip(dims, shape, strict=True):
            expected = int(letter) if letter.isdigit() else sizes.setdefault(letter, size)
            if size != expected or size < 1:
                return f"has shape {list(shape)}, not [{', '.join(dims)}] ({letter} = {expected})"
        return None


@dataclass(frozen=True)
class Artifact:
    """Base of all kinds. Raises ValueError, naming the field, for what does not fit the kind."""

    kind: ClassVar[str]
    kind_version: ClassVar[int] = 1
    forms: ClassVar[dict[str, Form]]

    # Which layers of the model axis 0 of each tensor stacks; () for all layers alike.
    layers: tuple[int, ...] = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        layers = self.layers
        if any(type(n) is not int or n < 0 for n in layers) or len(set(layers)) != len(layers):
            raise ValueError(f"{self.kind}: layers {layers} are not distinct indices")
        forms = {role: _ArrayForm(value) for role, value in self._tensors().items()}
        self.check_forms(self.parameters(), layers, forms)
        if all(isinstance(value, np.ndarray) for value in self._tensors().values()):
            self.check_values()

    def _tensors(self) -> dict[str, Array]:
        return {role: getattr(self, role) for role in self.forms}

    def to_tensors(self) -> dict[str, np.ndarray]:
        """Role -> array, in the types of `forms`; every value finite, or ValueError."""
        self.check_values()
        return {role: np.ascontiguousarray(value) for role, value in self._tensors().items()}

    def parameters(self) -> dict[str, Any]:
        """Everything that is no tensor, as plain JSON values."""
        names = [f.name for f in fields(self) if f.name not in self.forms and f.name != "layers"]
        return {name: getattr(self, name) for name in names}

    @classmethod
    def from_tensors(
        cls: type[A],
        parameters: Mapping[str, Any],
        layers: tuple[int, ...],
        tensors: Mapping[str, mx.array],
    ) -> A:
        """Rebuild from a bundle, evaluating nothing; BundleError for what does not fit."""
        try:
            cls.check_keys(parameters, tensors)
            return cls._build(parameters, layers, tensors)
        except (ValueError, TypeError) as error:
            message = str(error).removeprefix(f"{cls.kind}: ")
            raise BundleError(f"artifact of kind {cls.kind}: {message}") from None

    @classmethod
    def _build(
        cls: type[A],
        parameters: Mapping[str, Any],
        layers: tuple[int, ...],
        tensors: Mapping[str, mx.array],
    ) -> A:
        return cls(**parameters, **tensors, layers=layers)

    @classmethod
    def check_keys(cls, parameters: Mapping[str, Any], roles: Mapping[str, object]) -> None:
        """ValueError unless parameters and roles are exactly those of the kind."""
        known = {f.name for f in fields(cls)} - set(cls.forms) - {"layers"}
        same_keys(f"{cls.kind}: parameters", set(parameters), known)
        same_keys(f"{cls.kind}: tensors", set(roles), set(cls.forms))

    @classmethod
    def check_forms(
        cls, parameters: Mapping[str, Any], layers: tuple[int, ...], forms: Mapping[str, HasForm]
    ) -> None:
        """ValueError unless parameters, types and shapes fit; needs no data, only headers."""
        if layers and not any(form.dims.startswith("L") for form in cls.forms.values()):
            raise ValueError(f"{cls.kind}: is for all layers alike, so layers must be empty")
        sizes = {"L": len(layers)}
        for role, form in cls.forms.items():
            problem = form.problem(forms[role].dtype, tuple(forms[role].shape), sizes)
            if problem:
                raise ValueError(f"{cls.kind}: {role} {problem}")
        cls.check_parameters(parameters, sizes)

    @classmethod
    def check_parameters(cls, parameters: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
        """ValueError unless each parameter has the right type and range."""

    def check_values(self) -> None:
        """ValueError unless every number is finite; kinds add their own rules. Reads all data."""
        for role, value in self._tensors().items():
            if not np.all(np.isfinite(np.asarray(value))):
                raise ValueError(f"{self.kind}: {role} holds NaN or infinity")


class _ArrayForm:
    def __init__(self, array: Array) -> None:
        if not isinstance(array, np.ndarray | mx.array):
            raise ValueError(f"a tensor must be an array, got {type(array).__name__}")
        self.dtype = dtype_name(array)
        self.shape = tuple(array.shape)


def same_keys(what: str, found: set[str], known: set[str]) -> None:
    """ValueError, naming what is unknown and what is missing, unless the sets are equal."""
    if found != known:
        wrong = [f"unknown {sorted(found - known)}"] if found - known else []
        wrong += [f"missing {sorted(known - found)}"] if known - found else []
        raise ValueError(f"{what}: {', '.join(wrong)}")


def need(kind: str, name: str, value: Any, types: type | tuple[type, ...]) -> None:
    """ValueError unless `value` is of one of `types`; a bool is no number here."""
    types = types if isinstance(types, tuple) else (types,)
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        expected = " or ".join(t.__name__ for t in types)
        raise ValueError(f"{kind}: {name} is {value!r}, not {expected}")


def check_part(kind: str, parameters: Mapping[str, Any]) -> None:
    """ValueError unless `part` is keys or values and `before_rope` true or false."""
    if parameters["part"] not in PARTS:
        raise ValueError(f"{kind}: part is {parameters['part']!r}, not 'keys' or 'values'")
    need(kind, "before_rope", parameters["before_rope"], bool)
