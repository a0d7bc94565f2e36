"""Bytes of a whole cache on a real model in bfloat16, as counted and as MLX sees them.

    python benchmarks/cache_memory.py BUNDLE

Fills every covered layer's cache with 1,984 tokens and then 64 single ones, evaluates, clears
MLX's buffer cache and compares active memory before and after with the sum of `nbytes`; the same
for mlx-lm's plain cache.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from common import save
from mlx_lm.models.cache import KVCache

from velox_pack.caches.cache import VeloxCache
from velox_pack.door import cache_plan
from velox_pack.manifests.bundle import open_bundle
from velox_pack.manifests.manifest import Layer
from velox_pack.sizes import GENERATED, PROMPT


def fill(make: Callable[[Layer], Any], layers: list[Layer]) -> dict[str, int]:
    mx.random.seed(0)
    mx.clear_cache()
    before = mx.get_active_memory()
    caches = []
    for layer in layers:
        cache = make(layer)
        for count in (PROMPT, *([1] * GENERATED)):
            rows = [
                mx.random.normal((1, layer.kv_heads, count, d)).astype(mx.bfloat16)
                for d in (layer.k_dim, layer.v_dim)
            ]
            cache.update_and_fetch(*rows)
            mx.eval([a for a in cache.state if isinstance(a, mx.array)])
        caches.append(cache)
    del rows
    mx.clear_cache()
    return {"nbytes": sum(c.nbytes for c in caches), "active": mx.get_active_memory() - before}


def main(path: Path) -> None:
    bundle = open_bundle(path)
    layers = [layer for layer in bundle.manifest.model.layers if layer.covered]
    rows = []
    used = sum(
        2 * (PROMPT + GENERATED) * layer.kv_heads * (layer.k_dim + layer.v_dim) for layer in layers
    )
    rows.append({"cache": "mlx-lm plain", "used": used, **fill(lambda layer: KVCache(), layers)})
    for record in bundle.manifest.caches:
        plan = cache_plan(bundle, record.name)
        if plan is None:
            continue
        fill(lambda layer, p=plan: VeloxCache(p.layers[layer.index], "", layer.index), layers[:1])
        found = fill(
            lambda layer, p=plan: VeloxCache(p.layers[layer.index], "", layer.index), layers
        )
        rows.append({"cache": record.name, "share_of_plain_used": found["nbytes"] / used, **found})
    for row in rows:
        print(row)
    print(save("cache_memory", rows, model=bundle.manifest.source.name))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
