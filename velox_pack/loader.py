"""Loading a bundle: packed weights grafted, caches planned, nothing computed again."""

from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import utils as mlx_lm_utils

from velox_pack.door import classes_of
from velox_pack.manifests.bundle import Bundle, open_bundle
from velox_pack.manifests.errors import BundleError


def load(
    path_or_repo: str | Path,
    *,
    cache: str | None = None,
    revision: str | None = None,
    verify: Literal["size", "sha256"] = "size",
    dtype: mx.Dtype | None = None,
) -> tuple[nn.Module, Any]:
    """Give back the model and tokenizer of a bundle; `model.make_cache()` makes its caches.

    Args:
        path_or_repo: a bundle folder, or the id of a Hub repo that holds one.
        cache: name of one of the bundle's cache plans; None for its default, "none" for mlx-lm's
            own caches.
        revision: branch, tag or commit of a Hub repo.
        verify: "size" checks the manifest, sizes and headers; "sha256" hashes every file first.
        dtype: cast floating-point parameters (float32 is fastest on MLX's CPU backend).

    Raises:
        BundleError: no bundle, a damaged one, or one of a newer format.
        RecipeError: no such cache plan.
        SourceError: a repo that cannot be fetched.
    """
    bundle = open_bundle(locate(path_or_repo, revision), verify=verify)
    model, config = load_model(bundle, cache=cache, dtype=dtype)
    tokenizer = mlx_lm_utils.load_tokenizer(
        bundle.path, eos_token_ids=config.get("eos_token_id", None)
    )
    return model, tokenizer


def load_model(
    bundle: Bundle, *, cache: str | None = None, dtype: mx.Dtype | None = None
) -> tuple[nn.Module, dict[str, Any]]:
    """Give the model of an open bundle, evaluated, and its configuration."""
    classes = classes_of(bundle, cache)
    try:
        model, config = mlx_lm_utils.load_model(
            bundle.path,
            lazy=True,
            model_config={"model_file": None},  # never execute Python from a bundle
            get_model_classes=lambda config: classes,
        )
    except ValueError as error:
        raise BundleError(f"{bundle.path}: {' '.join(str(error).split())[:300]}") from error
    if dtype is not None:
        model.set_dtype(dtype)
    mx.eval(model.parameters())
    return model, config


def locate(path_or_repo: str | Path, revision: str | None = None) -> Path:
    """The folder of a bundle, fetched from the Hub if it is not one here.

    Raises BundleError or SourceError.
    """
    folder = Path(path_or_repo).expanduser()
    if folder.exists():
        if revision is not None:
            raise BundleError(f"{folder}: a revision belongs to a repo of the Hub, not to a folder")
        return folder
    from velox_pack.fetch import fetch

    return fetch(str(path_or_repo), revision, ["*"])
