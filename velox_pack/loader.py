"""Loading a bundle: packed weights grafted, caches planned, nothing computed again."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import utils as mlx_lm_utils

from velox_pack.door import classes_of
from velox_pack.manifests.bundle import Bundle, open_bundle, read_manifest
from velox_pack.manifests.errors import BundleError, VeloxError
from velox_pack.manifests.names import MANIFEST_NAME

Verify = Literal["size", "sha256"]


def load(
    path_or_repo: str | Path,
    *,
    cache: str | None = None,
    revision: str | None = None,
    verify: Verify = "size",
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
    model, config = load_model(bundle, cache=cache, dtype=dtype, verify=verify)
    return model, load_tokenizer(bundle, config)


def load_model(
    bundle: Bundle,
    *,
    cache: str | None = None,
    dtype: mx.Dtype | None = None,
    verify: Verify = "size",
) -> tuple[nn.Module, dict[str, Any]]:
    """Give the model of an open bundle, evaluated, and its configuration.

    `verify` is about an overlay's base; the bundle itself has been checked by opening it.
    """
    classes = classes_of(bundle, cache, verify)
    _refuse_strays(bundle)
    try:
        model, config = mlx_lm_utils.load_model(
            bundle.path,
            lazy=True,
            model_config={"model_file": None},  # never execute Python from a bundle
            get_model_classes=lambda config: classes,
        )
    except VeloxError:
        raise
    except Exception as error:  # each architecture fails in its own way on a bad config
        raise BundleError(f"{bundle.path}: mlx-lm cannot load it: {_one_line(error)}") from error
    if dtype is not None:
        model.set_dtype(dtype)
    mx.eval(model.parameters())
    return model, config


def load_tokenizer(bundle: Bundle, config: dict[str, Any]) -> Any:
    """Give mlx-lm's tokenizer of a bundle. Raises BundleError; never runs a bundle's Python."""
    try:
        return mlx_lm_utils.load_tokenizer(
            bundle.path, {"trust_remote_code": False}, config.get("eos_token_id")
        )
    except Exception as error:  # transformers raises nearly anything
        raise BundleError(
            f"{bundle.path}: the tokenizer cannot be loaded: {_one_line(error)}"
        ) from error


def _refuse_strays(bundle: Bundle) -> None:
    """mlx-lm reads every model*.safetensors; those that the manifest lists have been checked."""
    for file in sorted(bundle.path.glob("model*.safetensors")):
        if file.name not in bundle.manifest.files:
            raise BundleError(f"{file}: is no part of the bundle; remove it")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def locate(
    path_or_repo: str | Path,
    revision: str | None = None,
    report: Callable[[str], None] | None = None,
) -> Path:
    """The folder of a bundle, fetched from the Hub if it is not one here.

    The manifest comes first: a repo that is no bundle is refused before anything else travels.
    `report` is told what is about to be downloaded. Raises BundleError or SourceError.
    """
    folder = Path(path_or_repo).expanduser()
    if folder.exists():
        if revision is not None:
            raise BundleError(f"{folder}: a revision belongs to a repo of the Hub, not to a folder")
        return folder
    from velox_pack.fetch import fetch

    repo = str(path_or_repo)
    folder = fetch(repo, revision, [MANIFEST_NAME])
    if not (folder / MANIFEST_NAME).exists():
        raise BundleError(f"{repo}: is not a velox-pack bundle (it has no {MANIFEST_NAME})")
    files = read_manifest(folder).files
    needed = [MANIFEST_NAME, *(n for n, f in files.items() if not f.optional)]
    optional = [n for n, f in files.items() if f.optional]
    # By name again: without network the client then looks at the cache alone, without retries.
    if fetch(repo, revision, needed, optional=optional, report=report) != folder:
        fetch(repo, folder.name, needed, optional=optional, report=report)  # the branch moved on
    return folder
