"""The model class of a bundle: the architecture's own, with packed layers and velox caches.

`velox_pack.load` uses it directly. mlx-lm's own tools reach it through the bundle's
`velox_model.py` (the `model_file` of its config.json), which imports `model_classes` and nothing
else; so both ways load the same thing.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models.cache as mlx_lm_caches
from mlx_lm import utils as mlx_lm_utils

from velox_pack.architectures import known_to_mlx_lm
from velox_pack.attention import install
from velox_pack.caches import recipes
from velox_pack.caches.cache import VeloxCache
from velox_pack.caches.plan import ModelPlan, register
from velox_pack.caches.shelf import Shelf
from velox_pack.manifests.bundle import Bundle, open_bundle
from velox_pack.manifests.errors import BundleError
from velox_pack.reservoir.pack import graft
from velox_pack.reservoir.rotations import rotations_from_tensors

NO_CACHE = "none"
_COMMIT = re.compile("[0-9a-f]{40}")  # names its content; a branch does not
ASIDE = ("velox.", "__pad__.")

DOOR = '''"""Opens this velox-pack bundle for mlx-lm's own tools; needs `pip install velox-pack`."""

from pathlib import Path

from velox_pack.door import model_classes

Model, ModelArgs = model_classes(Path(__file__).parent)
'''

# mlx-lm's load_prompt_cache looks classes up by name in its own module.
mlx_lm_caches.VeloxCache = VeloxCache


def model_classes(folder: Path) -> tuple[type[nn.Module], type]:
    """`Model` and `ModelArgs` of the bundle in `folder`, with its default cache."""
    return classes_of(open_bundle(folder))


def classes_of(
    bundle: Bundle, cache: str | None = None, verify: Literal["size", "sha256"] = "size"
) -> tuple[type[nn.Module], type]:
    """`Model` and `ModelArgs` of an open bundle; `cache` names a plan, or "none" for mlx-lm's own.

    `verify` says how an overlay's base is checked. Raises RecipeError for an unknown plan or a
    missing artifact, BundleError for a configuration that does not belong to the manifest.
    """
    base, args = mlx_lm_utils._get_classes(load_config(bundle))
    plan = cache_plan(bundle, cache)

    class Model(base):  # type: ignore[misc, valid-type]
        """The architecture's own model, filled from a bundle."""

        def __init__(self, args: Any) -> None:
            super().__init__(args)
            weights = bundle.manifest.weights
            rotations = rotations_from_tensors(
                {name: bundle.rotation(name) for name in weights.rotations}
            )
            graft(self, weights.packed, rotations)
            install(self)
            self.velox_plan = plan

        def sanitize(self, weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
            """Set our own tensors aside; stored parameters went through the source's sanitize.

            The architecture's own is called all the same, for what it does to the model: gemma3's
            drops an output head that no weights came for.
            """
            if bundle.manifest.weights.encoding == "overlay":
                kept = base_weights(bundle, verify)
            else:
                kept = {n: a for n, a in weights.items() if not n.startswith(ASIDE)}
            own = getattr(super(), "sanitize", None)
            if own is not None:
                own(dict(kept))
            return kept

        def make_cache(self) -> list[Any]:
            """Fresh caches: ours where the plan covers a layer, mlx-lm's own elsewhere."""
            own = getattr(super(), "make_cache", None)
            caches = own() if own else [mlx_lm_caches.KVCache() for _ in self.layers]
            if plan is not None:
                for layer in bundle.manifest.model.layers:
                    if layer.index in plan.layers and layer.cache_index is not None:
                        caches[layer.cache_index] = VeloxCache(
                            plan.layers[layer.index], plan.fingerprint, layer.index
                        )
            return caches

    return Model, args


def load_config(bundle: Bundle) -> dict[str, Any]:
    """The bundle's configuration; BundleError if it is not that of the model in the manifest."""
    described = bundle.manifest.model
    try:
        config: dict[str, Any] = mlx_lm_utils.load_config(bundle.path)
        model_type = config["model_type"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise BundleError(f"{bundle.path}: config.json cannot be read: {error!r:.200}") from error
    if model_type != described.model_type or not known_to_mlx_lm(config, model_type):
        raise BundleError(
            f"{bundle.path}: config.json has model_type {model_type!r:.80}, velox.json "
            f"{described.model_type!r:.80}: damaged, or mlx-lm is too old for it"
        )
    for key in ("num_hidden_layers", "num_layers", "n_layers", "n_layer"):
        count = config.get(key)
        # Building layers costs time and memory before any file is read.
        if isinstance(count, int) and count > 8 * len(described.layers):
            raise BundleError(
                f"{bundle.path}: config.json has {key} = {count}, velox.json "
                f"{len(described.layers)} layers"
            )
    config.pop("model_file", None)
    return config


def cache_plan(bundle: Bundle, cache: str | None) -> ModelPlan | None:
    """Build a cache plan of the bundle from its artifacts; None for mlx-lm's own caches."""
    if cache == NO_CACHE or (cache is None and bundle.manifest.default_cache is None):
        return None
    record = bundle.cache_plan(cache)
    fingerprint = f"{bundle.fingerprint[:16]}/{record.name}"
    shelf = Shelf(tuple(bundle.manifest.model.layers), bundle.artifacts_for(record))
    built = recipes.build(recipes.parse(record.recipe), record.name, fingerprint, shelf)
    mx.eval(built.constants())
    return register(built)


def base_weights(bundle: Bundle, verify: Literal["size", "sha256"] = "size") -> dict[str, mx.array]:
    """Parameters of an overlay's base, from the Hub at the pinned commit, lazy.

    The commit vouches for its files; "sha256" hashes them as well. Raises BundleError if the base
    is not the one that the bundle was made from.
    """
    from velox_pack.source import resolve

    record = bundle.manifest.source
    if record.repo is None or record.revision is None:
        raise BundleError(f"{bundle.path}: an overlay without the repo that it lies over")
    source = resolve(record.repo, record.revision)
    wrong = [f.name for f in source.weight_files if f.name not in record.files]
    if verify == "sha256" or not _COMMIT.fullmatch(record.revision):
        wrong = sorted(n for n, digest in source.hashes().items() if record.files.get(n) != digest)
    if wrong:
        raise BundleError(
            f"{record.repo} at {record.revision} is not what {bundle.path.name} was made from: "
            f"{', '.join(wrong)} differ"
        )
    return source.weights()
