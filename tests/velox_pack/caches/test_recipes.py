import dataclasses

import mlx.core as mx
import pytest
from cache_support import opened
from hypothesis import given
from hypothesis import strategies as st

from velox_pack.caches import recipes
from velox_pack.caches.codecs.rope import BeforeRope
from velox_pack.caches.codecs.rotated import Eigenbasis, LogNorm, PlainNorm, Structured
from velox_pack.caches.shelf import Shelf
from velox_pack.caches.workshop import Workshop
from velox_pack.manifests.artifacts import Codebook, Rope, Widths
from velox_pack.manifests.errors import RecipeError
from velox_pack.manifests.manifest import Layer


def layer(**fields):
    known = {
        "index": 0,
        "attention": "full",
        "heads": 4,
        "kv_heads": 2,
        "k_dim": 64,
        "v_dim": 64,
        "window": None,
        "rope": "rope",
        "routed": True,
        "covered": True,
        "cache_index": 0,
        "reason": None,
    }
    return Layer(**(known | fields))


def refused(function, *arguments):
    with pytest.raises(RecipeError) as caught:
        function(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("row", recipes.describe(), ids=lambda row: row["name"])
def test_every_recipe_is_described_and_has_a_canonical_form(row):
    assert row["about"]
    if row["name"] == "ratequant":
        return
    plan = recipes.parse(row["name"])
    assert recipes.parse(plan.canonical) == plan
    assert plan.canonical.startswith(row["name"])
    for key, default in row["options"].items():
        assert (f"{key}=" in plan.canonical) == (default is not None)


def test_canonical_text_does_not_depend_on_order_or_defaults():
    texts = ["spectral", "spectral:bits=3", "spectral:window=24,bits=3.0,sinks=4", " spectral "]
    assert len({recipes.parse(t).canonical for t in texts}) == 1
    assert recipes.parse("spectral").canonical == "spectral:bits=3,sinks=4,window=24,flush=8"
    with_rate = recipes.parse("ratequant+spectral:bits=2.5").canonical
    assert with_rate == "ratequant+spectral:bits=2.5,sinks=4,window=24,flush=8"
    assert recipes.parse("spectral+ratequant") == recipes.parse("ratequant+spectral")


@given(st.floats(0.5, 8), st.none() | st.floats(0.5, 8), st.integers(0, 99), st.integers(1, 99))
def test_any_options_round_trip(bits, keys, window, flush):
    options = [f"bits={bits!r}", f"window={window}", f"flush={flush}"]
    options += [] if keys is None else [f"keys={keys!r}"]
    plan = recipes.parse("spectral:" + ",".join(options))
    assert (plan.recipe.bits, plan.recipe.keys) == (bits, keys)
    assert recipes.parse(plan.canonical) == plan


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "spectre",
            "there are: exact, affine, turboquant-mse, spectral, joint-spectral, vecinfer,",
        ),
        ("spectral:bit=3", "it takes bits, keys, values, sinks, window, flush"),
        ("exact:bits=3", "it takes none"),
        ("spectral+affine", "give one of exact, affine"),
        ("ratequant", "give one of exact, affine"),
        ("ratequant+ratequant+spectral", "ratequant stands once"),
        ("ratequant:bits=3+spectral", "takes no options"),
        ("ratequant+affine", "affine has no bits that ratequant could spread"),
        ("spectral:bits=three", "spectral: bits=three is not float"),
        ("affine:bits=4.5", "affine: bits=4.5 is not int"),
    ],
)
def test_what_is_wrong_is_said(text, said):
    assert said in refused(recipes.parse, text)


@pytest.mark.parametrize(
    ("text", "fields", "said"),
    [
        ("spectral:bits=9", {}, "9 bits for keys of 64 dimensions; possible are 0.5 to 8"),
        ("spectral:values=0.4", {}, "0.4 bits for values of 64 dimensions; possible are 0.5 to 8"),
        ("spectral:bits=1", {"k_dim": 16}, "possible are 2 to 8"),
        ("spectral:bits=nan", {}, "nan bits"),
        ("turboquant-mse:bits=-inf", {}, "-inf bits"),
        ("spectral:window=-1", {}, "window=-1"),
        ("spectral:flush=0", {}, "flush=0"),
        ("affine:bits=7", {}, "bits=7 is not one of"),
        ("affine:group=64", {"k_dim": 96}, r"head dim 96; possible are [32]"),
        ("affine:axis=channel", {"v_dim": 80}, "head dim 80; possible are [32]"),
        ("affine:axis=channel,flush=8", {}, "flush=8 is not a multiple of the codec's group of 64"),
        ("affine:axis=rows", {}, "neither token nor channel"),
    ],
)
def test_what_a_layer_cannot_have_is_said_before_anything_is_read(text, fields, said):
    plan = recipes.parse(text)
    assert said in refused(plan.recipe.check, layer(**fields))


@pytest.mark.parametrize("dim", [16, 64, 80, 96, 112, 128, 256])
@pytest.mark.parametrize(
    "text", ["exact", "turboquant-mse:bits=3", "spectral:bits=3", "joint-spectral"]
)
def test_head_dims_that_can_be_served(dim, text):
    recipes.parse(text).recipe.check(layer(k_dim=dim, v_dim=dim))


def test_built_from_artifacts(demo):
    plan = demo.plan("spectral:bits=3,keys=4")
    assert sorted(plan.layers) == list(range(6))
    own = plan.layers[2]
    assert (own.sinks, own.window, own.flush, own.routed) == (4, 24, 8, True)
    assert type(own.keys) is BeforeRope
    keys, values = own.keys.inner, own.values
    assert (type(keys.turn), type(keys.norm)) == (Eigenbasis, LogNorm)
    assert (type(values.turn), type(values.norm)) == (Structured, LogNorm)
    assert (sum(keys.widths), sum(values.widths)) == (4 * 64, 3 * 64)
    assert max(keys.widths) > 4 > min(keys.widths)
    turbo = demo.plan("turboquant-mse:bits=2").layers[0]
    assert type(turbo.keys.norm) is PlainNorm
    assert turbo.keys.mean is None


def test_constants_are_counted_once(demo):
    plan = demo.plan("spectral:bits=3")
    plan.layers[0].keys.table.at(0, 10)
    names = [tuple(a.shape) for a in plan.constants()]
    assert len(names) == len({id(a) for a in plan.constants()})
    assert names.count((511,)) == 2  # levels and edges, of all layers together
    assert names.count((2048, 32)) == 2  # one RoPE table
    assert names.count((2, 64, 64)) == 6  # a basis for each layer


def test_a_missing_artifact_is_named_with_the_cure(demo):
    plan = recipes.parse("spectral:bits=3")

    message = refused(recipes.build, plan, "p", "f", Shelf(demo.layers, demo.artifacts))
    assert "lacks the artifact widths" in message
    assert "convert again" in message
    assert f"plan={plan.canonical}" in message
    assert "lacks the artifact codebook (distribution=gaussian)" in refused(
        Workshop(Shelf(demo.layers, {}), "").levels
    )


def test_keys_before_rope_need_a_rope(demo):
    """Taking them for keys after RoPE would go wrong without a word."""
    shelf = Shelf(tuple(la.model_copy(update={"rope": None}) for la in demo.layers), demo.artifacts)
    shop = Workshop(shelf, "")
    message = refused(shop.before_rope, shelf.layers[3], None)
    assert "layer 3" in message
    assert "no rope" in message
    shelf = Shelf(demo.layers, {k: a for k, a in demo.artifacts.items() if not isinstance(a, Rope)})
    assert "lacks the artifact rope for layer 3" in refused(
        Workshop(shelf, "").before_rope, shelf.layers[3], None
    )


def test_a_codebook_without_all_widths_is_refused(demo):
    book = next(a for a in demo.artifacts.values() if isinstance(a, Codebook))
    some = dataclasses.replace(book, levels={b: book.levels[b] for b in (2, 3)})
    shop = Workshop(Shelf(demo.layers, {"codebook": some}), "")
    assert "lacks the levels for [1, 4, 5, 6, 7, 8] bits" in refused(shop.levels)


def test_widths_of_another_size_are_refused(demo):
    """A bundle can say what it likes: tables are read without bounds."""
    plan = recipes.parse("turboquant-mse:bits=2")
    for width, columns in ((2, 32), (9, 64)):
        rows = mx.full((6, columns), width, mx.uint8)
        wrong = Widths(plan.canonical, 2.0, rows, rows, layers=tuple(range(6)))
        shelf = Shelf(demo.layers, demo.artifacts | {"widths": wrong})
        assert "widths" in refused(recipes.build, plan, "p", "f", shelf)


def test_layers_that_are_not_covered_get_no_plan(tiny):
    assert list(tiny("gemma3_text").plan("spectral:bits=3").layers) == [5]


def test_opened_artifacts_are_lazy_arrays(demo):
    book = next(a for a in demo.artifacts.values() if isinstance(a, Codebook))
    assert all(isinstance(a, mx.array) for a in opened(book).levels.values())
