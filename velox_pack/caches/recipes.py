"""Recipes: a name for one composition of codecs, window and protected tokens.

A recipe says which artifacts it needs and builds the plan of a layer from them; it fits nothing.
"""

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol

from velox_pack.caches import grammar
from velox_pack.caches.codecs.base import Codec
from velox_pack.caches.later_recipes import (
    CommVQRecipe,
    KVQuantRecipe,
    PaluRecipe,
    RaBitQRecipe,
    SVDqRecipe,
    VecInferRecipe,
)
from velox_pack.caches.needs import Need
from velox_pack.caches.plan import LayerPlan, ModelPlan
from velox_pack.caches.scalar_recipes import (
    AffineRecipe,
    ExactRecipe,
    SpectralRecipe,
    TurboQuantMse,
)
from velox_pack.caches.shelf import Shelf
from velox_pack.caches.workshop import Workshop
from velox_pack.manifests.errors import RecipeError
from velox_pack.manifests.manifest import Layer


class Recipe(Protocol):
    """What every recipe has: its own few fields, what it needs, and how a layer is built."""

    about: ClassVar[str]
    ready: ClassVar[bool]  # False: its artifacts can be calibrated, its codec is still to come
    spectral_parts: ClassVar[tuple[str, ...]]
    sinks: int
    window: int
    flush: int

    @property
    def needs(self) -> tuple[Need, ...]:
        """What it wants calibrated."""

    def codecs(self, layer: Layer, workshop: Workshop) -> tuple[Codec, Codec]:
        """Key and value codec of one layer."""

    def bits_of(self) -> tuple[float, float] | None:
        """Average bits of keys and of values, where a Widths artifact says how they are spread."""

    def check(self, layer: Layer) -> None:
        """Raise RecipeError if the recipe cannot serve the layer; reads no artifact."""


RECIPES: dict[str, type[Any]] = {
    "exact": ExactRecipe,
    "affine": AffineRecipe,
    "turboquant-mse": TurboQuantMse,
    "spectral": SpectralRecipe,
    "vecinfer": VecInferRecipe,
    "commvq": CommVQRecipe,
    "rabitq": RaBitQRecipe,
    "kvquant": KVQuantRecipe,
    "svdq": SVDqRecipe,
    "palu": PaluRecipe,
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

    @property
    def needs(self) -> tuple[Need, ...]:
        """What it wants calibrated; "widths" are its own, other needs are shared between plans."""
        own = () if self.recipe.bits_of() is None else (Need.of("widths", plan=self.canonical),)
        return (*self.recipe.needs, *own)


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
    if not plan.recipe.ready:
        raise RecipeError(
            f"plan {name!r} is prepared, but this velox-pack has no codec for {plan.name} yet; "
            'load with cache="none" or another plan of the bundle'
        )
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
        rows.append({"name": name, "options": options, "about": kind.about, "ready": kind.ready})
    rows.append({"name": RATEQUANT, "options": {}, "about": ABOUT_RATEQUANT, "ready": True})
    return rows
