"""Quality and real bytes of cache recipes on real models, against mlx-lm's QuantizedKVCache.

    python benchmarks/cache_quality.py MODEL_FOLDER [MODEL_FOLDER ...]

Each model keeps its own weights (float32 on the CPU), so that only the cache differs. Recipes are
calibrated on the built-in text; windows of 512 tokens come from the built-in held-out text.
Everything has generation semantics: logits are those of decoding token by token. mlx-lm's cache
sees the token being decoded through its codes as well, as it does when it generates. Bytes are
counted by filling the caches with bfloat16 tokens and walking their arrays.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx
from common import HERE, save
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache

from velox_pack.caches.codecs.affine import Affine
from velox_pack.caches.plan import LayerPlan, ModelPlan
from velox_pack.calibrators.text import load_text, sequences
from velox_pack.conversion import convert
from velox_pack.door import cache_plan
from velox_pack.evaluation import Score
from velox_pack.loader import load_model
from velox_pack.manifests.bundle import open_bundle
from velox_pack.manifests.manifest import Layer
from velox_pack.onepass import OnePassCache
from velox_pack.sizes import GENERATED, PROMPT, cache_bytes
from velox_pack.source import data_folder, resolve

RECIPES = [
    "ratequant+joint-spectral",
    "ratequant+joint-spectral:bits=4",
    "ratequant+joint-spectral:bits=2",
    "joint-spectral",
    "joint-spectral:bits=2",
    "ratequant+spectral",
    "ratequant+spectral:bits=4",
    "ratequant+spectral:bits=2",
    "spectral",
    "spectral:bits=2",
    "turboquant-mse:bits=3",
    "ratequant+turboquant-mse:bits=3",
]
BASELINE = [(8, 64), (4, 64), (3, 64), (2, 64)]
WINDOWS = 2


def mlx_lm_plan(layers: list[Layer], bits: int, group: int) -> ModelPlan:
    """mlx-lm's QuantizedKVCache as a plan: everything in codes at once."""
    plans = {
        layer.index: LayerPlan(
            Affine(bits, group, layer.k_dim), Affine(bits, group, layer.v_dim), 0, 0, 1
        )
        for layer in layers
        if layer.covered
    }
    return ModelPlan(f"mlx-lm {bits} bits group {group}", "", "", plans)


def mlx_lm_bits(layer: Layer, bits: int, group: int) -> tuple[float, float | None]:
    """Bits per element that mlx-lm's cache uses, and that it has allocated.

    It raises for 3 bits at some head dims (256); there the first is what its format takes.
    """
    cache = QuantizedKVCache(group, bits)
    for count in (PROMPT, *([1] * GENERATED)):
        shape = (1, layer.kv_heads, count)
        rows = (mx.ones((*shape, dim), mx.bfloat16) for dim in (layer.k_dim, layer.v_dim))
        try:
            cache.update_and_fetch(*rows)
        except ValueError:
            return bits + 32 / group, None
    used = sum(a.nbytes for pair in cache.keys_and_values() for a in pair)
    elements = (PROMPT + GENERATED) * layer.kv_heads * (layer.k_dim + layer.v_dim)
    return 8 * used / elements, 8 * cache.nbytes / elements


def logits(model: Any, ids: mx.array, layers: list[Layer], plan: ModelPlan | None) -> mx.array:
    caches = make_prompt_cache(model)
    for layer in layers:
        if plan is not None and layer.covered and layer.cache_index is not None:
            itself = not plan.recipe
            caches[layer.cache_index] = OnePassCache(plan.layers[layer.index], itself)
    out = model(ids[None], cache=caches)[0].astype(mx.float32)
    mx.eval(out)
    return out


def measure(folder: Path) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as scratch:
        path = convert(str(folder), Path(scratch) / "bundle", weights="keep", caches=RECIPES)
        bundle = open_bundle(path)
        model, _ = load_model(bundle, cache="none", dtype=mx.float32)
        layers = list(bundle.manifest.model.layers)
        plans = [mlx_lm_plan(layers, *b) for b in BASELINE]
        plans += [p for p in (cache_plan(bundle, name) for name in RECIPES) if p]
        source = resolve(str(folder))
        text = load_text(data_folder() / "text" / "heldout.txt")
        windows = sequences(source.tokenizer(), text, 512 * WINDOWS, 512, seed=0)
        scores = {plan.name: Score() for plan in plans}
        for number, window in enumerate(windows):
            print(f"{folder.name}: window {number + 1} of {len(windows)}", file=sys.stderr)
            ids = mx.array(window)
            reference = logits(model, ids, layers, None)
            for plan in plans:
                scores[plan.name].add(reference, logits(model, ids, layers, plan), ids)
        rows = []
        covered = [layer for layer in layers if layer.covered]
        for plan in plans:
            row: dict[str, Any] = {"model": folder.name, "cache": plan.name}
            if plan.recipe:
                found = cache_bytes(layers, plan)
                row |= {
                    "bits_per_element": found.bits_per_element,
                    "bits_with_constants": found.bits_with_constants,
                    "share_of_plain": found.state / found.plain,
                }
            else:
                bits, group = BASELINE[plans.index(plan)]
                used, allocated = mlx_lm_bits(covered[0], bits, group)
                row |= {"bits_per_element": used, "bits_allocated": allocated}
            rows.append(row | scores[plan.name].result())
            print({k: round(v, 4) if isinstance(v, float) else v for k, v in rows[-1].items()})
        return rows


if __name__ == "__main__":
    # Rows of models that are not named this time stay as they are.
    path = HERE / "cache_quality.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    for folder in map(Path, sys.argv[1:]):
        rows = [row for row in rows if row["model"] != folder.name] + measure(folder)
        held = f"{PROMPT} + {GENERATED}"
        print(save("cache_quality", rows, windows=f"{WINDOWS} x 512", tokens_for_bytes=held))
