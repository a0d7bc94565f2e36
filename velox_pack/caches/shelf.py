"""Finding the artifacts of a bundle by what a layer needs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from velox_pack.manifests.artifacts import Artifact
from velox_pack.manifests.errors import RecipeError
from velox_pack.manifests.manifest import Layer

A = TypeVar("A", bound=Artifact)


@dataclass(frozen=True)
class Shelf:
    """The artifacts that one plan may use, and the layers of the model."""

    layers: tuple[Layer, ...]
    artifacts: Mapping[str, Artifact]

    def covered(self) -> list[Layer]:
        """Layers that our caches can serve."""
        return [layer for layer in self.layers if layer.covered]

    def find(self, kind: type[A], layer: int | None = None, **parameters: Any) -> tuple[A, int]:
        """The artifact of a kind for a layer (or for all alike), and the layer's row in it.

        Raises RecipeError that says which one is missing and how to make it.
        """
        for artifact in self.artifacts.values():
            if not isinstance(artifact, kind):
                continue
            have = artifact.parameters()
            if any(have.get(k) != v for k, v in parameters.items()):
                continue
            if layer is None or not artifact.layers:
                return artifact, 0
            if layer in artifact.layers:
                return artifact, artifact.layers.index(layer)
        wanted = ", ".join(f"{k}={v}" for k, v in parameters.items())
        where = "" if layer is None else f" for layer {layer}"
        raise RecipeError(
            f"the bundle lacks the artifact {kind.kind}{f' ({wanted})' if wanted else ''}{where}; "
            "convert again with this recipe as --cache"
        )
