"""Recipes that need no model run: KIVI, ZipCache, PolarQuant, RVQ, QJL, TurboQuant's products.

At most they need what is drawn or known beforehand: a random rotation and Gaussian levels.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from velox_pack.caches.codecs.affine import Affine
from velox_pack.caches.codecs.base import Codec
from velox_pack.caches.codecs.exact import Exact
from velox_pack.caches.codecs.polar import Polar
from velox_pack.caches.codecs.prod import InnerProduct
from velox_pack.caches.codecs.qjl import SignSketch, SketchedKeys, chunks_of
from velox_pack.caches.codecs.residual import TwoStage
from velox_pack.caches.codecs.rotated import PlainNorm, RotatedScalar
from velox_pack.caches.codecs.zipcache import ChannelSeparable
from velox_pack.caches.later_recipes import _among
from velox_pack.caches.needs import Need
from velox_pack.caches.plan import LayerPlan
from velox_pack.caches.scalar_recipes import GAUSSIAN
from velox_pack.caches.workshop import Workshop
from velox_pack.manifests.errors import RecipeError
from velox_pack.manifests.manifest import Layer

ROTATION = Need("rotation")
# Bits of the two stages by their sum; the first stage alone decides what the second sees.
STAGES = {2: (1, 1), 3: (2, 1), 4: (2, 2)}


class Plain:
    """What recipes without a calibration have in common."""

    ready: ClassVar[bool] = True
    bases: ClassVar[Mapping[str, Need]] = {}
    sinks: int
    window: int
    flush: int

    def bits_of(self) -> tuple[float, float] | None:
        """None are spread."""
        return None

    def _check(self, *codecs: Codec) -> None:
        """Groups of tokens leave the window whole."""
        for codec in codecs or (Exact(),):
            LayerPlan(codec, Exact(), self.sinks, self.window, self.flush)


def _turn_check(name: str, layer: Layer) -> None:
    if min(layer.k_dim, layer.v_dim) < 16:
        raise RecipeError(f"{name}: heads of {min(layer.k_dim, layer.v_dim)} are too small to turn")


@dataclass(frozen=True)
class KiviRecipe(Plain):
    """Keys in groups of tokens of one channel, values in groups of channels of one token.

    2402.02750 and the authors' code (jy-yuan/KIVI: quant/new_pack.py). KIVI's residual of
    exact recent tokens is `window` and `flush` here; sinks are an addition. Rounding is mlx's,
    which moves a group's levels so that one of them is 0.
    """

    about: ClassVar[str] = (
        "keys by channel, values by token, in groups; nothing to calibrate (KIVI)"
    )
    bits: int = 2
    group: int = 32
    sinks: int = 4
    window: int = 24
    flush: int = 32

    @property
    def needs(self) -> tuple[Need, ...]:
        """Nothing."""
        return ()

    def __post_init__(self) -> None:
        """Refuse bits that KIVI does not have."""
        _among("bits", self.bits, (2, 3, 4, 8))

    def codecs(self, layer: Layer, workshop: Workshop) -> tuple[Codec, Codec]:
        """Keys along tokens, values along channels."""
        return self._codecs(layer)

    def _codecs(self, layer: Layer) -> tuple[Codec, Codec]:
        return (
            Affine(self.bits, self.group, layer.k_dim, "channel"),
            Affine(self.bits, self.group, layer.v_dim),
        )

    def check(self, layer: Layer) -> None:
        """The group fits the values, and a flush is whole groups."""
        self._check(*self._codecs(layer))


@dataclass(frozen=True)
class ZipCacheRecipe(Plain):
    """Keys by channel; values by token after each channel's scale is taken out (2405.14256).

    The authors' modes for keys and values. Every token has the same bits: which ones are salient
    follows from attention.
    """

    about: ClassVar[str] = "keys by channel, values by token with channel scales (ZipCache)"
    bits: int = 4
    group: int = 64
    sinks: int = 4
    window: int = 24
    flush: int = 64

    @property
    def needs(self) -> tuple[Need, ...]:
        """Nothing."""
        return ()

    def __post_init__(self) -> None:
        """Refuse bits that keys cannot have."""
        _among("bits", self.bits, (2, 3, 4, 5, 6, 8))

    def codecs(self, layer: Layer, workshop: Workshop) -> tuple[Codec, Codec]:
        """Keys along tokens, values of all heads together."""
        return self._codecs(layer)

    def _codecs(self, layer: Layer) -> tuple[Codec, Codec]:
        return (
            Affine(self.bits, self.group, layer.k_dim, "channel"),
            ChannelSeparable(self.bits, self.group, layer.kv_heads, layer.v_dim),
        )

    def check(self, layer: Layer) -> None:
        """A flush is whole groups."""
        self._check(*self._codecs(layer))


@dataclass(frozen=True)
class RvqRecipe(Plain):
    """A coarse code and a code of what it leaves over (from the description in DESIGN)."""

    about: ClassVar[str] = "random rotation, two stages of 1 or 2 bits; nothing to calibrate (RVQ)"
    bits: int = 4
    sinks: int = 4
    window: int = 24
    flush: int = 8

    @property
    def needs(self) -> tuple[Need, ...]:
        """Levels and a rotation."""
        return (GAUSSIAN, ROTATION)

    def __post_init__(self) -> None:
        """Refuse sums that two stages of 1 or 2 bits do not have."""
        _among("bits", self.bits, tuple(STAGES))

    def codecs(self, layer: Layer, workshop: Workshop) -> tuple[Codec, Codec]:
        """The same for keys and values."""
        return self._codec(layer.k_dim, workshop), self._codec(layer.v_dim, workshop)

    def _codec(self, dim: int, workshop: Workshop) -> Codec:
        turn = workshop.rotation(dim)
        ((again,),) = chunks_of(turn, 1, rounds=1)
        return TwoStage(turn, again, dim, STAGES[self.bits], workshop.levels(), PlainNorm())

    def check(self, layer: Layer) -> None:
        """Heads can be turned."""
        _turn_check("rvq", layer)
        self._check()


@dataclass(frozen=True)
class PolarRecipe(Plain):
    """Angles of randomly rotated rows (2502.02617), keys as they reach attention, and values.

    `bits` is the average of an angle's: one more in the first round, one less in all others, as
    in the paper. `rounds=4` has its radius for every 16 coordinates; 0 takes all that a head has.
    """

    about: ClassVar[str] = "random rotation, polar coordinates; nothing to calibrate (PolarQuant)"
    bits: int = 3
    rounds: int = 0
    sinks: int = 4
    window: int = 24
    flush: int = 8

    @property
    def needs(self) -> tuple[Need, ...]:
        """A rotation."""
        return (ROTATION,)

    def __post_init__(self) -> None:
        """Refuse bits that there are no angles for."""
        _among("bits", self.bits, (2, 3, 4))
        if self.rounds < 0:
            raise RecipeError(f"rounds={self.rounds} is below 0")

    def codecs(self, layer: Layer, workshop: Workshop) -> tuple[Codec, Codec]:
        """The same for keys and values."""
        return self._codec(layer.k_dim, workshop), self._codec(layer.v_dim, workshop)

    def _codec(self, dim: int, workshop: Workshop) -> Codec:
        turn, rounds = workshop.rotation(dim), self._rounds(dim)
        return Polar(turn, dim, rounds, self.bits + 1, self.bits - 1, PlainNorm())

    def _rounds(self, dim: int) -> int:
        return self.rounds or min((dim & -dim).bit_length() - 1, 8)

    def check(self, layer: Layer) -> None:
        """Heads can be halved that often."""
        _turn_check("polar", layer)
        for dim in (layer.k_dim, layer.v_dim):
            rounds = self._rounds(dim)
            if not rounds or dim % (1 << rounds):
                raise RecipeError(f"polar: {rounds} rounds for heads of {dim}")
        self._check()


@dataclass(frozen=True)
class QjlRecipe(Plain):
    """Signs of a random sketch of keys, values by token (2406.03482).

    `signs` is their number for each channel: the authors take 2, and 4 in the first 15 layers. They
    also sketch the 8 strongest channels of every 32 tokens apart, which this does not: on the
    demo model's keys, before RoPE and with random queries, that was worth at most a tenth of the
    error at equal bits (at 1 sign a channel it lost).
    """

    about: ClassVar[str] = "signs of a random sketch of keys, values by token (QJL)"
    signs: int = 2
    values: int = 2
    group: int = 32
    sinks: int = 4
    window: int = 24
    flush: int = 8

    @property
    def needs(self) -> tuple[Need, ...]:
        """A rotation."""
        return (ROTATION,)

    def __post_init__(self) -> None:
        """Refuse sketches of no or too many signs."""
        _among("signs", self.signs, (1, 2, 3, 4))

    def codecs(self, layer: Layer, workshop: Workshop) -> tuple[Codec, Codec]:
        """Sketched keys, affine values."""
        sketch = SignSketch(layer.k_dim, chunks_of(workshop.rotation(layer.k_dim), self.signs))
        return SketchedKeys(sketch, PlainNorm()), self._values(layer)

    def _values(self, layer: Layer) -> Affine:
        return Affine(self.values, self.group, layer.v_dim)

    def check(self, layer: Layer) -> None:
        """Heads can be turned, and the group fits the values."""
        _turn_check("qjl", layer)
        self._check(self._values(layer))


@dataclass(frozen=True)
class TurboQuantProd(Plain):
    """Keys whose products with queries are right on average (2504.19874); values as in -mse.

    Values are mixed and not multiplied with queries: all their bits go into levels.
    """

    about: ClassVar[str] = "random rotation, levels and a sign sketch: unbiased (TurboQuant Prod)"
    bits: int = 4
    sinks: int = 4
    window: int = 24
    flush: int = 8

    @property
    def needs(self) -> tuple[Need, ...]:
        """Levels and a rotation."""
        return (GAUSSIAN, ROTATION)

    def __post_init__(self) -> None:
        """Refuse bits that leave none for levels, or too many."""
        _among("bits", self.bits, (2, 3, 4, 5, 6, 7, 8))

    def codecs(self, layer: Layer, workshop: Workshop) -> tuple[Codec, Codec]:
        """Levels and signs for keys, levels alone for values."""
        turn = workshop.rotation(layer.k_dim)
        sketch = SignSketch(layer.k_dim, chunks_of(turn, 1, rounds=1))
        first = self._levels(layer.kv_heads, layer.k_dim, self.bits - 1, workshop)
        values = self._levels(layer.kv_heads, layer.v_dim, self.bits, workshop)
        return InnerProduct(first, sketch, PlainNorm()), values

    @staticmethod
    def _levels(heads: int, dim: int, bits: int, workshop: Workshop) -> RotatedScalar:
        return RotatedScalar(
            turn=workshop.rotation(dim),
            sigma=mx.full((heads, dim), dim**-0.5),
            widths=(bits,) * dim,
            table=workshop.levels(),
            norm=PlainNorm(),
        )

    def check(self, layer: Layer) -> None:
        """Heads can be turned."""
        _turn_check("turboquant-prod", layer)
        self._check()
