"""velox-pack: prepare a language model for MLX once, load it anywhere in three lines.

Importing this package is light; everything else loads when it is first used.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from velox_pack.manifests.errors import (
    BundleError,
    CalibrationError,
    PackError,
    RecipeError,
    SourceError,
    VeloxError,
)

if TYPE_CHECKING:
    from velox_pack.contents import inspect
    from velox_pack.conversion import convert
    from velox_pack.evaluation import evaluate
    from velox_pack.loader import load
    from velox_pack.manifests.bundle import open_bundle, verify

__version__ = version("velox-pack")

_LAZY = {
    "convert": "velox_pack.conversion",
    "evaluate": "velox_pack.evaluation",
    "inspect": "velox_pack.contents",
    "load": "velox_pack.loader",
    "open_bundle": "velox_pack.manifests.bundle",
    "verify": "velox_pack.manifests.bundle",
}

__all__ = [
    "BundleError",
    "CalibrationError",
    "PackError",
    "RecipeError",
    "SourceError",
    "VeloxError",
    "__version__",
    "convert",
    "evaluate",
    "inspect",
    "load",
    "open_bundle",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'velox_pack' has no attribute {name!r}")
    found = getattr(import_module(_LAZY[name]), name)
    globals()[name] = found
    return found
