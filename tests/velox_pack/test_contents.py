"""Inspection: bytes add up, contexts are what memory holds."""

from itertools import pairwise
from pathlib import Path

import pytest

from velox_pack import convert, inspect
from velox_pack.manifests.bundle import open_bundle

FAST = {"caches": ["turboquant-mse:bits=3", "affine:bits=8,group=32"]}


def on_disk(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


@pytest.fixture(scope="session")
def tiny_bundle(tiny_model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two cache plans of a tiny Llama in bfloat16, packed."""
    source = tiny_model("llama", dtype="bfloat16")
    out = tmp_path_factory.mktemp("contents") / "bundle"
    return convert(source, out, weights="lloyd:bits=3", **FAST)


def test_bytes_add_up(demo_bundle: Path) -> None:
    found = inspect(demo_bundle)
    assert found["total_bytes"] == on_disk(demo_bundle)
    assert sum(found["file_bytes"].values()) == found["total_bytes"]
    assert set(found["file_bytes"]) == {p.name for p in demo_bundle.iterdir()}
    assert all((demo_bundle / n).stat().st_size == b for n, b in found["file_bytes"].items())
    assert sum(found["bytes_by_use"].values()) == found["total_bytes"]
    assert all(count > 0 for count in found["bytes_by_use"].values())
    weights = found["weights"]
    uses = found["bytes_by_use"]
    assert weights["bytes"] == uses["packed linears"] + uses["other parameters"]
    outside = weights["bytes"] - sum(layer["weight_bytes"] for layer in found["layers"])
    assert outside == 2 * 192 * (8192 + 1)  # the embedding and the last norm, float16
    assert weights["memory_bytes"] == weights["bytes"]


def test_an_absent_card_counts_nothing(demo_bundle: Path, tmp_path: Path) -> None:
    import shutil

    bundle = Path(shutil.copytree(demo_bundle, tmp_path / "b"))
    (bundle / "README.md").unlink()
    assert inspect(bundle)["total_bytes"] == on_disk(bundle)


def test_what_is_in_it(demo_bundle: Path) -> None:
    found = inspect(demo_bundle)
    assert found["source"] == {"kind": "demo", "repo": None, "revision": None, "name": "demo"}
    assert found["weights"]["encoding"] == "affine"
    assert found["weights"]["kept"] == [{"path": "model.embed_tokens", "reason": "embedding"}]
    assert open_bundle(demo_bundle).fingerprint.startswith(found["fingerprint"])
    assert found["default_cache"] == "ratequant+joint-spectral"
    cache = found["caches"]["ratequant+joint-spectral"]
    assert cache["bits_per_element"] < 3.4
    assert cache["share_of_plain"] == pytest.approx(cache["bits_per_element"] / 16)
    memory = inspect(demo_bundle, memory=10**8)["memory"]["context"]
    assert memory["ratequant+joint-spectral"] > 4 * memory["none"]
    assert "memory" not in found
    assert found["measured"] is None


def test_layers(tiny_model, tmp_path: Path) -> None:
    out = convert(tiny_model("gemma3_text"), tmp_path / "b", caches=["exact"])
    layers = inspect(out)["layers"]
    assert [layer["index"] for layer in layers] == list(range(6))
    assert [layer["covered"] for layer in layers] == [False] * 5 + [True]
    assert all("sliding window of 16" in layer["reason"] for layer in layers[:5])
    assert layers[5]["reason"] is None
    assert {tuple(layer["head_dim"]) for layer in layers} == {(64, 64)}
    assert len({layer["weight_bytes"] for layer in layers}) == 1


def test_contexts_grow_with_memory(tiny_bundle: Path) -> None:
    sizes = [0, 10**5, 10**6, 10**7, 10**9]
    found = [inspect(tiny_bundle, memory=size)["memory"] for size in sizes]
    for name in ("none", *inspect(tiny_bundle)["caches"]):
        contexts = [f["context"][name] for f in found]
        assert contexts[0] == 0
        assert all(a <= b for a, b in pairwise(contexts))
        assert contexts[-1] > 10**5
    assert [f["bytes"] for f in found] == sizes
    assert found[0]["positions"] == 2048


def test_contexts_are_what_memory_holds(tiny_bundle: Path) -> None:
    memory = 10**8
    found = inspect(tiny_bundle, memory=memory)
    context = found["memory"]["context"]
    room = memory - found["weights"]["bytes"]
    plain = 3 * 2 * (32 + 32) * 2  # layers, KV heads, dimensions, bytes
    assert context["none"] == room // plain
    for name, cache in found["caches"].items():
        used = context[name] * cache["bytes_per_token"] + cache["constant_bytes"]
        assert room - 2 * cache["bytes_per_token"] < used <= room
    narrow, wide = (context[name] for name in found["caches"])
    assert narrow > wide > context["none"]


def test_an_overlay_counts_its_base(hub, tiny_model, tmp_path: Path) -> None:
    hub.add("org/tiny", tiny_model("llama"))
    kept = convert("org/tiny", tmp_path / "kept", weights="keep", caches=["exact"])
    over = convert("org/tiny", tmp_path / "over", weights="overlay", caches=["exact"])
    first, second = (inspect(b, memory=10**7) for b in (kept, over))
    assert second["weights"]["bytes"] == 0
    assert second["weights"]["memory_bytes"] == first["weights"]["bytes"]
    assert second["memory"]["context"] == first["memory"]["context"]
    assert second["total_bytes"] == on_disk(over)
