"""More recipes without a codec yet: layers that share, channels and tokens that need more.

As in `later_recipes`, artifacts are calibrated and stored, and loading such a plan says so.
"""

from dataclasses import dataclass
from typing import ClassVar

from velox_pack.caches.later_recipes import ROPE, Later, _among, _between
from velox_pack.caches.needs import Need, Option
from velox_pack.manifests.errors import RecipeError
from velox_pack.manifests.manifest import Layer

PARTS = ("keys", "values")


def _both(name: str, **options: Option) -> tuple[Need, ...]:
    return tuple(Need.of(f"{name}-{part}", **options) for part in PARTS)


@dataclass(frozen=True)
class XQuantRecipe(Later):
    """Layers that take the codes of the layer before, or are predicted from it."""

    about: ClassVar[str] = "a layer takes the codes of the layer before (XQuant), or is predicted"
    bits: int = 2
    by: str = "codes"
    sinks: int = 4
    window: int = 24
    flush: int = 64

    @property
    def needs(self) -> tuple[Need, ...]:
        """Pairs of layers, or maps from one to the next."""
        if self.by == "codes":
            return (ROPE, *_both("xquant", bits=self.bits))
        return (ROPE, Need.of("prediction", bits=self.bits))

    def __post_init__(self) -> None:
        """Refuse bits out of range."""
        _among("bits", self.bits, (1, 2, 3, 4))
        if self.by not in ("codes", "prediction"):
            raise RecipeError(f"by={self.by} is neither codes nor prediction")

    def check(self, layer: Layer) -> None:
        """Fits every layer."""


@dataclass(frozen=True)
class MiniCacheRecipe(Later):
    """Pairs of deep layers that keep one direction for both."""

    about: ClassVar[str] = "pairs of layers keep one direction and their own lengths (MiniCache)"
    start: float = 0.5
    sinks: int = 4
    window: int = 24
    flush: int = 8

    @property
    def needs(self) -> tuple[Need, ...]:
        """Pairs of layers and thresholds."""
        return (ROPE, *_both("minicache", start=float(self.start)))

    def __post_init__(self) -> None:
        """Refuse a share out of range."""
        _between("start", self.start, 0, 1)

    def check(self, layer: Layer) -> None:
        """Fits every layer."""


@dataclass(frozen=True)
class GearRecipe(Later):
    """Affine rounding and what is known beforehand of its error."""

    about: ClassVar[str] = "affine rounding, its error corrected by a calibrated map (GEAR)"
    bits: int = 2
    rank: int = 4
    sinks: int = 4
    window: int = 24
    flush: int = 64

    @property
    def needs(self) -> tuple[Need, ...]:
        """Bases of the residual, and the map that corrects."""
        residual = _both("gear", bits=self.bits, rank=self.rank)
        return (ROPE, *residual, *_both("correction", bits=self.bits))

    def __post_init__(self) -> None:
        """Refuse bits and ranks out of range."""
        _among("bits", self.bits, (1, 2, 3, 4))
        _between("rank", self.rank, 1, 16)

    def check(self, layer: Layer) -> None:
        """No more directions than channels."""
        if self.rank > min(layer.k_dim, layer.v_dim):
            raise RecipeError(f"rank={self.rank} for heads of {layer.k_dim}")


@dataclass(frozen=True)
class KiviSinkRecipe(Later):
    """KIVI's rounding, with sinks beyond the first tokens kept exactly."""

    about: ClassVar[str] = "keys by channel, values by token, later sinks exact (KIVI-Sink)"
    bits: int = 2
    sinks: int = 4
    window: int = 24
    flush: int = 64

    @property
    def needs(self) -> tuple[Need, ...]:
        """What tells a sink in each layer."""
        return (Need("sinks"),)

    def __post_init__(self) -> None:
        """Refuse bits out of range."""
        _among("bits", self.bits, (2, 3, 4))

    def check(self, layer: Layer) -> None:
        """Fits every layer."""
