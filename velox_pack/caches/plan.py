"""Plans: what the caches of one bundle need to know, shared by all sequences."""

from collections.abc import Mapping
from dataclasses import dataclass
from weakref import WeakValueDictionary

import mlx.core as mx

from velox_pack.caches.codecs.base import Codec
from velox_pack.manifests.errors import RecipeError


@dataclass(frozen=True)
class LayerPlan:
    """How one layer's keys and values are kept.

    sinks   first tokens kept exactly
    window  at least this many recent tokens are exact
    flush   tokens leave the window in groups of this size (a multiple of both granularities)
    routed  attention calls our router, so it may see codes; otherwise it gets decoded arrays
    """

    keys: Codec
    values: Codec
    sinks: int
    window: int
    flush: int
    routed: bool = True

    def __post_init__(self) -> None:
        """Check that groups can be encoded when they leave the window."""
        if self.sinks < 0 or self.window < 0 or self.flush < 1:
            raise RecipeError(
                f"sinks={self.sinks}, window={self.window}, flush={self.flush}: must be >= 0, 0, 1"
            )
        for codec in (self.keys, self.values):
            if self.flush % codec.granularity:
                raise RecipeError(
                    f"flush={self.flush} is not a multiple of the codec's group of "
                    f"{codec.granularity} tokens"
                )

    def boundary(self, tokens: int) -> int:
        """First position that is exact (after the sinks) once `tokens` tokens are at rest.

        It depends on the length alone, so the same text leaves the same cache however it was
        chunked, and one pass can reproduce what decoding token by token would have seen.
        """
        ready = max(0, tokens - self.sinks - self.window)
        return self.sinks + ready // self.flush * self.flush


@dataclass(eq=False)
class ModelPlan:
    """The plans of all covered layers of one cache plan of one bundle."""

    name: str
    recipe: str
    fingerprint: str
    layers: Mapping[int, LayerPlan]

    def constants(self) -> list[mx.array]:
        """Arrays shared by all sequences, each listed once."""
        seen: dict[int, mx.array] = {}
        for plan in self.layers.values():
            for codec in (plan.keys, plan.values):
                seen.update({id(a): a for a in codec.constants()})
        return list(seen.values())


_OPEN: "WeakValueDictionary[str, ModelPlan]" = WeakValueDictionary()


def register(plan: ModelPlan) -> ModelPlan:
    """Make a plan findable by its fingerprint for caches that come out of a file."""
    return _OPEN.setdefault(plan.fingerprint, plan)


def lookup(fingerprint: str, layer: int) -> LayerPlan:
    """Find the plan that a saved cache was made with.

    Raises RecipeError when no loaded bundle has it.
    """
    plan = _OPEN.get(fingerprint)
    if plan is None or layer not in plan.layers:
        raise RecipeError(
            f"this prompt cache (layer {layer}, fingerprint {fingerprint}) was made with a bundle "
            "or cache plan that is not loaded; load the same bundle with the same cache first"
        )
    return plan.layers[layer]
