"""The command line: data on stdout, progress on stderr, exit codes, help."""

import json
import shutil
from pathlib import Path

import pytest

from commands import velox
from velox_pack import cli


@pytest.fixture
def bundle(demo_bundle: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(demo_bundle, tmp_path / "bundle"))


def test_convert_verify_inspect_eval_generate(tmp_path: Path) -> None:
    out = tmp_path / "b"
    done = velox(
        "convert", "demo", "--out", out, "--calibration-tokens", 1024, "--weights", "lloyd:bits=4",
        "--cache", "spectral:bits=3", "--cache", "affine",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert "42 of 42 linears packed" in done.out
    assert "6 of 6 layers" in done.out
    assert "capturing" in done.err
    assert "capturing" not in done.out
    done = velox("verify", out)
    assert (done.code, done.out.strip().rpartition(" ")[2]) == (0, "sound")
    done = velox("inspect", out, "--memory", "1GB")
    assert done.code == 0, done.err
    assert "spectral:bits=3" in done.out
    assert "context" in done.out
    done = velox("eval", out, "--tokens", 256, "--json")
    assert done.code == 0, done.err
    measured = json.loads(done.out)
    assert set(measured["caches"]) == {"spectral:bits=3", "affine"}
    assert velox("verify", out).code == 0
    done = velox("generate", out, "--prompt", "She opened the door, and", "--max-tokens", 12)
    assert done.code == 0, done.err
    assert len(done.out.split()) > 4


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_json_is_all_there_is_on_stdout(demo_bundle: Path, command: str) -> None:
    done = velox(command, demo_bundle, "--json")
    assert done.code == 0
    assert isinstance(json.loads(done.out), dict)


def test_recipes() -> None:
    rows = json.loads(velox("recipes", "--json").out)
    assert {"spectral", "affine", "turboquant-mse", "exact", "ratequant"} <= {
        row["name"] for row in rows
    }
    listed = velox("recipes").out
    assert all(row["name"] in listed for row in rows)


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    done = velox("convert", "demo", "--out", tmp_path / "b", "--dry-run", "--json")
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert told["done"] is False
    assert told["weight_bytes"] > 1e6
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_says_what_is_left_out_and_why(tiny_model, tmp_path: Path) -> None:
    source = tiny_model("gemma3_text")
    done = velox(
        "convert", source, "--out", tmp_path / "b", "--dry-run", "--cache", "affine:group=32"
    )
    assert done.code == 0, done.err
    assert "sliding window" in done.out
    assert "would write" in done.out


def test_a_damaged_bundle_exits_1_and_names_the_file(bundle: Path) -> None:
    weights = bundle / "model-00001-of-00001.safetensors"
    data = bytearray(weights.read_bytes())
    data[-100] ^= 1
    weights.write_bytes(data)
    done = velox("verify", bundle)
    assert done.code == 1
    assert weights.name in done.error
    told = json.loads(velox("verify", bundle, "--json").out)
    assert told["sound"] is False
    assert weights.name in told["problems"][0]


@pytest.mark.parametrize(
    "words",
    [
        ["convert", "demo"],
        ["convert"],
        ["nonsense"],
        ["inspect"],
        ["generate", "b"],
        ["generate", "b", "--prompt", "x", "--temp", "nan"],
        ["eval", "b", "--tokens", "none"],
        ["convert", "demo", "--out", "x", "--seed", "-1"],
        ["convert", "demo", "--out", ""],
        ["convert", "", "--out", "x"],
        ["convert", "demo", "--out", "x", "--calibration", " "],
        ["convert", "demo", "--out", "x", "--reuse", ""],
        ["inspect", ""],
        ["inspect", "b", "--plots", ""],
        ["verify", ""],
        ["eval", ""],
        ["eval", "b", "--text", ""],
        ["eval", "b", "--source", ""],
        ["generate", "", "--prompt", "x"],
    ],
)
def test_wrong_calls_exit_2(words: list[str]) -> None:
    done = velox(*words)
    assert done.code == 2
    assert done.out == ""


@pytest.mark.parametrize(
    ("text", "count"),
    [("16GB", 16e9), ("512M", 512e6), ("1.5g", 1.5e9), ("1000", 1000), ("2TB", 2e12)],
)
def test_sizes(text: str, count: float) -> None:
    assert cli._size(text) == count


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "16XB", "nan", "0"])
def test_what_is_no_size_is_told_in_one_line(demo_bundle: Path, text: str) -> None:
    done = velox("inspect", demo_bundle, "--memory", text)
    assert (done.code, done.err.count("\n")) == (1, 1)


def test_plans_that_are_prepared_only(tiny_model, tmp_path: Path) -> None:
    """`eval` names them on stdout; `generate` says what to do in the words of the command line."""
    source, out = tiny_model("llama"), tmp_path / "b"
    options = ["--calibration-tokens", 64, "--weights", "keep"]
    caches = ["--cache", "kivi-sink", "--cache", "affine:group=32"]
    assert velox("convert", source, "--out", out, *options, *caches).code == 0
    done = velox("eval", out, "--tokens", 32)
    assert "kivi-sink: not measured; cannot be loaded yet" in done.out
    assert "kivi-sink: not measured; cannot be loaded yet" in velox("inspect", out).out
    done = velox("generate", out, "--prompt", "x")
    assert done.code == 1
    assert "load with --cache none or another plan" in done.error
    assert velox("generate", out, "--prompt", "x", "--cache", "none", "--max-tokens", 2).code == 0


def test_help_and_version() -> None:
    assert velox("--version").out.startswith("velox-pack, version ")
    for command in cli.main.commands:
        assert velox(command, "--help").code == 0
        assert command in velox("--help").out
