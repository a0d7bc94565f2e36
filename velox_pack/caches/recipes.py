"""Recipes: a name for one composition of codecs, window and protected tokens.

A recipe says which artifacts it needs and builds the plan of a layer from them; it fits nothing.
"""

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol

import mlx.core as mx

from velox_pack.caches import grammar
from velox_pack.caches.codecs.affine import Affine
from velox_pack.caches.codecs.base import Codec
from velox_pack.caches.codecs.exact import Exact
from velox_pack.caches.codecs.rope import BeforeRope, RopeTable
from velox_pack.caches.codecs.rotated import (
    Eigenbasis,
    LevelTable,
    LogNorm,
    PlainNorm,
    RotatedScalar,
    Structured,
)
from velox_pack.caches.plan import LayerPlan, ModelPlan
from velox_pack.caches.shelf import Shelf
from velox_pack.kernels.rotation import StructuredRotation
from velox_pack.manifests.artifacts import Center, Codebook, Rope, Rotation, Spectral, Widths
from velox_pack.manifests.errors import RecipeError
from velox_pack.manifests.manifest import Layer


class Workshop:
    """Builds codecs from a shelf; arrays shared between layers are made once."""

    def __init__(self, shelf: Shelf, plan: str) -> None:
        self.shelf = shelf
        self.plan = plan
        self._tables: dict[tuple[Any, ...], RopeTable] = {}
        self._rotations: dict[int, Structured] = {}
        self._levels: LevelTable | None = None

    def levels(self) -> LevelTable:
        """The Gaussian codebooks."""
        if self._levels is None:
            book, _ = self.shelf.find(Codebook, distribution="gaussian")
            if missing := sorted(set(range(1, 9)) - set(book.levels)):
                raise RecipeError(f"the bundle's codebook lacks the levels for {missing} bits")
            self._levels = LevelTable(dict(book.levels))
        return self._levels

    def rope(self, layer: Layer) -> RopeTable | None:
        """The layer's RoPE, or None where keys are kept as they reach attention."""
        if layer.rope is None:
            return None
        artifact, row = self.shelf.find(Rope, layer.index)
        key = (layer.rope, tuple(artifact.inv_freq[row].tolist()), artifact.traditional)
        if key not in self._tables:
            self._tables[key] = RopeTable(artifact.inv_freq[row], artifact.traditional)
        return self._tables[key]

    def rotation(self, width: int) -> Structured:
        """The random rotation of a head dimension."""
        if width not in self._rotations:
            found, _ = self.shelf.find(Rotation, width=width)
            signs = found.signs.astype(mx.float32)
            mix = found.mix if found.mix.shape[0] > 1 else None
            self._rotations[width] = Structured(StructuredRotation(signs, found.block, mix))
        return self._rotations[width]

    def widths(self, layer: int, part: str) -> tuple[int, ...]:
        """Bits of each rotated coordinate of the layer's keys or values."""
        found, row = self.shelf.find(Widths, layer, plan=self.plan)
        return tuple(int(w) for w in getattr(found, part)[row].tolist())

    def before_rope(self, layer: Layer, inner: Codec) -> Codec:
        """Wrap a key codec that was calibrated before RoPE.

        Raises RecipeError if the bundle does not say how the layer turns its keys.
        """
        table = self.rope(layer)
        if table is None:
            raise RecipeError(
                f"layer {layer.index}: keys were calibrated before RoPE, but the bundle has no "
                "rope for it; convert again"
            )
        return BeforeRope(inner, table)


class Recipe(Protocol):
    """What every recipe has: its own few fields, what it needs, and how a layer is built."""

    about: ClassVar[str]
    needs: ClassVar[tuple[str, ...]]
    spectral_parts: ClassVar[tuple[str, ...]]
    sinks: int
    window: int
    flush: int

    def codecs(self, layer: Layer, workshop: Workshop) -> tuple[Codec, Codec]:
        """Key and value codec of one layer."""

    def bits_of(self) -> tuple[float, float] | None:
        """Average bits of keys and of values, where a Widths artifact says how they are spread."""

    def check(self, layer: Layer) -> None:
        """Raise RecipeError if the recipe cannot serve the layer; reads no artifact."""


def _check_bits(recipe: "TurboQuantMse | SpectralRecipe", layer: Layer) -> None:
    for part, bits, dim in zip(
        ("keys", "values"), recipe.bits_of(), (layer.k_dim, layer.v_dim), strict=True
    ):
        least = 32 / dim
        if not least <= bits <= 8:
            raise RecipeError(
                f"{bits:g} bits for {part} of {dim} dimensions; possible are {least:g} to 8"
            )
    exact = Exact()
    LayerPlan(exact, exact, recipe.sinks, recipe.window, recipe.flush)


@dataclass(frozen=True)
class ExactRecipe:
    """Everything exact: the control."""

    about: ClassVar[str] = "no compression; the control in comparisons"
    needs: ClassVar[tuple[str, ...]] = ()
    spectral_parts: ClassVar[tuple[str, ...]] = ()
    sinks: ClassVar[int] = 0
    window: ClassVar[int] = 0
    flush: ClassVar[int] = 256

    def codecs(self, layer: Layer, workshop: Workshop) -> tuple[Codec, Codec]:
        """Exact both."""
        return Exact(), Exact()

    def bits_of(self) -> tuple[float, float] | None:
        """None are spread."""
        return None

    def check(self, layer: Layer) -> None:
        """Fits every layer."""


@dataclass(frozen=True)
class AffineRecipe:
    """Affine rounding in groups: the baseline. `axis=channel` groups keys along tokens (KIVI)."""

    about: ClassVar[str] = "affine rounding in groups; nothing to calibrate"
    needs: ClassVar[tuple[str, ...]] = ()
    spectral_parts: ClassVar[tuple[str, ...]] = ()
    bits: int = 4
    group: int = 64
    axis: str = "token"
    sinks: int = 4
    window: int = 24
    flush: int = 64

    def codecs(self, layer: Layer, workshop: Workshop) -> tuple[Codec, Codec]:
        """Keys along the chosen axis, values per token."""
        return (
            Affine(self.bits, self.group, layer.k_dim, self.axis),
            Affine(self.bits, self.group, layer.v_dim),
        )

    def bits_of(self) -> tuple[float, float] | None:
        """None are spread."""
        return None

    def check(self, layer: Layer) -> None:
        """The group divides the head dimensions, and a flush is whole groups."""
        exact = Exact()
        for codec in (
            Affine(self.bits, self.group, layer.k_dim, self.axis),
            Affine(self.bits, self.group, layer.v_dim),
        ):
            LayerPlan(codec, exact, self.sinks, self.window, self.flush)


@dataclass(frozen=True)
class TurboQuantMse:
    """A random rotation and Gaussian levels, after RoPE (2504.19874, from DESIGN's description)."""

    about: ClassVar[str] = "random rotation, Lloyd-Max levels; nothing to calibrate"
    needs: ClassVar[tuple[str, ...]] = ("codebook", "rotation", "widths")
    spectral_parts: ClassVar[tuple[str, ...]] = ()
    bits: float = 4.0
    sinks: int = 4
    window: int = 24
    flush: int = 8

    def codecs(self, layer: Layer, workshop: Workshop) -> tuple[Codec, Codec]:
        """The same for keys and values."""
        return self._codec(layer, workshop, "keys"), self._codec(layer, workshop, "values")

    def _codec(self, layer: Layer, workshop: Workshop, part: str) -> Codec:
        dim = layer.k_dim if part == "keys" else layer.v_dim
        return RotatedScalar(
            turn=workshop.rotation(dim),
            sigma=mx.full((layer.kv_heads, dim), dim**-0.5),
            widths=workshop.widths(layer.index, part),
            table=workshop.levels(),
            norm=PlainNorm(),
        )

    def bits_of(self) -> tuple[float, float]:
        """The same for keys and values."""
        return self.bits, self.bits

    def check(self, layer: Layer) -> None:
        """Bits can be packed."""
        _check_bits(self, layer)


@dataclass(frozen=True)
class SpectralRecipe:
    """Keys before RoPE in their calibrated eigenbasis, water-filled; values randomly rotated.

    Both have their calibrated mean taken off and an 8-bit logarithmic norm. Values stay out of
    their eigenbasis because there a few heavy-tailed coordinates carry the variance, which
    Gaussian levels clip: measured, KL is several times larger (docs/design.md).
    `keys` and `values` set their bits apart; without them both take `bits`.
    """

    about: ClassVar[str] = "keys before RoPE in their eigenbasis, water-filled; values rotated"
    needs: ClassVar[tuple[str, ...]] = (
        "codebook", "rotation", "widths", "rope", "spectral-keys", "center-values",
    )  # fmt: skip
    spectral_parts: ClassVar[tuple[str, ...]] = ("keys",)
    bits: float = 3.0
    keys: float | None = None
    values: float | None = None
    sinks: int = 4
    window: int = 24
    flush: int = 8

    def codecs(self, layer: Layer, workshop: Workshop) -> tuple[Codec, Codec]:
        """Spectral keys, rotated values."""
        book, row = workshop.shelf.find(Spectral, layer.index, part="keys")
        variance = book.variance[row]
        sigma = mx.sqrt(variance / mx.maximum(variance.sum(-1, keepdims=True), 1e-30))
        keys = RotatedScalar(
            turn=Eigenbasis(book.basis[row]),
            sigma=mx.maximum(sigma, 1e-6),
            widths=workshop.widths(layer.index, "keys"),
            table=workshop.levels(),
            norm=LogNorm(*book.log_norm[row].tolist()),
            mean=book.mean[row],
        )
        center, row = workshop.shelf.find(Center, layer.index, part="values")
        dim = layer.v_dim
        values = RotatedScalar(
            turn=workshop.rotation(dim),
            sigma=mx.full((layer.kv_heads, dim), dim**-0.5),
            widths=workshop.widths(layer.index, "values"),
            table=workshop.levels(),
            norm=LogNorm(*center.log_norm[row].tolist()),
            mean=center.mean[row],
        )
        return (workshop.before_rope(layer, keys) if book.before_rope else keys), values

    def bits_of(self) -> tuple[float, float]:
        """Bits of keys and of values."""
        keys = self.bits if self.keys is None else self.keys
        values = self.bits if self.values is None else self.values
        return keys, values

    def check(self, layer: Layer) -> None:
        """Bits can be packed."""
        _check_bits(self, layer)


RECIPES: dict[str, type[Any]] = {
    "exact": ExactRecipe,
    "affine": AffineRecipe,
    "turboquant-mse": TurboQuantMse,
    "spectral": SpectralRecipe,
}
RATEQUANT = "ratequant"
ABOUT_RATEQUANT = "spread the bits of another recipe over layers, keys and values by sensitivity"


@dataclass(frozen=True)
class Plan:
    """A parsed recipe: a codec recipe, and whether RateQuant spreads its bits."""

    name: str
    recipe: Any
    ratequant: bool

    @property
    def canonical(self) -> str:
        """The recipe with every option written out."""
        text = grammar.write(self.name, self.recipe)
        return f"{RATEQUANT}+{text}" if self.ratequant else text


def parse(text: str) -> Plan:
    """Read `spectral:bits=3`, `ratequant+spectral:bits=2.5`.

    Raises RecipeError that lists the valid names or keys.
    """
    codecs = []
    ratequant = False
    for part in grammar.parse(text):
        if part.name == RATEQUANT:
            if part.options or ratequant:
                raise RecipeError(f"recipe {text!r}: ratequant stands once and takes no options")
            ratequant = True
        elif part.name in RECIPES:
            codecs.append((part.name, grammar.make(RECIPES[part.name], part.name, part.options)))
        else:
            raise RecipeError(
                f"no recipe is called {part.name!r}; there are: {', '.join(RECIPES)}, {RATEQUANT}"
            )
    if len(codecs) != 1:
        raise RecipeError(f"recipe {text!r}: give one of {', '.join(RECIPES)}")
    name, recipe = codecs[0]
    if ratequant and recipe.bits_of() is None:
        raise RecipeError(f"recipe {text!r}: {name} has no bits that ratequant could spread")
    return Plan(name, recipe, ratequant)


def build(plan: Plan, name: str, fingerprint: str, shelf: Shelf) -> ModelPlan:
    """The plans of all covered layers, from artifacts alone.

    Raises RecipeError for a missing artifact or a head dimension that does not fit.
    """
    workshop = Workshop(shelf, plan.canonical)
    layers = {}
    for layer in shelf.covered():
        keys, values = plan.recipe.codecs(layer, workshop)
        recipe = plan.recipe
        layers[layer.index] = LayerPlan(
            keys, values, recipe.sinks, recipe.window, recipe.flush, layer.routed
        )
    return ModelPlan(name, plan.canonical, fingerprint, layers)


def describe() -> list[dict[str, Any]]:
    """Every recipe with its options, their defaults, and what it does."""
    rows: list[dict[str, Any]] = []
    for name, kind in RECIPES.items():
        options = {f.name: f.default for f in fields(kind)}
        rows.append({"name": name, "options": options, "about": kind.about})
    rows.append({"name": RATEQUANT, "options": {}, "about": ABOUT_RATEQUANT})
    return rows
