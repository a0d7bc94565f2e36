"""Recipes that code few latents of heads together: SVDq, PALU."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from velox_pack.caches.codecs.base import Codec
from velox_pack.caches.codecs.exact import Exact
from velox_pack.caches.codecs.latent import Latents, LatentScalar
from velox_pack.caches.codecs.rotated import LogNorm
from velox_pack.caches.later_recipes import ROPE, _between
from velox_pack.caches.needs import Need
from velox_pack.caches.plan import LayerPlan
from velox_pack.caches.scalar_recipes import GAUSSIAN
from velox_pack.caches.workshop import Workshop
from velox_pack.manifests.artifacts_scalar import LowRank
from velox_pack.manifests.errors import RecipeError
from velox_pack.manifests.manifest import Layer

PARTS = ("keys", "values")


def _codecs(layer: Layer, workshop: Workshop) -> tuple[Codec, Codec]:
    keys, before = _codec(layer, workshop, "keys")
    values, _ = _codec(layer, workshop, "values")
    return (workshop.before_rope(layer, keys) if before else keys), values


def _codec(layer: Layer, workshop: Workshop, part: str) -> tuple[Codec, bool]:
    found, row = workshop.shelf.find(LowRank, layer.index, part=part)
    dim = layer.k_dim if part == "keys" else layer.v_dim
    widths = found.widths[row]
    variance = found.variance[row] * (widths > 0)
    sigma = mx.sqrt(variance / mx.maximum(variance.sum(-1, keepdims=True), 1e-30))
    codec = LatentScalar(
        turn=Latents(found.basis[row].reshape(layer.kv_heads, dim, -1), found.group),
        sigma=mx.maximum(sigma, 1e-6),
        widths=tuple(int(w) for w in widths.flatten().tolist()),
        table=workshop.levels(),
        norm=LogNorm(*found.log_norm[row].tolist()),
        mean=found.mean[row].reshape(layer.kv_heads, dim),
    )
    return codec, found.before_rope


def _check(recipe: "SVDqRecipe | PaluRecipe", layer: Layer) -> None:
    for part, dim in zip(PARTS, (layer.k_dim, layer.v_dim), strict=True):
        if recipe.bits * dim < 16:
            raise RecipeError(f"{recipe.bits:g} bits for {part} of {dim} make no code")
    LayerPlan(Exact(), Exact(), recipe.sinks, recipe.window, recipe.flush)


@dataclass(frozen=True)
class SVDqRecipe:
    """Latents of heads together, bits by variance; keys before RoPE, and values alike.

    The paper has it for keys alone.
    """

    about: ClassVar[str] = "low-rank latents of heads together, bits by importance (SVDq)"
    ready: ClassVar[bool] = True
    bases: ClassVar[Mapping[str, Need]] = {}
    bits: float = 2.0
    sinks: int = 4
    window: int = 24
    flush: int = 8

    @property
    def needs(self) -> tuple[Need, ...]:
        """Bases and widths of both parts."""
        parts = (Need.of(f"lowrank-{p}", bits=float(self.bits)) for p in PARTS)
        return (ROPE, GAUSSIAN, *parts)

    def __post_init__(self) -> None:
        """Refuse bits out of range."""
        _between("bits", self.bits, 0.5, 8)

    def codecs(self, layer: Layer, workshop: Workshop) -> tuple[Codec, Codec]:
        """The same kind for keys and values."""
        return _codecs(layer, workshop)

    def bits_of(self) -> tuple[float, float] | None:
        """None are spread: widths come with the bases."""
        return None

    def check(self, layer: Layer) -> None:
        """At least half a word of codes for each head."""
        _check(self, layer)


@dataclass(frozen=True)
class PaluRecipe:
    """Latents of heads together, ranks by sensitivity, and bits by variance within them."""

    about: ClassVar[str] = "low-rank latents, ranks by sensitivity, then bits (PALU)"
    ready: ClassVar[bool] = True
    bases: ClassVar[Mapping[str, Need]] = {}
    ratio: float = 0.5
    bits: float = 2.0
    sinks: int = 4
    window: int = 24
    flush: int = 8

    @property
    def needs(self) -> tuple[Need, ...]:
        """Bases and widths of both parts, at ranks of their own."""
        options = {"bits": float(self.bits), "ratio": float(self.ratio)}
        window = self.window + self.flush // 2
        parts = (Need.of(f"palu-{p}", window=window, **options) for p in PARTS)
        return (ROPE, GAUSSIAN, *parts)

    def __post_init__(self) -> None:
        """Refuse what cannot be met."""
        _between("ratio", self.ratio, 0.05, 1)
        _between("bits", self.bits, 0.5, 8)
        if self.bits > 8 * self.ratio:
            raise RecipeError(f"bits={self.bits:g} do not fit into {self.ratio:g} of the latents")

    def codecs(self, layer: Layer, workshop: Workshop) -> tuple[Codec, Codec]:
        """The same kind for keys and values."""
        return _codecs(layer, workshop)

    def bits_of(self) -> tuple[float, float] | None:
        """None are spread: widths come with the bases."""
        return None

    def check(self, layer: Layer) -> None:
        """At least half a word of codes for each head."""
        _check(self, layer)
