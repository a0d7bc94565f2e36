"""What a conversion is refused for before any work, in a dry run too."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from commands import velox
from models import write_tokenizer
from velox_pack.caches import recipes
from velox_pack.calibrators.gradients import backward
from velox_pack.calibrators.stream import StreamingForward
from velox_pack.calibrators.trace import trace
from velox_pack.job import plan
from velox_pack.manifests.errors import CalibrationError
from velox_pack.rehearsal import Rehearsed, rehearse
from zoo import BASE, CONFIGS, build, draw


def refused(out: Path, source: str | Path = "demo", **options: Any) -> str:
    with pytest.raises(CalibrationError) as caught:
        plan(source, out / "b", **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


# --- sequences too short for a window ------------------------------------------------------------

BEHIND = ["palu", "joint-spectral", "kvquant", "ratequant+spectral"]


@pytest.mark.parametrize("name", BEHIND)
def test_a_window_that_sequences_do_not_reach_behind(tmp_path: Path, name: str) -> None:
    told = refused(tmp_path, caches=["affine", f"{name}:window=500"])
    assert f"--cache {name}:window=500 needs calibration sequences of at least 528 tokens" in told
    assert told.endswith("these have 512; take a smaller window")  # more tokens would not help
    told = refused(tmp_path, caches=[name], calibration_tokens=32)
    assert told.endswith("these have 32; give more --calibration-tokens or take a smaller window")
    assert plan("demo", tmp_path / "b", caches=[f"{name}:window=400"])
    assert plan("demo", tmp_path / "b", caches=[name], calibration_tokens=64)


def test_windows_of_plans_without_sensitivities_do_not_matter(tmp_path: Path) -> None:
    assert plan("demo", tmp_path / "b", caches=["spectral:window=5000", "vecinfer:window=5000"])


def test_a_dry_run_refuses_a_window_too(tmp_path: Path) -> None:
    done = velox(
        "convert", "demo", "--out", tmp_path / "b", "--dry-run",
        "--cache", "joint-spectral:window=600",
    )  # fmt: skip
    assert (done.code, done.out) == (1, "")
    assert "628" in done.error


@pytest.mark.parametrize("row", recipes.describe(), ids=lambda row: row["name"])
def test_the_window_of_a_plan_is_that_of_its_needs(row: dict[str, Any]) -> None:
    if row["name"] == recipes.RATEQUANT:
        return
    found = recipes.parse(row["name"])
    asked = [value for n in found.needs for key, value in n.options if key == "window"]
    assert (found.behind is None) == (not asked)
    assert set(asked) <= {found.behind}


# --- more tokens than there are ------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [10**6, 10**12, 10**40])
def test_more_tokens_than_the_text_holds(tmp_path: Path, tokens: int) -> None:
    told = refused(tmp_path, calibration_tokens=tokens)
    assert told.startswith(f"the built-in text is too short for {tokens:,} tokens")
    assert "it holds about 2" in told
    assert "fewer --calibration-tokens" in told


def test_more_tokens_than_a_text_of_ones_own_holds(tmp_path: Path) -> None:
    (tmp_path / "my.txt").write_text("It was a bright cold day in April. " * 100)
    told = refused(tmp_path, calibration=tmp_path / "my.txt", calibration_tokens=3000)
    assert told.startswith("calibration text my.txt is too short for 3,000 tokens in sequences")
    done = velox(
        "convert", "demo", "--out", tmp_path / "b", "--dry-run", "--calibration-tokens", 10**12
    )
    assert done.code == 1
    assert "1,000,000,000,000" in done.error


# --- passes that the model does not allow --------------------------------------------------------


def in_zoo(folder: Path, architecture: str) -> Path:
    folder.mkdir()
    config = BASE | {"model_type": architecture, "architectures": ["XForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config | CONFIGS[architecture]))
    write_tokenizer(folder)
    mx.save_safetensors(str(folder / "model.safetensors"), draw(build(architecture)))
    return folder


@pytest.mark.parametrize("architecture", sorted(CONFIGS))
def test_what_is_known_of_each_architecture(architecture: str) -> None:
    """Of all others, nothing is known to speak against a pass."""
    known = {
        "gemma3n": Rehearsed(
            "layer 0 takes activations with axes [2, 2, 13, 64]",
            "layer 0 takes more than one activation",
        ),
        "gemma4_text": Rehearsed(None, "layer 0 takes more than one activation"),
        "hunyuan": Rehearsed(None, "layer 0 hands on more than one activation"),
        "rwkv7": Rehearsed(None, "layer 0 hands on more than one activation"),
    }
    model = build(architecture)
    assert rehearse(model) == known.get(architecture, Rehearsed())
    assert [type(layer).__call__.__name__ for layer in model.layers[:1]] == ["__call__"]


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "jamba", "hunyuan", "gemma4_text"])
def test_what_is_known_is_what_the_pass_itself_finds(architecture: str) -> None:
    weights = draw(build(architecture))
    streaming = StreamingForward(build(architecture), lambda: dict(weights))
    tokens = np.zeros((2, 32), np.int32)
    known = rehearse(build(architecture)).backward
    with pytest.raises(CalibrationError, match="more than one") if known else nullcontext():
        backward(streaming, tokens, trace(build(architecture)), lambda found: None)


def test_sensitivities_that_cannot_be_found_are_told_first(tmp_path: Path) -> None:
    source = in_zoo(tmp_path / "hunyuan", "hunyuan")
    options: dict[str, Any] = {"source": source, "calibration_tokens": 64, "weights": "keep"}
    told = refused(tmp_path, **options)
    assert told.startswith("--cache ratequant+joint-spectral needs sensitivities")
    assert told.endswith("in hunyuan: layer 0 hands on more than one activation; "
                         "take --cache spectral")  # fmt: skip
    assert "take --cache spectral" in refused(tmp_path, caches=["kvquant"], **options)
    options.pop("source")
    assert plan(source, tmp_path / "b", caches=["spectral"], **options)


def test_a_model_that_cannot_be_streamed_is_told_first(tmp_path: Path) -> None:
    source = in_zoo(tmp_path / "gemma3n", "gemma3n")
    options: dict[str, Any] = {"calibration_tokens": 64, "weights": "keep"}
    told = refused(tmp_path, source, caches=["spectral:keys=4,values=4"], **options)
    assert "nothing can be calibrated on a text" in told
    assert plan(source, tmp_path / "b", caches=["turboquant-mse"], weights="keep")


# --- a default that cannot be loaded -------------------------------------------------------------


def test_a_default_that_is_prepared_only_is_warned_of(tmp_path: Path) -> None:
    words = ["convert", "demo", "--out", tmp_path / "b", "--dry-run", "--cache"]
    done = velox(*words, "kivi-sink", "--cache", "affine")
    assert done.code == 0
    assert "warning: the default cache kivi-sink is prepared only (no codec for " in done.err
    assert "warning" not in velox(*words, "affine", "--cache", "kivi-sink").err
    told = json.loads(velox(*words, "qfilters+affine", "--json").out)
    assert [line.split("(")[1][:23] for line in told["warnings"]] == ["no eviction by qfilters"]
