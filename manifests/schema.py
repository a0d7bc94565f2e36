"""Writes `schema.json`, the JSON Schema of velox.json: `python -m velox_pack.manifests.schema`."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from .manifest import json_schema


def shipped_schema() -> bytes:
    """The schema file that ships with the package."""
    return files(__package__).joinpath("schema.json").read_bytes()


if __name__ == "__main__":
    Path(__file__).with_name("schema.json").write_bytes(json_schema())
