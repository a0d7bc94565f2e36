"""VecInfer, CommVQ and RaBitQ as whole plans of the demo model."""

import mlx.core as mx
import pytest
from cache_support import everything, fill, rows_of

from velox_pack.caches import recipes
from velox_pack.caches.cache import VeloxCache
from velox_pack.caches.codecs.rope import BeforeRope
from velox_pack.caches.shelf import Shelf
from velox_pack.conversion import convert
from velox_pack.door import cache_plan
from velox_pack.evaluation import Score, one_pass
from velox_pack.loader import load_model
from velox_pack.manifests.bundle import open_bundle
from velox_pack.manifests.errors import RecipeError
from velox_pack.sizes import held

# Affine rounding of as many bytes or more, and the share of its KL that is allowed.
PLAIN = {
    "vecinfer:keys=1,values=1": ("affine:bits=2,flush=8", 0.95),  # half the bytes
    "commvq:keys=0.5": ("affine:bits=2,flush=8", 0.8),
    "rabitq": ("affine:bits=2,group=32,flush=8", 0.8),
    "rabitq:keys=2,values=2": ("affine:bits=2,flush=8", 0.5),
}
NAMES = list(PLAIN)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    out = tmp_path_factory.mktemp("vectors") / "bundle"
    caches = [*NAMES, *sorted({name for name, _ in PLAIN.values()})]
    return open_bundle(convert("demo", out, caches=caches, calibration_tokens=1024))


@pytest.fixture(scope="module")
def measured(bundle, heldout):
    """KL and bits per element of a plan; each is measured once."""
    model, _ = load_model(bundle, cache="none", dtype=mx.float32)
    layers, done, text = bundle.manifest.model.layers, {}, heldout[:256]
    exact = one_pass(model, text, layers, None)

    def get(name):
        if name not in done:
            plan, score = cache_plan(bundle, name), Score()
            score.add(exact, one_pass(model, text, layers, plan), text)
            bytes_ = sum(held(layer, plan.layers[layer.index], [1024]) for layer in layers)
            elements = sum(1024 * la.kv_heads * (la.k_dim + la.v_dim) for la in layers)
            done[name] = score.result()["kl"], 8 * bytes_ / elements
        return done[name]

    return get


@pytest.mark.parametrize("name", NAMES)
def test_beats_affine_rounding_of_as_many_bytes(measured, name):
    other, share = PLAIN[name]
    plain, most = measured(other)
    ours, bits = measured(name)
    assert bits < most
    assert ours < share * plain


@pytest.mark.parametrize("name", NAMES)
def test_a_cache_does_not_depend_on_chunks_and_can_be_trimmed(bundle, name):
    own = cache_plan(bundle, name).layers[2]
    assert type(own.keys) is BeforeRope
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
    ("text", "fields", "said"),
    [
        ("vecinfer:keys=1", {"k_dim": 20}, "1 bits for keys: 20 is no multiple of 8"),
        ("vecinfer:values=2", {"v_dim": 18}, "2 bits for values: 18 is no multiple of 4"),
        ("commvq:keys=0.5", {"k_dim": 16}, "0.5 bits for keys of 16: not one stage fits"),
        ("commvq", {"k_dim": 63}, "2 bits for keys of 63: not one stage fits"),
        ("vecinfer:flush=0", {}, "flush=0"),
        ("commvq:window=-1", {}, "window=-1"),
        ("rabitq:sinks=-1", {}, "sinks=-1"),
    ],
)
def test_what_a_layer_cannot_have(bundle, text, fields, said):
    layer = bundle.manifest.model.layers[0].model_copy(update=fields)
    with pytest.raises(RecipeError, match=said):
        recipes.parse(text).recipe.check(layer)


@pytest.mark.parametrize("dim", [16, 64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("text", ["vecinfer:keys=1,values=1", "vecinfer", "commvq", "rabitq"])
def test_head_dims_that_can_be_served(bundle, dim, text):
    sizes = {"k_dim": dim, "v_dim": dim}
    layer = bundle.manifest.model.layers[0].model_copy(update=sizes)
    recipes.parse(text).recipe.check(layer)


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_artifact_is_named(bundle, name):
    layers = tuple(bundle.manifest.model.layers)
    kind = name.split(":")[0]
    found = bundle.artifacts_for(bundle.cache_plan(name)).items()
    shelf = Shelf(layers, {i: a for i, a in found if a.kind != kind})
    with pytest.raises(RecipeError, match=f"lacks the artifact {kind} "):
        recipes.build(recipes.parse(name), name, "f", shelf)


def test_another_number_of_centroids_is_named(bundle):
    layers = tuple(bundle.manifest.model.layers)
    shelf = Shelf(layers, bundle.artifacts_for(bundle.cache_plan("rabitq")))
    with pytest.raises(RecipeError, match="rabitq for keys has 64 centroids, not 16"):
        recipes.build(recipes.parse("rabitq:centroids=16"), "r", "f", shelf)
