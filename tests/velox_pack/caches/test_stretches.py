"""Attention a stretch of keys at a time, on codes where a codec can."""

import mlx.core as mx
import pytest
from cache_support import example_plans

from velox_pack.caches import cache as cache_module
from velox_pack.caches import stretches
from velox_pack.caches.cache import VeloxCache
from velox_pack.caches.stretches import Rows, attend

HEADS, KV, DIM = 6, 2, 64


def normal(*shape: int) -> mx.array:
    return mx.random.normal(shape)


def reference(q, k, v, scale, mask=None, sinks=None):
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sinks)


def pieces(k, v, sizes):
    found, start = [], 0
    for n in sizes:
        found.append(Rows(k[:, :, start : start + n], v[:, :, start : start + n]))
        start += n
    return found


@pytest.mark.parametrize("mask", [None, "causal", "window", "additive", "by head"])
@pytest.mark.parametrize("length", [1, 7, 300])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_stretches_give_what_one_attention_gives(mask, length, with_sinks) -> None:
    total = length + 200
    q, k, v = normal(2, HEADS, length, DIM), normal(2, KV, total, DIM), normal(2, KV, total, 48)
    sinks = normal(HEADS) if with_sinks else None
    place = mx.arange(200, total)[:, None] - mx.arange(total)[None]
    seen = (place >= 0) & (place < 90)
    if mask == "window":
        mask = seen
    elif mask == "additive":
        mask = mx.where(seen, normal(*seen.shape), -mx.inf)
    elif mask == "by head":
        mask = mx.where(seen, normal(2, HEADS, *seen.shape), -mx.inf)
    sizes = [4, 96, 90, total - 190]
    found = attend(q, pieces(k, v, sizes), 0.125, mask, sinks)
    assert found.shape == (2, HEADS, length, 48)
    assert mx.abs(found - reference(q, k, v, 0.125, mask, sinks)).max().item() < 1e-5


def test_large_scores_do_not_overflow() -> None:
    q, k, v = 100 * normal(1, 2, 1, 16), 100 * normal(1, 2, 90, 16), normal(1, 2, 90, 16)
    found = attend(q, pieces(k, v, [30, 30, 30]), 1.0, None, None)
    assert mx.abs(found - reference(q, k, v, 1.0)).max().item() < 1e-4


@pytest.mark.parametrize("name", sorted(example_plans()))
@pytest.mark.parametrize("stretch", [128, 1024])
@pytest.mark.parametrize("length", [1, 40])
def test_attention_on_codes_is_attention_on_what_they_decode_to(
    name, stretch, length, monkeypatch
) -> None:
    for module in (stretches, cache_module):
        monkeypatch.setattr(module, "STRETCH", stretch)
    plan = example_plans(KV, DIM)[name]
    cache = VeloxCache(plan, "f", 0)
    cache.update_and_fetch(normal(1, KV, 500, DIM), normal(1, KV, 500, DIM))
    cache.settle()
    q, k, v = normal(1, HEADS, length, DIM), normal(1, KV, length, DIM), normal(1, KV, length, DIM)
    mask = "causal" if length > 1 else None
    whole = cache.copy()
    whole.update_and_fetch(k, v)
    expected = reference(q, *whole._all(mx.float32), 0.125, mask)
    cache.update_and_fetch(k, v)
    found = cache.attend(q, 0.125, mask, None)
    assert mx.abs(found - expected).max().item() < 2e-5


def test_what_exists_beside_the_cache_is_a_stretch_and_not_the_context() -> None:
    plan = example_plans(KV, DIM)["spectral"]

    def transient(tokens: int) -> int:
        cache = VeloxCache(plan, "f", 0)
        for _ in range(tokens // 2048):
            cache.update_and_fetch(normal(1, KV, 2048, DIM), normal(1, KV, 2048, DIM))
            cache.settle()
            mx.eval(cache.state)
        q, row = normal(1, HEADS, 1, DIM), normal(1, KV, 1, DIM)
        mx.eval(q, row)
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        cache.update_and_fetch(row, row)
        mx.eval(cache.attend(q, 0.125, None, None))
        return mx.get_peak_memory() - before

    assert transient(16384) < 1.6 * transient(4096)
