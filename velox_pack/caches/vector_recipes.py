"""Recipes that code whole vectors: VecInfer, CommVQ, RaBitQ."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from velox_pack.caches.codecs.additive import Additive
from velox_pack.caches.codecs.base import Codec
from velox_pack.caches.codecs.exact import Exact
from velox_pack.caches.codecs.product import Product
from velox_pack.caches.codecs.rabitq import CentroidGrid
from velox_pack.caches.codecs.rotated import LogNorm
from velox_pack.caches.codecs.vectors import Rounds
from velox_pack.caches.later_recipes import ROPE, _among, _between
from velox_pack.caches.needs import Need
from velox_pack.caches.plan import LayerPlan
from velox_pack.caches.workshop import Workshop
from velox_pack.manifests import artifacts_vector as vector
from velox_pack.manifests.errors import RecipeError
from velox_pack.manifests.manifest import Layer

# Sub vectors and bits of a code for 1 to 4 bits per element.
PRODUCTS = {1: (8, 8), 2: (4, 8), 3: (2, 6), 4: (2, 8)}
_CENTROIDS = 64


def _check_groups(recipe: "VecInferRecipe | CommVQRecipe | RaBitQRecipe") -> None:
    LayerPlan(Exact(), Exact(), recipe.sinks, recipe.window, recipe.flush)


def _grid(
    layer: Layer, workshop: Workshop, part: str, bits: int, centroids: int
) -> tuple[Codec, bool]:
    """RaBitQ's codec of a part, and whether its rows are taken before RoPE."""
    found, row = workshop.shelf.find(vector.RaBitQ, layer.index, part=part)
    if found.centroids.shape[2] != centroids:
        raise RecipeError(
            f"the bundle's rabitq for {part} has {found.centroids.shape[2]} centroids, not "
            f"{centroids}; convert again with this recipe as --cache"
        )
    codec = CentroidGrid(
        centroids=found.centroids[row],
        turn=Rounds.stored(found.signs, found.mix),
        bits=bits,
        norm=LogNorm(*found.log_scale[row].tolist()),
        # At 1 bit the noise of the unbiased estimate can cost attention more than the bias of the
        # nearest row: measured KL 0.72 against 0.31 on a model with strong queries (gemma-3-270m),
        # 0.034 against 0.036, within its error, on another.
        unbiased=part == "keys" and bits > 1,
    )
    return codec, found.before_rope


@dataclass(frozen=True)
class VecInferRecipe:
    """Smoothed, rotated rows in product-quantizer codes of `keys` and `values` bits."""

    about: ClassVar[str] = "smoothing, Hadamard and product-quantizer codebooks (VecInfer)"
    ready: ClassVar[bool] = True
    bases: ClassVar[Mapping[str, Need]] = {}
    keys: int = 2
    values: int = 2
    sinks: int = 4
    window: int = 24
    flush: int = 8

    @property
    def needs(self) -> tuple[Need, ...]:
        """Codebooks for both parts."""
        pairs = (("keys", PRODUCTS[self.keys]), ("values", PRODUCTS[self.values]))
        return (ROPE, *(Need.of(f"vecinfer-{part}", sub=s, bits=b) for part, (s, b) in pairs))

    def __post_init__(self) -> None:
        """Refuse bits that no product quantizer gives."""
        _among("keys", self.keys, tuple(PRODUCTS))
        _among("values", self.values, tuple(PRODUCTS))

    def codecs(self, layer: Layer, workshop: Workshop) -> tuple[Codec, Codec]:
        """The same kind for keys and values."""
        keys, before = self._codec(layer, workshop, "keys")
        values, _ = self._codec(layer, workshop, "values")
        return (workshop.before_rope(layer, keys) if before else keys), values

    def _codec(self, layer: Layer, workshop: Workshop, part: str) -> tuple[Codec, bool]:
        found, row = workshop.shelf.find(vector.VecInfer, layer.index, part=part)
        codec = Product(
            turn=Rounds.stored(found.signs, found.mix),
            codebooks=found.codebooks[row],
            mean=found.mean[row],
            smoothing=found.smoothing[row],
            norm=LogNorm(*found.log_scale[row].tolist()) if found.scaled else None,
            unbiased=part == "keys",
        )
        return codec, found.before_rope

    def bits_of(self) -> tuple[float, float] | None:
        """None are spread."""
        return None

    def check(self, layer: Layer) -> None:
        """Sub vectors divide the heads."""
        for part, bits, dim in (
            ("keys", self.keys, layer.k_dim),
            ("values", self.values, layer.v_dim),
        ):
            sub = PRODUCTS[bits][0]
            if dim % sub:
                raise RecipeError(f"{bits} bits for {part}: {dim} is no multiple of {sub}")
        _check_groups(self)


@dataclass(frozen=True)
class CommVQRecipe:
    """Keys in additive codes that commute with RoPE, values in RaBitQ's codes."""

    about: ClassVar[str] = "additive codebooks before RoPE that commute with it (CommVQ)"
    ready: ClassVar[bool] = True
    bases: ClassVar[Mapping[str, Need]] = {}
    keys: float = 2.0
    values: int = 2
    sinks: int = 4
    window: int = 24
    flush: int = 8

    @property
    def needs(self) -> tuple[Need, ...]:
        """Codebooks of keys, centroids of values."""
        values = Need.of("rabitq-values", centroids=_CENTROIDS)
        return (ROPE, Need.of("commvq", bits=float(self.keys)), values)

    def __post_init__(self) -> None:
        """Refuse bits out of range."""
        _between("keys", self.keys, 0.25, 4)
        _among("values", self.values, (1, 2, 3, 4))

    def codecs(self, layer: Layer, workshop: Workshop) -> tuple[Codec, Codec]:
        """Additive keys, before RoPE wherever the layer turns its keys."""
        found, row = workshop.shelf.find(vector.CommVQ, layer.index)
        keys = Additive(
            codebooks=found.codebooks[row],
            mean=found.mean[row],
            weight=found.weight[row],
            norm=LogNorm(*found.log_scale[row].tolist()),
            dims=found.dims,
            traditional=found.traditional,
        )
        values, _ = _grid(layer, workshop, "values", self.values, _CENTROIDS)
        return (workshop.before_rope(layer, keys) if found.dims else keys), values

    def bits_of(self) -> tuple[float, float] | None:
        """None are spread."""
        return None

    def check(self, layer: Layer) -> None:
        """Keys can be paired, and at least one stage fits."""
        if layer.k_dim % 2 or self.keys * layer.k_dim < 16:
            raise RecipeError(f"{self.keys:g} bits for keys of {layer.k_dim}: not one stage fits")
        _check_groups(self)


@dataclass(frozen=True)
class RaBitQRecipe:
    """Coarse centroids and grid codes; inner products with keys are unbiased from 2 bits on."""

    about: ClassVar[str] = "centroids, rotation and grid codes of 1 to 4 bits (RaBitQ)"
    ready: ClassVar[bool] = True
    bases: ClassVar[Mapping[str, Need]] = {}
    keys: int = 1
    values: int = 4
    centroids: int = _CENTROIDS
    sinks: int = 4
    window: int = 24
    flush: int = 8

    @property
    def needs(self) -> tuple[Need, ...]:
        """Centroids of both parts."""
        parts = ("keys", "values")
        return (ROPE, *(Need.of(f"rabitq-{p}", centroids=self.centroids) for p in parts))

    def __post_init__(self) -> None:
        """Refuse bits and centroids out of range."""
        _among("keys", self.keys, (1, 2, 3, 4))
        _among("values", self.values, (1, 2, 3, 4))
        _among("centroids", self.centroids, (1, 2, 4, 8, 16, 32, 64, 128, 256))

    def codecs(self, layer: Layer, workshop: Workshop) -> tuple[Codec, Codec]:
        """The same kind for keys and values."""
        keys, before = _grid(layer, workshop, "keys", self.keys, self.centroids)
        values, _ = _grid(layer, workshop, "values", self.values, self.centroids)
        return (workshop.before_rope(layer, keys) if before else keys), values

    def bits_of(self) -> tuple[float, float] | None:
        """None are spread."""
        return None

    def check(self, layer: Layer) -> None:
        """Fits every layer."""
        _check_groups(self)
