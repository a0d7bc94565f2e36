"""All calibrations through `convert --cache`: artifacts stored once, reread as their kinds."""

from pathlib import Path

import pytest

import velox_pack
from velox_pack.caches import recipes
from velox_pack.caches.needs import Need
from velox_pack.conversion import convert
from velox_pack.evaluation import evaluate
from velox_pack.fits import FITS, Fit
from velox_pack.manifests.bundle import open_bundle, verify
from velox_pack.manifests.errors import CalibrationError, RecipeError

ALL = [row["name"] for row in recipes.describe() if row["name"] != recipes.RATEQUANT]
LATER = [row["name"] for row in recipes.describe() if not row["ready"]]
SMALL = {"calibration_tokens": 1024}


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo prepared for every recipe at once."""
    caches = [*dict.fromkeys(["spectral", *ALL]), "xquant:by=prediction",
              "ratequant+spectral:bits=2", "turboquant-mse:levels=rotated-unit"]  # fmt: skip
    return convert("demo", tmp_path_factory.mktemp("all") / "bundle", caches=caches, **SMALL)


@pytest.mark.parametrize("name", [row["name"] for row in recipes.describe()])
def test_every_need_has_a_fit(name: str) -> None:
    if name != recipes.RATEQUANT:
        assert all(need.name in FITS for need in recipes.parse(name).needs)


def test_every_artifact_opens_and_belongs_to_the_model(everything: Path) -> None:
    assert verify(everything) == []
    bundle = open_bundle(everything)
    for record in bundle.manifest.artifacts:
        artifact = bundle.artifact(record.id)
        assert artifact.kind == record.kind
        assert set(artifact.layers) <= set(range(6))
        assert record.fingerprint is not None


def test_what_plans_share_is_stored_once(everything: Path) -> None:
    manifest = open_bundle(everything).manifest
    plans = {plan.name: set(plan.artifacts) for plan in manifest.caches}
    assert "rabitq-values-centroids-64" in plans["commvq"] & plans["rabitq"]
    assert "spectral-keys" in plans["spectral"] & plans["ratequant+spectral:bits=2"]
    assert plans["spectral"] & plans["ratequant+spectral:bits=2"] >= {"rope-64", "rotation-64"}
    assert [a.kind for a in manifest.artifacts].count("spectral") == 1
    ids = {a.id for a in manifest.artifacts}
    assert ids == set().union(*plans.values()) | {"qfilters"}


@pytest.mark.parametrize("name", LATER)
def test_a_plan_without_a_codec_says_so(everything: Path, name: str) -> None:
    with pytest.raises(RecipeError, match=rf"^.*no (codec for|eviction by) {name} yet.*$"):
        velox_pack.load(everything, cache=name)


def test_other_plans_load_and_are_measured(everything: Path) -> None:
    model, _ = velox_pack.load(everything)
    assert len(model.make_cache()) == 6
    result = evaluate(everything, tokens=64, write=False)
    assert sorted(result["not_measured"]) == sorted([*LATER, "xquant:by=prediction"])
    exact_density = result["caches"]["turboquant-mse:levels=rotated-unit"]
    assert exact_density["kl_cache"] < 0.1


@pytest.mark.parametrize("order", [1, -1])
def test_plans_that_evict_differently_share_their_widths(
    tiny_model, tmp_path: Path, order: int
) -> None:
    caches = ["ratequant+spectral", "qfilters+ratequant+spectral", "adakv+ratequant+spectral"]
    options = {"calibration_tokens": 128, "caches": [*caches[::order], "spectral"]}
    out = convert(tiny_model("llama"), tmp_path / "b", **options)
    manifest = open_bundle(out).manifest
    kinds = [a.kind for a in manifest.artifacts]
    assert (kinds.count("widths"), kinds.count("allocation")) == (2, 1)
    own = {
        p.name: {i for i in p.artifacts if i.startswith(("wid", "all"))} for p in manifest.caches
    }
    assert all(own[name] == {"allocation-0", "widths-0"} for name in caches)
    assert own["spectral"] == {"widths-3"}
    model, _ = velox_pack.load(out, cache="ratequant+spectral")
    assert len(model.make_cache()) == len(manifest.model.layers)


def test_ids_say_which_part_is_meant(everything: Path) -> None:
    records = open_bundle(everything).manifest.artifacts
    for record in records:
        if (part := record.parameters.get("part")) is not None:
            assert part in record.id.split("-")
    ids = {record.id for record in records}
    assert {f"nuq-{p}-bits-3-outliers-0_01-window-28" for p in ("keys", "values")} <= ids
    assert {f"prediction-{p}-bits-2" for p in ("keys", "values")} <= ids


def test_needs_have_ids_that_bundles_allow() -> None:
    need = Need.of("nuq", bits=3, outliers=0.01)
    assert need.id == "nuq-bits-3-outliers-0_01"
    assert need == Need.of("nuq", outliers=0.01, bits=3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("vecinfer:keys=5", "vecinfer: keys=5 is not one of 1, 2, 3, 4"),
        ("commvq:keys=9", "commvq: keys=9 is not from 0.25 to 4"),
        ("rabitq:centroids=3", "rabitq: centroids=3 is not one of 1, 2, 4"),
        ("kvquant:outliers=0.5", "kvquant: outliers=0.5 is not from 0 to 0.1"),
        ("palu:window=999999999999", "window is above 1048576 tokens"),
        ("palu:ratio=0.25,bits=4", "bits=4 do not fit into 0.25 of the latents"),
        ("svdq:bits=nan", "svdq: bits=nan is not from 0.5 to 8"),
        ("turboquant-mse:levels=laplace", "levels=laplace is neither gaussian nor rotated-unit"),
    ],
)
def test_options_out_of_range(text: str, said: str) -> None:
    with pytest.raises(RecipeError) as caught:
        recipes.parse(text)
    assert said in str(caught.value)


def test_a_sample_too_small_for_a_codebook(tiny_model, tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match=r"^--cache vecinfer: .*more tokens"):
        convert(tiny_model("llama"), tmp_path / "b", caches=["vecinfer"], calibration_tokens=64)
    assert not list(tmp_path.iterdir())


def test_a_text_that_says_always_the_same(tmp_path: Path) -> None:
    text = tmp_path / "same.txt"
    text.write_text("a" * 20_000)
    with pytest.raises(CalibrationError, match=r"same.txt says always the same: .*more varied$"):
        convert("demo", tmp_path / "b", calibration=text, calibration_tokens=512)
    assert not (tmp_path / "b").exists()


def test_what_a_fit_refuses_names_all_recipes_that_want_it(
    tiny_model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise CalibrationError("no good")

    monkeypatch.setitem(FITS, "rabitq-values", Fit(fail))
    options = {"caches": ["spectral", "commvq:keys=1", "rabitq"], "calibration_tokens": 512}
    with pytest.raises(CalibrationError, match=r"^--cache commvq:keys=1 and rabitq: no good$"):
        convert(tiny_model("llama"), tmp_path / "b", **options)


def test_what_the_pass_refuses_is_no_recipes_fault(
    tiny_model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise CalibrationError("layer 1: activations hold NaN")

    monkeypatch.setattr("velox_pack.seen.capture", fail)
    with pytest.raises(CalibrationError, match=r"^layer 1: activations hold NaN$"):
        convert(tiny_model("llama"), tmp_path / "b", caches=["spectral"], calibration_tokens=64)
