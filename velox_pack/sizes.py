"""Bytes that caches hold, found by filling them and walking their arrays."""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from velox_pack.caches.cache import VeloxCache
from velox_pack.caches.plan import LayerPlan, ModelPlan
from velox_pack.manifests.manifest import Layer

PROMPT, GENERATED = 1984, 64  # tokens at which bytes are counted
SEQUENCES = 8  # sequences over which constants are spread


@dataclass(frozen=True)
class CacheBytes:
    """Covered layers of one plan in a 16-bit model, after 1,984 + 64 tokens of one sequence."""

    state: int
    constants: int
    elements: int
    per_token: float  # each further token, on average over one flush

    @property
    def plain(self) -> int:
        """The same tokens uncompressed."""
        return 2 * self.elements

    @property
    def bits_per_element(self) -> float:
        """State alone."""
        return 8 * self.state / self.elements

    @property
    def bits_with_constants(self) -> float:
        """State, and the constants spread over 8 sequences."""
        return 8 * (self.state + self.constants / SEQUENCES) / self.elements


def held(layer: Layer, plan: LayerPlan, counts: Sequence[int]) -> int:
    """Bytes of one layer's cache after chunks of `counts` tokens of bfloat16."""
    cache = VeloxCache(plan, "", layer.index)
    for count in counts:
        shape = (1, layer.kv_heads, count)
        cache.update_and_fetch(
            mx.ones((*shape, layer.k_dim), mx.bfloat16), mx.ones((*shape, layer.v_dim), mx.bfloat16)
        )
    cache.settle()
    mx.eval(cache.arrays())
    return cache.nbytes


def cache_bytes(layers: Sequence[Layer], plan: ModelPlan) -> CacheBytes:
    """Count the covered layers' caches. Layers that mlx-lm caches itself are not in the figure."""
    covered = [(layer, plan.layers[layer.index]) for layer in layers if layer.index in plan.layers]
    tokens = PROMPT + GENERATED
    state = sum(held(layer, own, [PROMPT, *([1] * GENERATED)]) for layer, own in covered)
    # Before longer caches make the RoPE tables grow.
    constants = sum(a.nbytes for a in plan.constants())
    per_token = 0.0
    for layer, own in covered:
        more = 8 * own.flush
        further = held(layer, own, [tokens + more]) - held(layer, own, [tokens])
        per_token += further / more
    elements = sum(tokens * layer.kv_heads * (layer.k_dim + layer.v_dim) for layer, _ in covered)
    return CacheBytes(state, constants, elements, per_token)
