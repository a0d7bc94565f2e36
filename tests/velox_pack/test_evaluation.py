"""Evaluation: exact ways measure nothing, results land where they belong, and the default wins."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

from velox_pack import convert, evaluate, evaluation, load, verify
from velox_pack.door import cache_plan
from velox_pack.evaluation import Score, one_pass
from velox_pack.manifests.bundle import open_bundle
from velox_pack.manifests.errors import BundleError, CalibrationError, SourceError
from velox_pack.source import data_folder


@pytest.fixture
def bundle(demo_bundle: Path, tmp_path: Path) -> Path:
    """A copy of the demo's bundle, to write to."""
    return Path(shutil.copytree(demo_bundle, tmp_path / "bundle"))


AFFINE = "affine:bits=4,group=64,sinks=0,window=0,flush=1"  # as mlx-lm's own quantized cache


@pytest.fixture(scope="session")
def control(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The demo with its own weights, an exact cache and mlx's 4 bits."""
    out = tmp_path_factory.mktemp("control") / "b"
    convert("demo", out, weights="keep", caches=[AFFINE, "exact"])
    return evaluate(out, tokens=256)


def test_kept_weights_and_exact_caches_are_the_source(control: dict[str, Any]) -> None:
    source, weights, exact = control["source"], control["weights"], control["caches"]["exact"]
    for row in (weights, exact):
        assert abs(row["kl"]) < 1e-5
        assert row["top1_agreement"] > 0.995
        assert row["perplexity"] == pytest.approx(source["perplexity"], rel=1e-4)
    assert exact["bits_per_element"] == 16


def test_the_default_recipe_beats_affine_rounding_at_fewer_bits(
    demo_bundle: Path, control: dict[str, Any]
) -> None:
    (ours,) = evaluate(demo_bundle, tokens=256, write=False)["caches"].values()
    affine = control["caches"][AFFINE]
    assert ours["bits_per_element"] < 3.4
    assert ours["state_bytes"] < 0.23 * ours["plain_bytes"]
    assert affine["bits_per_element"] == pytest.approx(4.5, abs=0.01)
    assert 0 < ours["kl_cache"] < 0.8 * affine["kl_cache"]
    assert affine["kl"] == pytest.approx(affine["kl_cache"], rel=0.01)  # its weights are exact


def test_results_land_in_manifest_and_card(bundle: Path) -> None:
    before = open_bundle(bundle)
    card = (bundle / "README.md").read_text()
    files = {p.name: p.read_bytes() for p in bundle.iterdir()}
    result = evaluate(bundle, tokens=32)
    after = open_bundle(bundle)
    assert after.manifest.measured == json.loads(json.dumps(result))
    assert after.fingerprint == before.fingerprint
    assert verify(bundle) == []
    changed = {p.name for p in bundle.iterdir() if files.get(p.name) != p.read_bytes()}
    assert changed == {"velox.json", "README.md"}
    new = (bundle / "README.md").read_text()
    assert f"| {result['source']['perplexity']:.2f} |" in new
    assert new.startswith(card.partition("<!-- velox-pack eval -->")[0])
    again = evaluate(bundle, tokens=16)
    assert (bundle / "README.md").read_text().count("| source |") == 1
    assert open_bundle(bundle).manifest.measured["tokens"] == again["tokens"] == 16  # type: ignore[index]


def test_what_is_measured(bundle: Path) -> None:
    result = evaluate(bundle, tokens=100, write=False)
    assert open_bundle(bundle).manifest.measured is None
    assert (result["tokens"], result["window"], result["tokens_held"]) == (100, 100, 2048)
    assert result["load_seconds"] > 0
    for row in (result["weights"], *result["caches"].values()):
        assert row["kl"] >= 0
        assert 0 <= row["top1_agreement"] <= 1
        assert row["perplexity"] > 1
    (cache,) = result["caches"].values()
    held = 2 * 2048 * 6 * 2 * (64 + 64)
    assert cache["plain_bytes"] == held
    assert cache["bits_per_element"] == pytest.approx(16 * cache["state_bytes"] / held)
    assert cache["bytes_per_token"] == cache["state_bytes"] / 2048


def test_scores_are_what_they_say() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 7, 11))
    targets = rng.integers(0, 11, 7)
    score = Score()
    score.add(mx.array(a, mx.float32), mx.array(b, mx.float32), mx.array(targets))
    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (a, b))
    found = score.result()
    assert found["kl"] == pytest.approx((p * np.log(p / q)).sum(-1).mean(), rel=1e-4)
    assert found["top1_agreement"] == pytest.approx(np.mean(a.argmax(-1) == b.argmax(-1)))
    likelihood = np.log(q[np.arange(6), targets[1:]])
    assert found["perplexity"] == pytest.approx(np.exp(-likelihood.mean()), rel=1e-4)


def test_one_pass_is_decoding(demo_bundle: Path) -> None:
    """The logits that are scored are those that decoding with the bundle's caches leaves."""
    model, tokenizer = load(demo_bundle, dtype=mx.float32)
    bundle = open_bundle(demo_bundle)
    text = (data_folder() / "text" / "heldout.txt").read_text()
    tokens = mx.array(tokenizer.encode(text[:400])[:60])
    layers = tuple(bundle.manifest.model.layers)
    found = np.array(one_pass(model, tokens, layers, cache_plan(bundle, None)))
    caches, rows = model.make_cache(), []
    for token in tokens:
        rows.append(model(token[None, None], cache=caches)[0, 0])
        mx.eval(rows[-1])
    decoded = np.array(mx.stack(rows))
    assert np.abs(found - decoded).max() < 1e-3
    plain = np.array(model(tokens[None], cache=[KVCache() for _ in layers])[0])
    assert np.abs(found - plain)[40:].max() > 0.05  # the premise: codes do change something


def test_hybrid_models(tiny_model, tmp_path: Path) -> None:
    source = tiny_model("gemma3_text", dtype="float32")
    out = convert(source, tmp_path / "b", weights="keep", caches=["turboquant-mse", "exact"])
    result = evaluate(out, tokens=96)
    assert abs(result["weights"]["kl"]) < 1e-5
    assert abs(result["caches"]["exact"]["kl"]) < 1e-5
    assert 1e-5 < result["caches"]["turboquant-mse"]["kl"] < 0.5
    # Only the full layer is counted: one KV head of 64.
    assert result["caches"]["exact"]["plain_bytes"] == 2 * 2048 * 2 * 64


def test_a_model_with_few_positions(tiny_model, tmp_path: Path) -> None:
    out = convert(tiny_model("gpt2"), tmp_path / "b", weights="keep", caches=["exact"])
    result = evaluate(out, tokens=256)
    assert (result["tokens"], result["window"]) == (256, 128)
    assert np.isfinite(result["source"]["perplexity"])


def test_a_text_of_ones_own(bundle: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.txt"
    file.write_text("It is a truth that tests need words of many kinds. " * 60)
    before = (bundle / "velox.json").read_bytes()
    assert evaluate(bundle, text=file, tokens=16, write=False)["text"] == "own.txt"
    assert (bundle / "velox.json").read_bytes() == before


# --- what is told before the work ----------------------------------------------------------------


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "_source_model", lambda *args: pytest.fail("work was done"))


@pytest.mark.usefixtures("no_work")
def test_unusable_text_is_told_first(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "binary.txt").write_bytes(b"\0\xff" * 2000)
    (tmp_path / "short.txt").write_text("word " * 500)
    for name, said in [
        ("nowhere.txt", "no such file"),
        ("empty.txt", "is empty"),
        ("binary.txt", "is binary"),
    ]:
        with pytest.raises(CalibrationError, match=rf"^text .*{name}:? {said}"):
            evaluate(bundle, text=tmp_path / name)
    with pytest.raises(CalibrationError, match=r"the text is too short.*see --text and --tokens"):
        evaluate(bundle, text=tmp_path / "short.txt")
    with pytest.raises(CalibrationError, match=r"too short for 1,0.* see --text and --tokens$"):
        evaluate(bundle, tokens=10**12)
    with pytest.raises(CalibrationError, match="at least 2"):
        evaluate(bundle, tokens=1)


@pytest.mark.usefixtures("no_work")
def test_a_bundle_that_cannot_be_written_is_told_first(bundle: Path, monkeypatch) -> None:
    monkeypatch.setattr(os, "access", lambda *args: False)
    with pytest.raises(BundleError, match="cannot be written to"):
        evaluate(bundle, tokens=32)


@pytest.mark.usefixtures("no_work")
def test_a_missing_source_is_told_first(own_model, tmp_path: Path) -> None:
    source = own_model("llama")
    out = convert(source, tmp_path / "b", caches=["exact"])
    source.rename(tmp_path / "moved")
    with pytest.raises(SourceError, match="not known here; pass it as --source"):
        evaluate(out)


def test_a_moved_source_can_be_named(own_model, tmp_path: Path) -> None:
    source = own_model("llama", dtype="float32")
    out = convert(source, tmp_path / "b", caches=["exact"], weights="keep")
    source.rename(tmp_path / "moved")
    assert abs(evaluate(out, source=tmp_path / "moved", tokens=64)["weights"]["kl"]) < 1e-5


def test_an_edited_card_stays_as_it_is(bundle: Path) -> None:
    (bundle / "README.md").write_text("# Mine\n")
    result = evaluate(bundle, tokens=8)
    assert (bundle / "README.md").read_text() == "# Mine\n"
    (bundle / "README.md").unlink()
    assert evaluation._card(open_bundle(bundle), result) == {}
    assert verify(bundle) == []
