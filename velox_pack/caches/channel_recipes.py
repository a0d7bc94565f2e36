"""Recipes that treat channels apart: KVQuant, Kitty, outlier channels."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from velox_pack.caches.codecs.base import Codec
from velox_pack.caches.codecs.exact import Exact
from velox_pack.caches.codecs.kitty import ChannelLevels
from velox_pack.caches.codecs.nuq import Nuq, OwnLevels
from velox_pack.caches.codecs.outliers import TwoStreams, rest_turn
from velox_pack.caches.codecs.rotated import LogNorm
from velox_pack.caches.later_recipes import ROPE, _among, _between
from velox_pack.caches.needs import Need
from velox_pack.caches.plan import LayerPlan
from velox_pack.caches.scalar_recipes import GAUSSIAN
from velox_pack.caches.workshop import Workshop
from velox_pack.manifests import artifacts_channels as channels
from velox_pack.manifests import artifacts_scalar as scalar
from velox_pack.manifests.errors import RecipeError
from velox_pack.manifests.manifest import Layer

PARTS = ("keys", "values")


@dataclass(frozen=True)
class KVQuantRecipe:
    """Levels weighted by sensitivity, outliers apart in 16 bits; the first token is a sink."""

    about: ClassVar[str] = "sensitivity-weighted levels, outliers apart (KVQuant NUQ)"
    ready: ClassVar[bool] = True
    bases: ClassVar[Mapping[str, Need]] = {}
    bits: int = 3
    outliers: float = 0.01
    sinks: int = 4
    window: int = 24
    flush: int = 8

    @property
    def needs(self) -> tuple[Need, ...]:
        """Levels and thresholds of both parts."""
        options = {"bits": self.bits, "outliers": float(self.outliers)}
        return (ROPE, Need.of("nuq", window=self.window + self.flush // 2, **options))

    def __post_init__(self) -> None:
        """Refuse bits and shares out of range."""
        _among("bits", self.bits, (1, 2, 3, 4, 5, 6, 7, 8))
        _between("outliers", self.outliers, 0, 0.1)

    def codecs(self, layer: Layer, workshop: Workshop) -> tuple[Codec, Codec]:
        """Keys in the ranges of their channels, before RoPE; values in those of their tokens."""
        keys, before = self._codec(layer, workshop, "keys")
        values, _ = self._codec(layer, workshop, "values")
        return (workshop.before_rope(layer, keys) if before else keys), values

    def _codec(self, layer: Layer, workshop: Workshop, part: str) -> tuple[Codec, bool]:
        found, row = workshop.shelf.find(scalar.Nuq, layer.index, part=part)
        if found.exact_first > self.sinks:
            raise RecipeError(f"kvquant: sinks={self.sinks} is below {found.exact_first}")
        dim = layer.k_dim if part == "keys" else layer.v_dim
        fixed = found.axis == "channel"
        codec = Nuq(
            table=OwnLevels(found.levels[row], found.edges[row]),
            bits=found.bits,
            heads=layer.kv_heads,
            dim=dim,
            kept=_kept(layer.kv_heads * dim, found.outliers, sides=1 if fixed else 2),
            low=found.low[row] if fixed else None,
            high=found.high[row] if fixed else None,
        )
        return codec, found.before_rope

    def bits_of(self) -> tuple[float, float] | None:
        """None are spread."""
        return None

    def check(self, layer: Layer) -> None:
        """The first token is a sink, and a token's outliers have places."""
        if self.sinks < 1:
            raise RecipeError("kvquant keeps the first token exactly: sinks=0 is below 1")
        if layer.kv_heads * max(layer.k_dim, layer.v_dim) > 1 << 16:
            raise RecipeError(f"kvquant: {layer.kv_heads} heads have too many places for outliers")
        LayerPlan(Exact(), Exact(), self.sinks, self.window, self.flush)


def _kept(width: int, share: float, sides: int) -> int:
    """Outliers of a token of `width` numbers: at least one from each side, unless the share is 0.

    As calibrators.nuq.token_outliers counts them.
    """
    return sides * max(1, round(share * width / sides)) if share > 0 else 0


@dataclass(frozen=True)
class KittyRecipe:
    """Channels with bits of their own, keys before RoPE."""

    about: ClassVar[str] = "bits for each channel by what its error costs (Kitty)"
    ready: ClassVar[bool] = True
    bases: ClassVar[Mapping[str, Need]] = {}
    bits: float = 2.25
    sinks: int = 4
    window: int = 24
    flush: int = 8

    @property
    def needs(self) -> tuple[Need, ...]:
        """Order, widths and scales of channels."""
        return (
            ROPE, GAUSSIAN, *(Need.of(f"kitty-{p}", bits=float(self.bits)) for p in PARTS),
        )  # fmt: skip

    def __post_init__(self) -> None:
        """Refuse bits out of range."""
        _between("bits", self.bits, 1, 6)

    def codecs(self, layer: Layer, workshop: Workshop) -> tuple[Codec, Codec]:
        """The same kind for keys and values."""
        keys, before = self._codec(layer, workshop, "keys")
        values, _ = self._codec(layer, workshop, "values")
        return (workshop.before_rope(layer, keys) if before else keys), values

    def _codec(self, layer: Layer, workshop: Workshop, part: str) -> tuple[Codec, bool]:
        found, row = workshop.shelf.find(channels.Kitty, layer.index, part=part)
        codec = ChannelLevels(
            mean=found.mean[row],
            deviation=found.deviation[row],
            widths=tuple(int(w) for w in found.widths[row].flatten().tolist()),
            table=workshop.levels(),
        )
        return codec, found.before_rope

    def bits_of(self) -> tuple[float, float] | None:
        """None are spread: widths come with the channels."""
        return None

    def check(self, layer: Layer) -> None:
        """Fits every layer."""
        LayerPlan(Exact(), Exact(), self.sinks, self.window, self.flush)


@dataclass(frozen=True)
class OutliersRecipe:
    """Outlier channels in a stream of their own."""

    about: ClassVar[str] = "outlier channels in a stream of their own, the rest rotated"
    ready: ClassVar[bool] = True
    bases: ClassVar[Mapping[str, Need]] = {}
    bits: int = 2
    sinks: int = 4
    window: int = 24
    flush: int = 8

    @property
    def needs(self) -> tuple[Need, ...]:
        """Which channels, the scales of both streams, and signs to rotate with."""
        own = (Need.of(f"outliers-{part}", bits=self.bits) for part in PARTS)
        return (ROPE, GAUSSIAN, Need("rotation"), *own)

    def __post_init__(self) -> None:
        """Refuse bits out of range."""
        _among("bits", self.bits, (1, 2, 3, 4))

    def codecs(self, layer: Layer, workshop: Workshop) -> tuple[Codec, Codec]:
        """The same kind for keys and values."""
        keys, before = self._codec(layer, workshop, "keys")
        values, _ = self._codec(layer, workshop, "values")
        return (workshop.before_rope(layer, keys) if before else keys), values

    def _codec(self, layer: Layer, workshop: Workshop, part: str) -> tuple[Codec, bool]:
        found, row = workshop.shelf.find(channels.Outliers, layer.index, part=part)
        dim = layer.k_dim if part == "keys" else layer.v_dim
        signs = workshop.rotation(dim).rotation.signs
        codec = TwoStreams(
            channels=found.channels[row],
            mean=found.mean[row],
            deviation=found.deviation[row],
            bits=found.bits,
            outlier_bits=found.outlier_bits,
            turn=rest_turn(signs, dim - found.channels.shape[-1]),
            table=workshop.levels(),
            norm=LogNorm(*found.log_norm[row].tolist()),
        )
        return codec, found.before_rope

    def bits_of(self) -> tuple[float, float] | None:
        """None are spread."""
        return None

    def check(self, layer: Layer) -> None:
        """Fits every layer."""
        LayerPlan(Exact(), Exact(), self.sinks, self.window, self.flush)
