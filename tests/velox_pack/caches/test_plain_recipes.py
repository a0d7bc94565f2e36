import dataclasses

import mlx.core as mx
import pytest
from cache_support import fill, opened, rotation, rows_of

from velox_pack.caches import recipes
from velox_pack.caches.cache import VeloxCache
from velox_pack.caches.shelf import Shelf
from velox_pack.calibrators import codebooks
from velox_pack.manifests.errors import RecipeError
from velox_pack.manifests.manifest import Layer

# State in bits a number for heads of 64 that no longer hold anything exactly.
CODED = {
    "kivi": 3.0,
    "kivi:bits=4,group=64,flush=64": 4.5,
    "zipcache": (4.5 + 4 + 16 / 64 + 32 / 128) / 2,
    "rvq": 4.25,
    "rvq:bits=2": 2.25,
    "polar": 3.25,
    "polar:bits=4": 4.25,
    "qjl": (2.25 + 3) / 2,
    "turboquant-prod": (4.5 + 4.25) / 2,
}


def layer(**fields):
    known = {
        "index": 0, "attention": "full", "heads": 4, "kv_heads": 2, "k_dim": 64, "v_dim": 64,
        "window": None, "rope": "rope", "routed": True, "covered": True, "cache_index": 0,
        "reason": None,
    }  # fmt: skip
    return Layer(**(known | fields))


def plan_of(text, own):
    found = {f"rotation-{d}": opened(rotation(d)) for d in {own.k_dim, own.v_dim}}
    shelf = Shelf((own,), found | {"codebook": opened(codebooks.fit())})
    parsed = recipes.parse(text)
    parsed.recipe.check(own)
    return recipes.build(parsed, text, text, shelf)


@pytest.mark.parametrize("text", CODED)
def test_codes_take_the_bits_said(text):
    plan = plan_of(text, layer())
    own = dataclasses.replace(plan.layers[0], sinks=0, window=0)
    cache = fill(VeloxCache(own, text, 0), rows_of(256), rows_of(256, seed=1), [256])
    assert cache.nbytes * 8 == CODED[text] * 2 * 2 * 256 * 64


@pytest.mark.parametrize("dim", [16, 64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("text", [t for t in CODED if "group" not in t])
def test_every_head_dim_and_keys_and_values_of_different_sizes(text, dim):
    own = layer(k_dim=dim, v_dim=64 if dim != 64 else 32)
    plan = plan_of(text, own)
    keys, values = rows_of(100, dim=own.k_dim), rows_of(100, dim=own.v_dim, seed=1)
    cache = VeloxCache(plan.layers[0], text, 0)
    fill(cache, keys, values, [90, *[1] * 10])
    found = cache._all(mx.float32)
    for x, y in zip((keys, values), found, strict=True):
        assert y.shape == x.shape
        assert mx.square(x - y).sum() < 0.4 * mx.square(x).sum()


def test_nothing_has_to_be_run_for_them():
    for text in CODED:
        needs = {need.name for need in recipes.parse(text).needs}
        assert needs <= {"codebook", "rotation"}
        assert recipes.parse(text).behind is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kivi:bits=5", "bits=5 is not one of 2, 3, 4, 8"),
        ("zipcache:bits=1", "bits=1 is not one of 2, 3, 4"),
        ("rvq:bits=5", "bits=5 is not one of 2, 3, 4"),
        ("polar:bits=5", "bits=5 is not one of 2, 3, 4"),
        ("polar:rounds=-1", "rounds=-1 is below 0"),
        ("qjl:signs=5", "signs=5 is not one of 1, 2, 3, 4"),
        ("turboquant-prod:bits=1", "bits=1 is not one of 2, 3, 4"),
    ],
)
def test_options_that_do_not_exist(text, said):
    with pytest.raises(RecipeError, match=said):
        recipes.parse(text)


@pytest.mark.parametrize(
    ("text", "fields", "said"),
    [
        ("kivi:flush=8", {}, "flush=8 is not a multiple of the codec's group of 32"),
        ("kivi:group=64,flush=64", {"v_dim": 80}, "head dim 80; possible are"),
        ("zipcache:flush=32", {}, "flush=32 is not a multiple"),
        ("polar:rounds=5", {"k_dim": 80}, "5 rounds for heads of 80"),
        ("qjl:values=7", {}, "bits=7 is not one of"),
        ("rvq", {"v_dim": 8}, "heads of 8 are too small to turn"),
        ("turboquant-prod:window=-1", {}, "window=-1"),
    ],
)
def test_layers_that_cannot_be_served(text, fields, said):
    with pytest.raises(RecipeError, match=said):
        recipes.parse(text).recipe.check(layer(**fields))
