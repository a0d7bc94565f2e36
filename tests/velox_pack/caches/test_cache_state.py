"""One VeloxCache by itself: what it holds after which chunks, and how it is copied and saved."""

import copy

import mlx.core as mx
import mlx_lm.models.cache as mlx_lm_caches
import pytest
from cache_support import everything, example_plans, fill, rows_of
from mlx_lm.models.cache import KVCache, load_prompt_cache, save_prompt_cache

import velox_pack.door  # noqa: F401 - makes VeloxCache known to mlx-lm
from velox_pack.caches.cache import VeloxCache
from velox_pack.caches.codecs.exact import Exact
from velox_pack.caches.plan import LayerPlan, ModelPlan, lookup, register
from velox_pack.manifests.errors import RecipeError

PLANS = example_plans()
every_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())


def test_boundary():
    plan = LayerPlan(Exact(), Exact(), sinks=4, window=24, flush=8)
    assert [plan.boundary(n) for n in (0, 4, 28, 35, 36, 43, 44)] == [4, 4, 4, 4, 12, 12, 20]
    assert all(n - plan.boundary(n) >= 24 for n in range(28, 500))
    with pytest.raises(RecipeError, match="window=-1"):
        LayerPlan(Exact(), Exact(), sinks=4, window=-1, flush=8)
    with pytest.raises(RecipeError, match="flush=48 is not a multiple of the codec's group of 32"):
        LayerPlan(PLANS["channel"].keys, Exact(), sinks=4, window=24, flush=48)


@every_plan
@pytest.mark.parametrize("tokens", [3, 28, 230])
def test_the_state_depends_on_the_tokens_alone(plan, tokens):
    keys, values = rows_of(tokens), rows_of(tokens, seed=1)
    chunkings = [[tokens], [1] * tokens, [tokens // 2, tokens - tokens // 2]]
    if tokens > 100:
        chunkings.append([5, 60, tokens - 165, 100])
    caches = [fill(VeloxCache(plan, "f", 0), keys, values, chunks) for chunks in chunkings]
    coded = plan.boundary(tokens) - plan.sinks
    for cache in caches:
        assert cache.offset == cache.size() == tokens
        assert sum(a.nbytes for a in cache.codes[0]) > 0 or not coded
        assert everything(cache)[0].shape == (1, 2, tokens, 64)
        for one, other in zip(caches[0].arrays(), cache.arrays(), strict=True):
            assert one.shape == other.shape
            assert one.dtype == other.dtype
            if one.size:  # a product with one row may round otherwise and tip a code or two
                assert mx.mean(one != other).item() < 1e-3


@every_plan
def test_sinks_and_window_are_exact_and_the_rest_is_near(plan):
    tokens = 300
    keys, values = rows_of(tokens), rows_of(tokens, seed=1)
    cache = fill(VeloxCache(plan, "f", 0), keys, values, [250] + [1] * 50)
    last = plan.boundary(tokens)
    assert tokens - last >= plan.window
    for given, held in zip((keys, values), everything(cache), strict=True):
        for part in (slice(0, plan.sinks), slice(last, tokens)):
            assert mx.array_equal(given[:, :, part], held[:, :, part])
        error = mx.mean((given - held) ** 2).item()
        assert error < 0.3  # the spectral plan is made for other rows than these
        assert (error == 0) == (plan.keys == Exact())


@every_plan
def test_codes_are_packed(plan):
    cache = fill(VeloxCache(plan, "f", 0), rows_of(300), rows_of(300, seed=1), [300])
    dtypes = {a.dtype for part in cache.codes for a in part}
    if plan.keys != Exact():
        assert dtypes <= {mx.uint32, mx.uint8, mx.bfloat16, mx.float16}
        assert all(part[0].dtype == mx.uint32 for part in cache.codes)


@pytest.mark.parametrize("offset", [0, 1, 37])
@pytest.mark.parametrize("n", [1, 2, 20])
@pytest.mark.parametrize("return_array", [False, True])
@pytest.mark.parametrize("window", [None, 8])
def test_mask_is_that_of_a_plain_cache(offset, n, return_array, window):
    plain, ours = KVCache(), VeloxCache(PLANS["spectral"], "f", 0)
    if offset:
        plain.update_and_fetch(rows_of(offset), rows_of(offset))
        fill(ours, rows_of(offset), rows_of(offset), [offset])
    expected, got = (
        cache.make_mask(n, return_array=return_array, window_size=window) for cache in (plain, ours)
    )
    if isinstance(expected, mx.array):
        assert mx.array_equal(expected, got)
    else:
        assert got == expected


@every_plan
def test_a_copy_goes_its_own_way(plan):
    keys, values = rows_of(260), rows_of(260, seed=1)
    cache = fill(VeloxCache(plan, "f", 0), keys, values, [200])
    before = [mx.array(a) for a in cache.arrays()]
    other = copy.deepcopy(cache)
    fill(other, rows_of(100, seed=5), rows_of(100, seed=6), [40, 60])
    other.trim(150)
    assert cache.offset == 200
    assert all(mx.array_equal(a, b) for a, b in zip(before, cache.arrays(), strict=True))
    fill(cache, keys[:, :, 200:], values[:, :, 200:], [60])
    unbroken = fill(VeloxCache(plan, "f", 0), keys, values, [200, 60])
    assert all(mx.array_equal(a, b) for a, b in zip(unbroken.arrays(), cache.arrays(), strict=True))


@every_plan
def test_caches_of_one_plan_share_nothing(plan):
    one, other = VeloxCache(plan, "f", 0), VeloxCache(plan, "f", 0)
    fill(one, rows_of(100), rows_of(100), [100])
    assert other.offset == other.nbytes == 0
    assert other.empty()
    assert other.arrays() == []


@pytest.fixture(scope="module")
def registered():
    """Every example as a layer of one loaded plan."""
    plan = ModelPlan("example", "example", "0123abcd/example", dict(enumerate(PLANS.values())))
    assert register(plan) is plan
    return plan


@pytest.mark.parametrize("tokens", [0, 3, 20, 240])
def test_prompt_cache_file(registered, tmp_path, tokens):
    keys, values = rows_of(tokens + 30), rows_of(tokens + 30, seed=1)
    caches = [VeloxCache(p, registered.fingerprint, i) for i, p in registered.layers.items()]
    for cache in caches:
        if tokens:
            fill(cache, keys, values, [tokens])
    path = str(tmp_path / "prompt.safetensors")
    save_prompt_cache(path, caches, {"note": "kept"})
    loaded, metadata = load_prompt_cache(path, return_metadata=True)
    assert metadata["note"] == "kept"
    for cache, other in zip(caches, loaded, strict=True):
        assert type(other) is VeloxCache
        assert (other.offset, other.layer, other.nbytes) == (tokens, cache.layer, cache.nbytes)
        for c in (cache, other):
            fill(c, keys[:, :, tokens:], values[:, :, tokens:], [1, 29])
        for a, b in zip(cache.arrays(), other.arrays(), strict=True):
            assert a.dtype == b.dtype
            assert mx.array_equal(a, b)
    assert mlx_lm_caches.VeloxCache is VeloxCache


def test_state_survives_from_state_without_a_file(registered):
    cache = VeloxCache(registered.layers[2], registered.fingerprint, 2)
    fill(cache, rows_of(100), rows_of(100), [100])
    other = VeloxCache.from_state(cache.state)
    assert other.plan is registered.layers[2]
    assert other.nbytes == cache.nbytes
    assert not other.empty()
    assert other.is_trimmable()


def test_a_cache_that_takes_another_state_takes_its_plan(registered):
    cache = VeloxCache(registered.layers[2], registered.fingerprint, 2)
    cache.state = VeloxCache(registered.layers[3], registered.fingerprint, 3).state
    assert cache.plan is registered.layers[3]


def test_an_unknown_plan_is_refused_in_one_line_and_changes_nothing():
    plan = PLANS["spectral"]
    made = fill(VeloxCache(plan, "gone/away", 7), rows_of(50), rows_of(50), [50])
    cache = VeloxCache.from_state(made.state)
    with pytest.raises(RecipeError, match=r"layer 7, fingerprint gone/away") as caught:
        cache.update_and_fetch(rows_of(1), rows_of(1))
    assert "\n" not in str(caught.value)
    assert cache.offset == 50
    again = ModelPlan("later", "later", "gone/away", {7: plan})
    register(again)
    fill(cache, rows_of(1), rows_of(1), [1])
    assert cache.offset == 51


def test_a_plan_is_forgotten_with_its_model():
    plan = register(ModelPlan("short", "short", "short/lived", {0: PLANS["exact"]}))
    assert lookup("short/lived", 0) is PLANS["exact"]
    del plan
    with pytest.raises(RecipeError):
        lookup("short/lived", 0)


@pytest.mark.parametrize("state", [[], [1, 2], [None] * 9, ["f", 0, 0]])
def test_what_is_no_state_is_refused(state):
    with pytest.raises(RecipeError, match="not the state of a velox-pack cache"):
        VeloxCache.from_state(state)


@every_plan
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_16_bit_models(plan, dtype):
    keys, values = (rows_of(200, seed=s).astype(dtype) for s in (0, 1))
    queries = rows_of(1, heads=4, seed=2)
    cache = fill(VeloxCache(plan, "f", 0), keys[:, :, :199], values[:, :, :199], [199])
    wide = fill(
        VeloxCache(plan, "f", 0),
        keys[:, :, :199].astype(mx.float32),
        values[:, :, :199].astype(mx.float32),
        [199],
    )
    outputs = []
    for c, kind in ((cache, dtype), (wide, mx.float32)):
        c.update_and_fetch(keys[:, :, 199:].astype(kind), values[:, :, 199:].astype(kind))
        outputs.append(c.attend(queries.astype(kind), 0.125, None, None))
    assert outputs[0].dtype == dtype
    assert mx.abs(outputs[0].astype(mx.float32) - outputs[1]).max().item() < 0.05
    assert all(a.dtype != mx.float32 for a in cache.arrays())


@every_plan
def test_a_batch_is_its_rows(plan):
    keys, values = rows_of(150, batch=3), rows_of(150, batch=3, seed=1)
    batch = fill(VeloxCache(plan, "f", 0), keys, values, [100, 50])
    alone = fill(VeloxCache(plan, "f", 0), keys[1:2], values[1:2], [100, 50])
    for one, other in zip(everything(batch), everything(alone), strict=True):
        assert mx.mean(mx.abs(one[1:2] - other)).item() < 1e-3
