"""Every kind of source: the demo, folders, repos of the Hub, and what travels from them."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import velox_pack
from commands import snapshot
from models import make_model
from velox_pack import job
from velox_pack.conversion import convert
from velox_pack.manifests.bundle import open_bundle, verify
from velox_pack.manifests.errors import RecipeError, SourceError
from velox_pack.manifests.names import CACHE_FILE
from velox_pack.source import resolve

FAST = {"caches": ["turboquant-mse"]}  # needs no calibration
CALIBRATED = {"calibration_tokens": 128}


def stored(bundle: Path) -> dict[str, mx.array]:
    """Parameters of a bundle by name, padding aside."""
    arrays = open_bundle(bundle).weights()
    return {n: a for n, a in arrays.items() if not n.startswith("__pad__.")}


def source_arrays(folder: Path) -> dict[str, mx.array]:
    return {n: a for f in folder.glob("*.safetensors") for n, a in mx.load(str(f)).items()}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shards", [1, 3])
def test_local_folders(tmp_path: Path, dtype: str, shards: int) -> None:
    source = make_model(tmp_path / "model", "qwen2", dtype=dtype, shards=shards)
    out = convert(source, tmp_path / "b", **FAST)
    manifest = open_bundle(out).manifest
    assert (manifest.source.kind, manifest.source.name) == ("local", "model")
    assert set(manifest.source.files) == {
        p.name for p in source.iterdir() if not p.name.endswith("index.json")
    }
    original, packed = source_arrays(source), stored(out)
    for name in ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.bias"):
        assert packed[name].dtype == original[name].dtype
        assert mx.array_equal(packed[name], original[name])
    assert packed["model.layers.0.self_attn.q_proj.codes"].dtype == mx.uint32
    assert verify(out) == []


def test_keep_copies_parameters_as_they_are(tiny_model, tmp_path: Path) -> None:
    source = tiny_model("mixtral", dtype="bfloat16", shards=2)
    out = convert(source, tmp_path / "b", weights="keep", **FAST)
    assert open_bundle(out).manifest.weights.packed == {}
    kept = stored(out)
    skeleton = resolve(str(source)).weights()
    assert kept.keys() == skeleton.keys()
    assert all(mx.array_equal(kept[n], a) and kept[n].dtype == a.dtype for n, a in skeleton.items())


@pytest.mark.parametrize("weights", [None, "lloyd:bits=2"])
def test_quantized_linears_stay_as_they_are(tmp_path: Path, weights: str | None) -> None:
    source = make_model(tmp_path / "q", "llama", quantize=(4, 32))
    planned = job.plan(source, tmp_path / "b", weights=weights, **FAST)
    said = "copied as they are, 22 modules of them" if weights is None else "0 of 21 linears packed"
    assert said in planned.summary()["coverage"]["weights"]
    out = convert(source, tmp_path / "b", weights=weights, caches=["spectral"], **CALIBRATED)
    original, kept = source_arrays(source), stored(out)
    assert kept.keys() == original.keys()
    assert all(mx.array_equal(kept[name], array) for name, array in original.items())
    assert json.loads((out / "config.json").read_text())["quantization"]["bits"] == 4
    assert open_bundle(out).manifest.weights.encoding == ("keep" if weights is None else "lloyd")


def test_hub_repos(hub, tiny_model, tmp_path: Path) -> None:
    old = hub.add("org/tiny", tiny_model("llama"), branch="v1")
    new = hub.add("org/tiny", tiny_model("llama", seed=1))
    for revision, commit in ((None, new), ("v1", old), (old, old)):
        out = tmp_path / str(revision)
        convert("org/tiny", out, revision=revision, **FAST)
        source = open_bundle(out).manifest.source
        assert (source.kind, source.repo, source.revision) == ("hub", "org/tiny", commit)
        assert source.name == "tiny"
    assert snapshot(tmp_path / "v1") == snapshot(tmp_path / old)
    assert "base_model: org/tiny\n" in (tmp_path / old / "README.md").read_text()


def test_overlays_store_no_parameters(hub, tiny_model, tmp_path: Path) -> None:
    commit = hub.add("org/tiny", tiny_model("llama", dtype="float32"))
    out = convert("org/tiny", tmp_path / "b", weights="overlay", caches=["spectral"], **CALIBRATED)
    manifest = open_bundle(out).manifest
    assert [n for n in manifest.files if n.endswith(".safetensors")] == [CACHE_FILE]
    assert (manifest.weights.encoding, manifest.source.revision) == ("overlay", commit)
    size = sum(a.nbytes for a in source_arrays(tiny_model("llama", dtype="float32")).values())
    assert manifest.weights.parameters == {"base_bytes": size}
    assert verify(out) == []


@pytest.mark.parametrize("where", ["local", "demo"])
def test_overlays_of_what_nobody_else_has_are_refused(tiny_model, tmp_path, where: str) -> None:
    source = "demo" if where == "demo" else tiny_model("llama")
    with pytest.raises(RecipeError, match="overlay needs a Hub repo"):
        convert(source, tmp_path / "b", weights="overlay")
    assert not list(tmp_path.iterdir())


def test_other_files_travel(own_model, tmp_path: Path) -> None:
    source = own_model("llama")
    (source / "LICENSE").write_text("as you like")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "generation_config.json").write_text('{"eos_token_id": [257, 258]}')
    (source / "README.md").write_text("---\nlicense: other\nlicense_link: LICENSE\n---\nA model.\n")
    (source / "train.py").write_text("raise SystemExit")
    out = convert(source, tmp_path / "b", **FAST)
    for name in ("LICENSE", "chat_template.jinja", "generation_config.json", "tokenizer.json"):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert not (out / "train.py").exists()
    assert 'license: "other"\nlicense_link: "LICENSE"\n' in (out / "README.md").read_text()
    config = json.loads((out / "config.json").read_text())
    assert config.pop("model_file") == "velox_model.py"
    assert config == json.loads((source / "config.json").read_text())
    _, tokenizer = velox_pack.load(out)
    assert tokenizer.eos_token_ids == {257, 258}


def test_a_file_name_that_no_bundle_takes_is_told_at_once(own_model, tmp_path: Path) -> None:
    source = own_model("llama")
    (source / "LICENSE (1)").write_text("as you like")
    with pytest.raises(SourceError, match=r"LICENSE .1.' is not a plain name"):
        job.plan(source, tmp_path / "b")


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"])
@pytest.mark.parametrize("options", [FAST, CALIBRATED], ids=["data-free", "calibrated"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_weight_that_is_not_finite_is_named(
    own_model, tmp_path: Path, name: str, options: dict[str, Any], value: float
) -> None:
    source = own_model("llama")
    arrays = {n: np.array(a) for n, a in mx.load(str(source / "model.safetensors")).items()}
    arrays[name][-1, -1] = value
    mx.save_safetensors(
        str(source / "model.safetensors"), {n: mx.array(a) for n, a in arrays.items()}
    )
    with pytest.raises(velox_pack.VeloxError, match=name):
        convert(source, tmp_path / "b", **options)
    assert [p.name for p in tmp_path.iterdir()] == ["llama"]
