"""Recipes whose artifacts can be calibrated and stored already, before their codecs exist.

Loading such a plan says so. What the calibrations gain is measured by encode and decode in NumPy
(benchmarks/calibrators.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NoReturn

from velox_pack.caches.needs import Need
from velox_pack.caches.workshop import Workshop
from velox_pack.manifests.errors import RecipeError
from velox_pack.manifests.manifest import Layer

ROPE = Need("rope")
# Sub vectors and bits of a code for 1 to 4 bits per element.
PRODUCTS = {1: (8, 8), 2: (4, 8), 3: (2, 6), 4: (2, 8)}


class Later:
    """What recipes without a codec have in common."""

    ready: ClassVar[bool] = False
    bases: ClassVar[Mapping[str, Need]] = {}

    def codecs(self, layer: Layer, workshop: Workshop) -> NoReturn:
        """Never called: `recipes.build` refuses first."""
        raise NotImplementedError

    def bits_of(self) -> tuple[float, float] | None:
        """None are spread."""
        return None


def _among(name: str, value: float, allowed: tuple[float, ...]) -> None:
    if value not in allowed:
        options = ", ".join(f"{v:g}" for v in allowed)
        raise RecipeError(f"{name}={value:g} is not one of {options}")


def _between(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise RecipeError(f"{name}={value:g} is not from {low:g} to {high:g}")


@dataclass(frozen=True)
class VecInferRecipe(Later):
    """Smoothed, rotated rows in product-quantizer codes of `keys` and `values` bits."""

    about: ClassVar[str] = "smoothing, Hadamard and product-quantizer codebooks (VecInfer)"
    keys: int = 2
    values: int = 2
    sinks: int = 4
    window: int = 24
    flush: int = 8

    @property
    def needs(self) -> tuple[Need, ...]:
        """Codebooks for both parts."""
        pairs = (("keys", PRODUCTS[self.keys]), ("values", PRODUCTS[self.values]))
        return (ROPE, *(Need.of(f"vecinfer-{part}", sub=s, bits=b) for part, (s, b) in pairs))

    def __post_init__(self) -> None:
        """Refuse bits that no product quantizer gives."""
        _among("keys", self.keys, tuple(PRODUCTS))
        _among("values", self.values, tuple(PRODUCTS))

    def check(self, layer: Layer) -> None:
        """Sub vectors divide the heads."""
        for part, bits, dim in (
            ("keys", self.keys, layer.k_dim),
            ("values", self.values, layer.v_dim),
        ):
            sub = PRODUCTS[bits][0]
            if dim % sub:
                raise RecipeError(f"{bits} bits for {part}: {dim} is no multiple of {sub}")


@dataclass(frozen=True)
class CommVQRecipe(Later):
    """Keys in additive codes that commute with RoPE, values in RaBitQ's codes."""

    about: ClassVar[str] = "additive codebooks before RoPE that commute with it (CommVQ)"
    keys: float = 2.0
    values: int = 2
    sinks: int = 4
    window: int = 24
    flush: int = 8

    @property
    def needs(self) -> tuple[Need, ...]:
        """Codebooks of keys, centroids of values."""
        values = Need.of("rabitq-values", centroids=64)
        return (ROPE, Need.of("commvq", bits=float(self.keys)), values)

    def __post_init__(self) -> None:
        """Refuse bits out of range."""
        _between("keys", self.keys, 0.25, 4)
        _among("values", self.values, (1, 2, 3, 4))

    def check(self, layer: Layer) -> None:
        """Keys can be paired, and at least one stage fits."""
        if layer.k_dim % 2 or self.keys * layer.k_dim < 16:
            raise RecipeError(f"{self.keys:g} bits for keys of {layer.k_dim}: not one stage fits")


@dataclass(frozen=True)
class RaBitQRecipe(Later):
    """Coarse centroids and grid codes; unbiased inner products for keys."""

    about: ClassVar[str] = "centroids, rotation and 1 to 4 bits with unbiased products (RaBitQ)"
    keys: int = 1
    values: int = 4
    centroids: int = 64
    sinks: int = 4
    window: int = 24
    flush: int = 8

    @property
    def needs(self) -> tuple[Need, ...]:
        """Centroids of both parts."""
        parts = ("keys", "values")
        return (ROPE, *(Need.of(f"rabitq-{p}", centroids=self.centroids) for p in parts))

    def __post_init__(self) -> None:
        """Refuse bits and centroids out of range."""
        _among("keys", self.keys, (1, 2, 3, 4))
        _among("values", self.values, (1, 2, 3, 4))
        _among("centroids", self.centroids, (1, 2, 4, 8, 16, 32, 64, 128, 256))

    def check(self, layer: Layer) -> None:
        """Fits every layer."""
