"""Bad input of every kind a user may bring: one clear line, exit code 1, nothing left behind."""

import json
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from commands import velox
from models import edit_config

ENOUGH = ["--calibration-tokens", "64", "--cache", "turboquant-mse"]


def refused(out: Path, *words: object) -> str:
    """Run a command that must fail in one line, and give the line back."""
    done = velox(*words)
    assert done.code == 1, (done.out, done.err)
    assert done.error.startswith("velox-pack: ")
    assert "Traceback" not in done.err
    assert sum(line.startswith("velox-pack: ") for line in done.err.splitlines()) == 1
    assert not out.exists()
    assert [p.name for p in out.parent.iterdir() if p.name.startswith(f".{out.name}")] == []
    return done.error


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "made"
    folder.mkdir()
    return folder / "bundle"


def test_no_such_repo(hub, out: Path) -> None:
    assert "nobody/nothing" in refused(out, "convert", "nobody/nothing", "--out", out)


def test_a_gated_repo(hub, tiny_model, out: Path) -> None:
    hub.add("me/gated", tiny_model("llama"), gated=True)
    line = refused(out, "convert", "me/gated", "--out", out)
    assert "gated" in line
    assert "me/gated" in line


def test_no_network(hub, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    refused(out, "convert", "me/model", "--out", out)


def test_not_a_causal_model(own_model, out: Path) -> None:
    folder = own_model("llama")
    edit_config(folder, model_type="bert", architectures=["BertModel"])
    assert "not a causal language model" in refused(out, "convert", folder, "--out", out)


def test_an_architecture_with_nothing_to_handle(tiny_model, out: Path) -> None:
    line = refused(out, "convert", tiny_model("deepseek_v3"), "--out", out)
    assert "latent attention" in line


def test_nan_in_the_weights(own_model, out: Path) -> None:
    folder = own_model("llama")
    file = folder / "model.safetensors"
    weights = dict(mx.load(str(file)).items())
    name = "model.layers.1.mlp.down_proj.weight"
    array = mx.array(weights[name])
    array[0, 0] = mx.nan
    mx.eval(array, weights)
    mx.save_safetensors(str(file), weights | {name: array}, {"format": "mlx"})
    assert name in refused(out, "convert", folder, "--out", out, *ENOUGH)


def test_a_truncated_shard(own_model, out: Path) -> None:
    folder = own_model("llama")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    line = refused(out, "convert", folder, "--out", out)
    assert "model.safetensors" in line


def test_a_disk_too_small(tiny_model, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 10**6 - 1000, 1000))
    line = refused(out, "convert", tiny_model("llama"), "--out", out, *ENOUGH)
    assert "1000" in line or "kB" in line or "bytes" in line


def test_the_destination_exists(tmp_path: Path) -> None:
    done = velox("convert", "demo", "--out", tmp_path)
    assert done.code == 1
    assert "--overwrite" in done.error


@pytest.mark.parametrize(
    ("option", "text", "said"),
    [
        ("--cache", "nothing", "spectral"),
        ("--cache", "spectral:bit=3", "bits"),
        ("--cache", "spectral:bits=9", "8"),
        ("--cache", "spectral:bits=x", "bits=x"),
        ("--cache", "affine:group=48", "32"),
        ("--cache", "spectral+affine", "one of"),
        ("--weights", "int4", "lloyd"),
        ("--weights", "lloyd:bits=9", "9"),
        ("--weights", "overlay", "keep"),
    ],
)
def test_recipes_and_encodings(out: Path, option: str, text: str, said: str) -> None:
    assert said in refused(out, "convert", "demo", "--out", out, option, text)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such file"),
        (b"", "empty"),
        (b"\x00\x01\xff" * 4000, "binary"),
        (b"too short", "too short"),
        (b"one word and again " * 200, "tokens"),
    ],
)
def test_calibration_texts(out: Path, tmp_path: Path, content: bytes | None, said: str) -> None:
    file = tmp_path / "text.txt"
    if content is not None:
        file.write_bytes(content)
    assert said in refused(out, "convert", "demo", "--out", out, "--calibration", file)


def test_a_folder_that_is_no_bundle(tmp_path: Path) -> None:
    for command in ("inspect", "verify", "eval"):
        done = velox(command, tmp_path)
        assert done.code == 1
        assert "velox.json" in done.error


def _manifest(bundle: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((bundle / "velox.json").read_text())
    return found


def _newer(m: dict[str, Any]) -> None:
    m["version"] = [2, 0]


def _outside(m: dict[str, Any]) -> None:
    m["files"]["../outside"] = {"bytes": 1, "sha256": "0" * 64, "optional": False}


def _liar(m: dict[str, Any]) -> None:
    m["files"]["config.json"]["bytes"] += 1


@pytest.mark.parametrize(
    ("change", "said"), [(_newer, "upgrade"), (_outside, "outside"), (_liar, "config.json")]
)
@pytest.mark.parametrize("command", ["inspect", "verify", "eval", "generate"])
def test_manifests(demo_bundle: Path, tmp_path: Path, change: Any, said: str, command: str) -> None:
    bundle = Path(shutil.copytree(demo_bundle, tmp_path / "bundle"))
    manifest = _manifest(bundle)
    change(manifest)
    (bundle / "velox.json").write_text(json.dumps(manifest))
    done = velox(command, bundle, *(["--prompt", "x"] if command == "generate" else []))
    assert done.code == 1
    assert said in done.error
    assert "Traceback" not in done.err


def test_tensors_that_overlap(demo_bundle: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(demo_bundle, tmp_path / "bundle"))
    file = bundle / "model-00001-of-00001.safetensors"
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    names = [n for n in header if n.endswith(".codes")][:2]
    header[names[0]]["data_offsets"] = header[names[1]]["data_offsets"]
    text = json.dumps(header).encode()
    assert len(text) <= size
    file.write_bytes(data[:8] + text.ljust(size) + data[8 + size :])
    for command in ("verify", "inspect", "eval"):
        done = velox(command, bundle)
        assert done.code == 1
        assert file.name in done.error


def test_an_unknown_plan_lists_those_there_are(demo_bundle: Path) -> None:
    done = velox("generate", demo_bundle, "--prompt", "x", "--cache", "nothing")
    assert done.code == 1
    assert "ratequant+joint-spectral" in done.error


def test_a_local_source_that_is_gone(own_model, tmp_path: Path) -> None:
    source = own_model("llama")
    out = tmp_path / "bundle"
    assert velox("convert", source, "--out", out, *ENOUGH).code == 0
    source.rename(tmp_path / "moved")
    done = velox("eval", out, "--tokens", "32")
    assert done.code == 1
    assert "--source" in done.error
    done = velox("eval", out, "--tokens", "32", "--source", tmp_path / "moved")
    assert done.code == 0, done.err


def test_debug_shows_where_it_came_from(tmp_path: Path) -> None:
    from velox_pack.manifests.errors import BundleError

    with pytest.raises(BundleError):
        velox("inspect", tmp_path / "nothing", "--debug")
