"""Forgetting tokens, and any order of adding, forgetting, copying and saving."""

import copy

import mlx.core as mx
import numpy as np
import pytest
from cache_support import everything, example_plans, fill, rows_of
from hypothesis import given, settings
from hypothesis import strategies as st

from velox_pack.caches.cache import VeloxCache
from velox_pack.caches.codecs.affine import Affine
from velox_pack.caches.plan import LayerPlan, ModelPlan, register

PLANS = example_plans()
every_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
TOKENS = 240


@every_plan
# In the window, at its edge, into codes, into a group, into the sinks, everything, too many.
@pytest.mark.parametrize("n", [0, 1, 16, 24, 40, 100, 140, 233, 238, 240, 999])
def test_what_is_left_is_what_was_there(plan, n):
    cache = fill(VeloxCache(plan, "f", 0), rows_of(TOKENS), rows_of(TOKENS, seed=1), [200, 40])
    before = everything(cache)
    assert cache.trim(n) == min(n, TOKENS)
    left = max(0, TOKENS - n)
    assert cache.offset == left
    assert cache.empty() == (left == 0)
    if left:
        for then, now in zip(before, everything(cache), strict=True):
            assert now.shape[2] == left
            assert mx.allclose(then[:, :, :left], now, atol=1e-5)
    else:
        assert cache.nbytes == 0


@every_plan
@pytest.mark.parametrize("n", [5, 100, 233, 238, 240])
def test_it_goes_on_after_a_trim(plan, n):
    keys, values = rows_of(TOKENS), rows_of(TOKENS, seed=1)
    cache = fill(VeloxCache(plan, "f", 0), keys, values, [TOKENS])
    cache.trim(n)
    kept = everything(cache) if cache.offset else None
    more = rows_of(200, seed=2), rows_of(200, seed=3)
    fill(cache, *more, [1, 60, 139])
    assert cache.offset == TOKENS - n + 200
    last = plan.boundary(cache.offset)
    assert cache.codes[0][0].shape[2] * plan.keys.granularity == last - plan.sinks
    for i, held in enumerate(everything(cache)):
        assert held.shape[2] == cache.offset
        exact = held[:, :, last:]
        assert mx.array_equal(exact, more[i][:, :, 200 - exact.shape[2] :])
        if kept:  # coded twice at most: what came back to the window is coded again
            error = mx.mean((held[:, :, : TOKENS - n] - kept[i]) ** 2).item()
            assert error < 0.3


@every_plan
def test_trims_one_after_the_other_keep_the_dtype(plan):
    keys, values = (rows_of(TOKENS, seed=s).astype(mx.float16) for s in (0, 1))
    cache = fill(VeloxCache(plan, "f", 0), keys, values, [TOKENS])
    for n in (60, 33, 30, 1, 32, 64, 10):
        cache.trim(n)
    assert cache.offset == 10
    fill(cache, keys[:, :, :2], values[:, :, :2], [1, 1])
    assert all(a.dtype == mx.float16 for a in (*cache.recent, *cache.sinks))


def test_an_emptied_cache_takes_other_batches():
    cache = fill(VeloxCache(PLANS["spectral"], "f", 0), rows_of(90), rows_of(90), [90])
    cache.trim(90)
    fill(cache, rows_of(90, batch=2), rows_of(90, batch=2), [50, 40])
    assert everything(cache)[0].shape == (2, 2, 90, 64)


STEPS = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 70)),
    st.tuples(st.just("add"), st.just(1)),
    st.tuples(st.just("trim"), st.integers(0, 120)),
    st.tuples(st.sampled_from(["copy", "save"]), st.just(0)),
)
# 8 bits: close enough to tell each token from every other, however often it was coded.
TOKEN, CHANNEL = (Affine(8, 32, 32, axis) for axis in ("token", "channel"))
FINE = {
    0: LayerPlan(TOKEN, TOKEN, 4, 16, 8),
    1: LayerPlan(CHANNEL, TOKEN, 4, 16, 32),
    2: LayerPlan(CHANNEL, CHANNEL, 0, 0, 64),
}
FINE_PLAN = register(ModelPlan("fine", "fine", "fine/plan", FINE))


@pytest.mark.parametrize("layer", FINE)
@settings(max_examples=25, deadline=None)
@given(steps=st.lists(STEPS, min_size=1, max_size=10))
def test_any_order_of_steps_holds_the_tokens_that_are_left(layer, steps):
    cache = VeloxCache(FINE[layer], FINE_PLAN.fingerprint, layer)
    source = np.random.default_rng(0)
    truth = np.zeros((1, 1, 0, 32), np.float32)
    for step, n in steps:
        if step == "add":
            new = source.standard_normal((1, 1, n, 32)).astype(np.float32)
            truth = np.concatenate([truth, new], axis=2)
            fill(cache, mx.array(new), mx.array(-new), [n])
        elif step == "trim":
            n = min(n, truth.shape[2])
            assert cache.trim(n) == n
            truth = truth[:, :, : truth.shape[2] - n]
        elif step == "copy":
            cache = copy.deepcopy(cache)
        else:
            cache = VeloxCache.from_state(cache.state)
        assert cache.offset == truth.shape[2]
        if truth.size:
            keys, values = everything(cache)
            assert keys.shape == values.shape == truth.shape
            np.testing.assert_allclose(np.array(keys), truth, atol=0.1)
            np.testing.assert_allclose(np.array(values), -truth, atol=0.1)
