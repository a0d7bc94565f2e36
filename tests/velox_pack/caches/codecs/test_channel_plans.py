"""KVQuant, SVDq, PALU, Kitty and outlier channels as whole plans of the demo model."""

import mlx.core as mx
import pytest
from cache_support import everything, fill, rows_of

from velox_pack.caches import recipes
from velox_pack.caches.cache import VeloxCache
from velox_pack.caches.shelf import Shelf
from velox_pack.conversion import convert
from velox_pack.door import cache_plan
from velox_pack.evaluation import Score, one_pass
from velox_pack.loader import load_model
from velox_pack.manifests.bundle import open_bundle
from velox_pack.manifests.errors import RecipeError
from velox_pack.sizes import held

NAMES = ["kvquant", "svdq:bits=3", "palu", "kitty", "outliers"]
# Affine rounding of as many bytes or more.
PLAIN = {
    name: f"affine:bits={bits},flush=8" for name, bits in zip(NAMES, (3, 3, 2, 2, 2), strict=True)
}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    out = tmp_path_factory.mktemp("channels") / "bundle"
    return open_bundle(
        convert("demo", out, caches=[*NAMES, *sorted({*PLAIN.values()})], calibration_tokens=1024)
    )


@pytest.fixture(scope="module")
def text(heldout):
    return heldout[:256]


@pytest.fixture(scope="module")
def exact(bundle, text):
    model, _ = load_model(bundle, cache="none", dtype=mx.float32)
    return model, one_pass(model, text, bundle.manifest.model.layers, None)


@pytest.fixture(scope="module")
def measured(bundle, exact, text):
    """KL and bits per element of a plan; each is measured once."""
    layers, done = bundle.manifest.model.layers, {}

    def get(name):
        if name not in done:
            plan, score = cache_plan(bundle, name), Score()
            score.add(exact[1], one_pass(exact[0], text, layers, plan), text)
            bytes_ = sum(held(layer, plan.layers[layer.index], [1024]) for layer in layers)
            elements = sum(1024 * la.kv_heads * (la.k_dim + la.v_dim) for la in layers)
            done[name] = score.result()["kl"], 8 * bytes_ / elements
        return done[name]

    return get


@pytest.mark.parametrize("name", NAMES)
def test_beats_affine_rounding_of_as_many_bytes(measured, name):
    plain, most = measured(PLAIN[name])
    ours, bits = measured(name)
    assert bits < most
    assert ours < 0.8 * plain


@pytest.mark.parametrize("name", NAMES)
def test_a_cache_does_not_depend_on_chunks_and_can_be_trimmed(bundle, name):
    own = cache_plan(bundle, name).layers[2]
    keys, values = rows_of(100, 2), rows_of(100, 2, seed=1)
    once = fill(VeloxCache(own, "", 2), keys, values, [100])
    slowly = fill(VeloxCache(own, "", 2), keys, values, [50, *[1] * 50])
    for a, b in zip(everything(once), everything(slowly), strict=True):
        assert mx.allclose(a, b, atol=1e-4)
    kept = [a[:, :, :41] for a in everything(once)]
    once.trim(59)
    for a, b in zip(kept, everything(once), strict=True):
        assert mx.allclose(a, b, atol=1e-4)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kvquant:sinks=0", "keeps the first token exactly: sinks=0 is below 1"),
        ("svdq:bits=0.5", "0.5 bits for keys of 16 make no code"),
        ("palu:bits=0.5", "0.5 bits for keys of 16 make no code"),
        ("kitty:flush=0", "flush=0"),
        ("outliers:window=-1", "window=-1"),
    ],
)
def test_what_a_layer_cannot_have(bundle, text, said):
    layer = bundle.manifest.model.layers[0].model_copy(update={"k_dim": 16})
    with pytest.raises(RecipeError, match=said):
        recipes.parse(text).recipe.check(layer)


def test_a_missing_artifact_is_named(bundle):
    layers = tuple(bundle.manifest.model.layers)
    for name, kind in zip(NAMES, ("nuq", "lowrank", "lowrank", "kitty", "outliers"), strict=True):
        arts = {
            i: a for i, a in bundle.artifacts_for(bundle.cache_plan(name)).items() if a.kind != kind
        }
        with pytest.raises(RecipeError, match=f"lacks the artifact {kind} "):
            recipes.build(recipes.parse(name), name, "f", Shelf(layers, arts))
