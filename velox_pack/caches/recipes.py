"""Recipes: a name for one composition of codecs, window and protected tokens.

A recipe says which artifacts it needs and builds the plan of a layer from them; it fits nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Protocol

from velox_pack.caches import grammar
from velox_pack.caches.channel_recipes import KittyRecipe, KVQuantRecipe, OutliersRecipe
from velox_pack.caches.codecs.base import Codec
from velox_pack.caches.latent_recipes import PaluRecipe, SVDqRecipe
from velox_pack.caches.later_around import (
    GearRecipe,
    KiviSinkRecipe,
    MiniCacheRecipe,
    XQuantRecipe,
)
from velox_pack.caches.needs import Need
from velox_pack.caches.plain_recipes import (
    KiviRecipe,
    PolarRecipe,
    QjlRecipe,
    RvqRecipe,
    TurboQuantProd,
    ZipCacheRecipe,
)
from velox_pack.caches.plan import LayerPlan, ModelPlan
from velox_pack.caches.policies import POLICIES
from velox_pack.caches.scalar_recipes import (
    AffineRecipe,
    ExactRecipe,
    JointSpectralRecipe,
    SpectralRecipe,
    TurboQuantMse,
)
from velox_pack.caches.shelf import Shelf
from velox_pack.caches.vector_recipes import CommVQRecipe, RaBitQRecipe, VecInferRecipe
from velox_pack.caches.workshop import Workshop
from velox_pack.manifests.errors import RecipeError
from velox_pack.manifests.manifest import Layer


class Recipe(Protocol):
    """What every recipe has: its own few fields, what it needs, and how a layer is built."""

    about: ClassVar[str]
    ready: ClassVar[bool]  # False: its artifacts can be calibrated, its codec is still to come
    sinks: int
    window: int
    flush: int

    @property
    def needs(self) -> tuple[Need, ...]:
        """What it wants calibrated."""

    @property
    def bases(self) -> Mapping[str, Need]:
        """Part -> the need whose artifacts say what its coordinates cost; alike without one."""

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
    "joint-spectral": JointSpectralRecipe,
    "vecinfer": VecInferRecipe,
    "commvq": CommVQRecipe,
    "rabitq": RaBitQRecipe,
    "kvquant": KVQuantRecipe,
    "svdq": SVDqRecipe,
    "palu": PaluRecipe,
    "xquant": XQuantRecipe,
    "minicache": MiniCacheRecipe,
    "kitty": KittyRecipe,
    "gear": GearRecipe,
    "outliers": OutliersRecipe,
    "kivi-sink": KiviSinkRecipe,
    "kivi": KiviRecipe,
    "zipcache": ZipCacheRecipe,
    "rvq": RvqRecipe,
    "polar": PolarRecipe,
    "qjl": QjlRecipe,
    "turboquant-prod": TurboQuantProd,
}
RATEQUANT = "ratequant"
LONGEST = 1 << 20  # tokens kept exactly
ABOUT_RATEQUANT = "spread the bits of another recipe over layers, keys and values by sensitivity"


@dataclass(frozen=True)
class Plan:
    """A parsed recipe: codecs, whether RateQuant spreads their bits, and what evicts."""

    name: str
    recipe: Any
    ratequant: bool
    policy_name: str | None = None
    policy: Any = None

    @property
    def canonical(self) -> str:
        """The recipe with every option written out."""
        parts = [grammar.write(self.name, self.recipe)]
        if self.ratequant:
            parts.insert(0, RATEQUANT)
        if self.policy_name is not None:
            parts.insert(0, grammar.write(self.policy_name, self.policy))
        return "+".join(parts)

    @property
    def coding(self) -> str:
        """`canonical` without the policy: plans that evict differently may code alike."""
        return replace(self, policy_name=None, policy=None).canonical

    @property
    def needs(self) -> tuple[Need, ...]:
        """What it wants calibrated; "widths" belong to its coding, other needs are shared."""
        own = () if self.recipe.bits_of() is None else (Need.of("widths", plan=self.coding),)
        return (*self.recipe.needs, *own, *(self.policy.needs if self.policy else ()))

    @property
    def behind(self) -> int | None:
        """Most recent tokens that do not count in its sensitivities, None if it needs none."""
        windows = [dict(need.options).get("window") for need in self.needs]
        if self.ratequant:
            windows.append(self.recipe.window + self.recipe.flush // 2)
        return max((int(w) for w in windows if w is not None), default=None)

    @property
    def missing(self) -> str | None:
        """What this velox-pack lacks to load the plan, or None."""
        if self.policy is not None:
            return f"no eviction by {self.policy_name}"
        return None if self.recipe.ready else f"no codec for {self.name}"


def parse(text: str) -> Plan:
    """Read `spectral:bits=3`, `ratequant+spectral:bits=2.5`, `qfilters:budget=512+spectral`.

    Raises RecipeError that lists the valid names or keys.
    """
    codecs, policies = [], []
    ratequant = False
    shown = repr(grammar.short(text))
    for part in grammar.parse(text):
        if part.name == RATEQUANT:
            if part.options or ratequant:
                raise RecipeError(f"recipe {shown}: ratequant stands once and takes no options")
            ratequant = True
        elif part.name in RECIPES:
            codecs.append((part.name, grammar.make(RECIPES[part.name], part.name, part.options)))
        elif part.name in POLICIES:
            policies.append((part.name, grammar.make(POLICIES[part.name], part.name, part.options)))
        else:
            names = ", ".join((*RECIPES, RATEQUANT, *POLICIES))
            raise RecipeError(
                f"no recipe is called {grammar.short(part.name)!r}; there are: {names}"
            )
    if policies and not codecs:
        codecs.append(("exact", ExactRecipe()))
    if len(codecs) != 1:
        raise RecipeError(f"recipe {shown}: give one of {', '.join(RECIPES)}")
    if len(policies) > 1:
        raise RecipeError(f"recipe {shown}: give at most one of {', '.join(POLICIES)}")
    name, recipe = codecs[0]
    for option in ("sinks", "window", "flush"):
        if getattr(recipe, option) > LONGEST:
            raise RecipeError(f"recipe {shown}: {option} is above {LONGEST} tokens")
    if ratequant and recipe.bits_of() is None:
        raise RecipeError(f"recipe {shown}: {name} has no bits that ratequant could spread")
    return Plan(name, recipe, ratequant, *(policies[0] if policies else ()))


def build(plan: Plan, name: str, fingerprint: str, shelf: Shelf) -> ModelPlan:
    """The plans of all covered layers, from artifacts alone.

    Raises RecipeError for a missing artifact or a head dimension that does not fit.
    """
    if plan.missing:
        raise RecipeError(
            f"plan {name!r} is prepared, but this velox-pack has {plan.missing} yet; "
            'load with cache="none" or another plan of the bundle'
        )
    workshop = Workshop(shelf, plan.coding)
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
    for name, kind in POLICIES.items():
        options = {f.name: f.default for f in fields(kind)}
        rows.append({"name": name, "options": options, "about": kind.about, "ready": False})
    return rows
