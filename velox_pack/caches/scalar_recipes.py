"""Recipes that code one number at a time: exact, affine, TurboQuant, spectral."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from velox_pack.caches.codecs.affine import Affine
from velox_pack.caches.codecs.base import Codec
from velox_pack.caches.codecs.exact import Exact
from velox_pack.caches.codecs.grouped import GroupedBasis
from velox_pack.caches.codecs.rotated import Eigenbasis, LogNorm, PlainNorm, RotatedScalar
from velox_pack.caches.needs import Need
from velox_pack.caches.plan import LayerPlan
from velox_pack.caches.workshop import Workshop
from velox_pack.manifests.artifacts import Center, Spectral
from velox_pack.manifests.artifacts_scalar import JointSpectral
from velox_pack.manifests.errors import RecipeError
from velox_pack.manifests.manifest import Layer

GAUSSIAN = Need.of("codebook", distribution="gaussian")


def _check_bits(
    recipe: "TurboQuantMse | SpectralRecipe | JointSpectralRecipe", layer: Layer
) -> None:
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
    ready: ClassVar[bool] = True
    bases: ClassVar[Mapping[str, Need]] = {}
    sinks: ClassVar[int] = 0
    window: ClassVar[int] = 0
    flush: ClassVar[int] = 256

    @property
    def needs(self) -> tuple[Need, ...]:
        """Nothing."""
        return ()

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
    ready: ClassVar[bool] = True
    bases: ClassVar[Mapping[str, Need]] = {}
    bits: int = 4
    group: int = 64
    axis: str = "token"
    sinks: int = 4
    window: int = 24
    flush: int = 64

    @property
    def needs(self) -> tuple[Need, ...]:
        """Nothing."""
        return ()

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
    """A random rotation and Lloyd-Max levels, after RoPE (2504.19874, from DESIGN's description).

    `levels` names the density that they are best for: "rotated-unit", the paper's exact one for a
    coordinate of a randomly rotated unit vector of the head's dimension, or its limit "gaussian".
    """

    about: ClassVar[str] = "random rotation, Lloyd-Max levels; nothing to calibrate"
    ready: ClassVar[bool] = True
    bases: ClassVar[Mapping[str, Need]] = {}
    bits: float = 4.0
    levels: str = "gaussian"
    sinks: int = 4
    window: int = 24
    flush: int = 8

    @property
    def needs(self) -> tuple[Need, ...]:
        """Nothing that the model has to be run for."""
        return (Need.of("codebook", distribution=self.levels), Need("rotation"))

    def __post_init__(self) -> None:
        """Refuse densities that rows are never of."""
        if self.levels not in ("gaussian", "rotated-unit"):
            raise RecipeError(f"levels={self.levels} is neither gaussian nor rotated-unit")

    def codecs(self, layer: Layer, workshop: Workshop) -> tuple[Codec, Codec]:
        """The same for keys and values."""
        return self._codec(layer, workshop, "keys"), self._codec(layer, workshop, "values")

    def _codec(self, layer: Layer, workshop: Workshop, part: str) -> Codec:
        dim = layer.k_dim if part == "keys" else layer.v_dim
        density = self.levels if self.levels == "gaussian" else f"{self.levels}-{dim}"
        return RotatedScalar(
            turn=workshop.rotation(dim),
            sigma=mx.full((layer.kv_heads, dim), dim**-0.5),
            widths=workshop.widths(layer.index, part),
            table=workshop.levels(density),
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
    ready: ClassVar[bool] = True
    bases: ClassVar[Mapping[str, Need]] = {"keys": Need("spectral-keys")}
    bits: float = 3.0
    keys: float | None = None
    values: float | None = None
    sinks: int = 4
    window: int = 24
    flush: int = 8

    @property
    def needs(self) -> tuple[Need, ...]:
        """Bases, means, and how keys are turned."""
        return (
            GAUSSIAN, Need("rotation"), Need("rope"), Need("spectral-keys"), Need("center-values"),
        )  # fmt: skip

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


@dataclass(frozen=True)
class JointSpectralRecipe:
    """Keys before RoPE and values, heads together, in bases that know what an error costs.

    Heads of a layer repeat each other, so a basis of all of them carries the same with fewer bits;
    it is that of the queries' metric for keys and of measured sensitivities for values
    (calibrators.spectral_metric). One 8-bit logarithmic scale for the heads of a group together.
    """

    about: ClassVar[str] = "keys before RoPE and values, heads together, bases by cost of errors"
    ready: ClassVar[bool] = True
    bits: float = 3.0
    keys: float | None = None
    values: float | None = None
    sinks: int = 4
    window: int = 24
    flush: int = 8

    @property
    def bases(self) -> Mapping[str, Need]:
        """The joint basis of each part; costs are those of what the window does not keep."""
        behind = self.window + self.flush // 2
        return {p: Need.of(f"joint-spectral-{p}", window=behind) for p in ("keys", "values")}

    @property
    def needs(self) -> tuple[Need, ...]:
        """Bases, and how keys are turned."""
        return (GAUSSIAN, Need("rope"), *self.bases.values())

    def codecs(self, layer: Layer, workshop: Workshop) -> tuple[Codec, Codec]:
        """The same kind for keys and values."""
        keys, before = self._codec(layer, workshop, "keys")
        values, _ = self._codec(layer, workshop, "values")
        return (workshop.before_rope(layer, keys) if before else keys), values

    def _codec(self, layer: Layer, workshop: Workshop, part: str) -> tuple[Codec, bool]:
        found, row = workshop.shelf.find(JointSpectral, layer.index, part=part)
        variance = found.variance[row]
        sigma = mx.sqrt(variance / mx.maximum(variance.sum(-1, keepdims=True), 1e-30))
        codec = RotatedScalar(
            turn=GroupedBasis(found.forward[row], found.undo[row], found.group),
            sigma=mx.maximum(sigma, 1e-6),
            widths=workshop.widths(layer.index, part),
            table=workshop.levels(),
            norm=LogNorm(*found.log_norm[row].tolist()),
            mean=found.mean[row],
        )
        return codec, found.before_rope

    def bits_of(self) -> tuple[float, float]:
        """Bits of keys and of values."""
        keys = self.bits if self.keys is None else self.keys
        values = self.bits if self.values is None else self.values
        return keys, values

    def check(self, layer: Layer) -> None:
        """Bits can be packed."""
        _check_bits(self, layer)
