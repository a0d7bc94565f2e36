"""Names that a bundle may use for files and ids: plain ones, so that no path leaves the bundle."""

from __future__ import annotations

import re

from .strict_json import shorten

MANIFEST_NAME = "velox.json"
CACHE_FILE = "model-velox-cache.safetensors"  # artifacts; mlx-lm loads model*.safetensors

# Letters, digits and _ . + - and space inside; never hidden, never a drive letter or backslash.
_PART = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.+ -]{0,198}[A-Za-z0-9_+-])?")
_LICENCES = ("LICENSE", "LICENCE", "NOTICE", "USE_POLICY")
_ID = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_-]{0,98}[A-Za-z0-9])?")


def check_name(name: str) -> list[str]:
    """Problems of a file name: it must be relative, plain, and at most one folder deep."""
    parts = name.split("/")
    if len(parts) > 2 or not all(_PART.fullmatch(part) for part in parts):
        return [f"file name {shorten(name)} is not a plain name inside the bundle"]
    return []


def check_id(text: str) -> list[str]:
    """Problems of the id of an artifact or rotation: it becomes part of tensor names."""
    if not _ID.fullmatch(text) or text == "rotation":
        return [f"id {shorten(text)} is not made of letters, digits, '-' and '_'"]
    return []


def may_change(name: str) -> bool:
    """True for the files that may be written anew after convert: the card and plots."""
    return name == "README.md" or name.startswith("plots/")


def is_optional(name: str) -> bool:
    """True for the files that a bundle works without: card, plots and licences.

    mlx-lm's own tools do not download a LICENSE, so its absence may not break a bundle.
    """
    return may_change(name) or name.startswith(_LICENCES)
