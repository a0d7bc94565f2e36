"""The door: mlx-lm's own tools open a bundle, and only when told to trust its Python file."""

import fnmatch
import os
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache

import velox_pack
from velox_pack import convert
from velox_pack.caches.cache import VeloxCache
from velox_pack.door import DOOR

PROMPT = "She opened the door"
FAST = {"caches": ["turboquant-mse:bits=4"]}
# What mlx-lm 0.32.2 downloads of a repo (mlx_lm.utils._download).
MLX_LM_PATTERNS = [
    "*.json", "model*.safetensors", "*.py", "tokenizer.model", "*.tiktoken", "tiktoken.model",
    "*.txt", "*.jsonl", "*.jinja",
]  # fmt: skip


def logits(model: object, tokens: mx.array) -> np.ndarray:
    return np.array(model(tokens[None])[0].astype(mx.float32))  # type: ignore[operator]


def opened(bundle: Path) -> tuple[object, object]:
    return mlx_lm.load(str(bundle), tokenizer_config={}, trust_remote_code=True)


def test_mlx_lm_loads_the_same_model(demo_bundle: Path) -> None:
    theirs, tokenizer = opened(demo_bundle)
    ours, _ = velox_pack.load(demo_bundle)
    tokens = mx.array(tokenizer.encode("She opened the door, and the cold came in with the dog."))
    assert np.array_equal(logits(theirs, tokens), logits(ours, tokens))
    caches = make_prompt_cache(theirs)
    assert [type(c) for c in caches] == [VeloxCache] * 6
    assert caches[0].fingerprint == ours.make_cache()[0].fingerprint
    prompt = "It was a dark night. " * 10  # longer than the window: codes are used
    texts = [
        mlx_lm.generate(model, tokenizer, prompt=prompt, max_tokens=8) for model in (theirs, ours)
    ]
    assert texts[0] == texts[1]


def test_mlx_lm_refuses_without_the_flag(demo_bundle: Path) -> None:
    with pytest.raises(ValueError, match="Pass trust_remote_code=True"):
        mlx_lm.load(str(demo_bundle))


def test_the_stock_command(demo_bundle: Path, tmp_path: Path) -> None:
    """From another folder, in a process that knows velox-pack only as an installed package."""
    arguments = [
        "--model",
        str(demo_bundle),
        "--prompt",
        "She opened the door",
        "--max-tokens",
        "8",
    ]
    command = [sys.executable, "-m", "mlx_lm.generate", *arguments, "--trust-remote-code"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "Generation: 8 tokens" in done.stdout
    text = done.stdout.split("==========")[1].strip()
    assert text
    model, tokenizer = velox_pack.load(demo_bundle)
    assert mlx_lm.generate(model, tokenizer, prompt=PROMPT, max_tokens=8).strip() == text


def test_what_mlx_lm_downloads_is_enough(own_model, tmp_path: Path) -> None:
    """A LICENSE, a card or a plot stays behind: the bundle must open without them."""
    source = own_model("llama")
    (source / "LICENSE").write_text("as you like")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    out = convert(source, tmp_path / "b", **FAST)
    for file in out.iterdir():
        if not any(fnmatch.fnmatch(file.name, pattern) for pattern in MLX_LM_PATTERNS):
            file.unlink()
    assert not (out / "LICENSE").exists()
    assert not (out / "README.md").exists()
    model, _ = opened(out)
    assert isinstance(make_prompt_cache(model)[0], VeloxCache)
    assert velox_pack.verify(out) == []


def test_a_snapshot_of_the_hub_is_a_folder_of_links(demo_bundle: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--me--demo" / "snapshots" / "abc"
    blobs = snapshot.parents[1] / "blobs"
    snapshot.mkdir(parents=True)
    shutil.copytree(demo_bundle, blobs)
    for blob in list(blobs.iterdir()):
        blob.rename(blobs / f"0{blob.name}")
        (snapshot / blob.name).symlink_to(os.path.join("..", "..", "blobs", f"0{blob.name}"))
    model, _ = opened(snapshot)
    assert isinstance(make_prompt_cache(model)[0], VeloxCache)


def test_the_door_is_a_few_lines(demo_bundle: Path) -> None:
    assert (demo_bundle / "velox_model.py").read_text() == DOOR
    assert len(DOOR.splitlines()) < 10


@pytest.mark.parametrize("architecture", ["gemma3_text", "mixtral"])
def test_other_architectures(tiny_model, tmp_path: Path, architecture: str) -> None:
    source = tiny_model(architecture, dtype="float32", shards=2)
    out = convert(source, tmp_path / "b", weights="lloyd:bits=4", **FAST)
    theirs, _ = opened(out)
    ours, _ = velox_pack.load(out)
    assert np.array_equal(logits(theirs, mx.arange(60)), logits(ours, mx.arange(60)))
    kinds = [type(c) for c in make_prompt_cache(theirs)]
    assert kinds == [type(c) for c in ours.make_cache()]
    assert kinds.count(VeloxCache) == (1 if architecture == "gemma3_text" else 2)


def test_quantized_sources(tiny_model, tmp_path: Path) -> None:
    source = tiny_model("llama", dtype="float32", quantize=(4, 32))
    out = convert(source, tmp_path / "b", **FAST)
    theirs, _ = opened(out)
    reference, _ = mlx_lm.load(str(source))
    assert np.array_equal(logits(theirs, mx.arange(60)), logits(reference, mx.arange(60)))


def test_overlays(hub, tiny_model, tmp_path: Path) -> None:
    source = tiny_model("llama", dtype="float32")
    hub.add("org/tiny", source)
    out = convert("org/tiny", tmp_path / "b", weights="overlay", **FAST)
    theirs, _ = opened(out)
    reference, _ = mlx_lm.load(str(source))
    assert np.array_equal(logits(theirs, mx.arange(60)), logits(reference, mx.arange(60)))


def test_an_overlay_without_artifacts_is_still_a_model(hub, tiny_model, tmp_path: Path) -> None:
    """gpt2 has no RoPE, so an exact cache needs no artifact: mlx-lm wants a weight file anyway."""
    source = tiny_model("gpt2", dtype="float32")
    hub.add("org/gpt", source)
    out = convert("org/gpt", tmp_path / "b", weights="overlay", caches=["exact"])
    reference, _ = mlx_lm.load(str(source))
    for model, _ in (opened(out), velox_pack.load(out)):
        assert np.array_equal(logits(model, mx.arange(60)), logits(reference, mx.arange(60)))


def test_a_stock_model_is_untouched(tiny_model, demo_bundle: Path) -> None:
    """Routing attention for a bundle changes nothing for another model of the same architecture."""
    folder = str(tiny_model("llama", dtype="float32"))
    before, _ = mlx_lm.load(folder)
    wanted = logits(before, mx.arange(60))
    velox_pack.load(demo_bundle)
    after, _ = mlx_lm.load(folder)
    assert all(type(c) is KVCache for c in make_prompt_cache(after))
    cache = make_prompt_cache(after)
    found = np.array(after(mx.arange(60)[None], cache=cache)[0])
    assert np.array_equal(found, wanted)
