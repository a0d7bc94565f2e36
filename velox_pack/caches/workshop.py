"""From a shelf of artifacts to the parts that codecs are built of."""

from typing import Any

import mlx.core as mx

from velox_pack.caches.codecs.base import Codec
from velox_pack.caches.codecs.rope import BeforeRope, RopeTable
from velox_pack.caches.codecs.rotated import LevelTable, Structured
from velox_pack.caches.shelf import Shelf
from velox_pack.kernels.rotation import StructuredRotation
from velox_pack.manifests.artifacts import Codebook, Rope, Rotation, Widths
from velox_pack.manifests.errors import RecipeError
from velox_pack.manifests.manifest import Layer


class Workshop:
    """Builds codecs from a shelf; arrays shared between layers are made once.

    `coding` is that of the plan (`recipes.Plan.coding`), which its widths go by.
    """

    def __init__(self, shelf: Shelf, coding: str) -> None:
        self.shelf = shelf
        self.coding = coding
        self._tables: dict[tuple[Any, ...], RopeTable] = {}
        self._rotations: dict[int, Structured] = {}
        self._levels: dict[str, LevelTable] = {}

    def levels(self, distribution: str = "gaussian") -> LevelTable:
        """The codebooks of a distribution."""
        if distribution not in self._levels:
            book, _ = self.shelf.find(Codebook, distribution=distribution)
            if missing := sorted(set(range(1, 9)) - set(book.levels)):
                raise RecipeError(f"the bundle's codebook lacks the levels for {missing} bits")
            self._levels[distribution] = LevelTable(dict(book.levels))
        return self._levels[distribution]

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
        found, row = self.shelf.find(Widths, layer, plan=self.coding)
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
