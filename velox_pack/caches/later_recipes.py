"""Recipes whose artifacts can be calibrated and stored already, before their codecs exist.

Loading such a plan says so. What the calibrations gain is measured by encode and decode in NumPy
(benchmarks/calibrators.py).
"""

from collections.abc import Mapping
from typing import ClassVar, NoReturn

from velox_pack.caches.needs import Need
from velox_pack.caches.workshop import Workshop
from velox_pack.manifests.errors import RecipeError
from velox_pack.manifests.manifest import Layer

ROPE = Need("rope")


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
