from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from velox_pack.manifests.aligned import AlignedWriter, TensorSpec, layout, read_arrays
from velox_pack.manifests.shards import index_json, plan_shards, planned_bytes


def test_one_file_is_numbered_too() -> None:
    assert [name for name, _ in plan_shards({})] == ["model-00001-of-00001.safetensors"]


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(0, 60_000), max_size=40), limit=st.integers(150_000, 400_000))
def test_every_tensor_once_and_no_file_too_large(sizes: list[int], limit: int) -> None:
    specs = {f"t{i:02d}": TensorSpec("U8", (size,)) for i, size in enumerate(sizes)}
    shards = plan_shards(specs, limit)
    assert [n for _, part in shards for n in part] == sorted(specs)
    assert all(layout(part).size <= limit for _, part in shards)
    assert planned_bytes(shards) == sum(layout(part).size for _, part in shards)
    names = [name for name, _ in shards]
    assert names == [
        f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)
    ]


def test_a_tensor_beyond_the_limit_has_its_own_file() -> None:
    specs = {n: TensorSpec("U8", (size,)) for n, size in (("a", 9), ("b", 10**6), ("c", 9))}
    assert [list(part) for _, part in plan_shards(specs, 200_000)] == [["a"], ["b"], ["c"]]


def test_index_tells_where_everything_is(tmp_path: Path) -> None:
    specs = {f"t{i}": TensorSpec("F32", (20_000,)) for i in range(5)}
    shards = plan_shards(specs, 300_000)
    assert len(shards) > 1
    for file, part in shards:
        with AlignedWriter(tmp_path / file, part) as writer:
            for name in part:
                writer.write(name, np.full(20_000, int(name[1:]), np.float32))
    index = json.loads(index_json(shards))
    assert index["metadata"] == {"total_size": 5 * 80_000}
    for name, file in index["weight_map"].items():
        assert read_arrays(tmp_path / file, [name])[name][0].item() == int(name[1:])
