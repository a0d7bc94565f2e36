"""Splitting weights over files of at most 5 GB, and the index that says what is where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from . import strict_json
from .aligned import PAGE, TensorSpec, layout

INDEX_NAME = "model.safetensors.index.json"
MAX_SHARD_BYTES = 5_000_000_000


def plan_shards(
    specs: Mapping[str, TensorSpec], max_bytes: float = MAX_SHARD_BYTES
) -> list[tuple[str, dict[str, TensorSpec]]]:
    """Assign tensors, in sorted order, to `model-00001-of-0000N.safetensors` and so on.

    `max_bytes` bounds the whole file, header and padding included; one tensor that is larger
    gets a file of its own. At least one file, even for no tensors, since mlx-lm wants one.
    """
    shards: list[dict[str, TensorSpec]] = [{}]
    used = header = 0
    for name in sorted(specs):
        # An upper bound that needs no layout per step: two pages of slack for small tensors.
        data = -(-specs[name].nbytes // PAGE) * PAGE if specs[name].nbytes >= PAGE else 0
        data = data or specs[name].nbytes + 8
        row = len(name.encode("utf-8")) + 200
        if shards[-1] and used + data + header + row + 3 * PAGE > max_bytes:
            shards.append({})
            used = header = 0
        shards[-1][name] = specs[name]
        used, header = used + data, header + row
    count = len(shards)
    return [(f"model-{i:05d}-of-{count:05d}.safetensors", s) for i, s in enumerate(shards, 1)]


def index_json(shards: Sequence[tuple[str, Mapping[str, TensorSpec]]]) -> bytes:
    """The bytes of `model.safetensors.index.json`; padding is not listed."""
    weight_map = {name: file for file, specs in shards for name in specs}
    total = sum(spec.nbytes for _, specs in shards for spec in specs.values())
    return strict_json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map})


def planned_bytes(shards: Sequence[tuple[str, Mapping[str, TensorSpec]]]) -> int:
    """Bytes that the files will take, headers and padding included."""
    return sum(layout(specs).size for _, specs in shards)
