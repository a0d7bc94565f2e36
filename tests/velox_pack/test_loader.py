"""Loading: three lines, nothing computed again, nothing of the bundle executed."""

import json
import os
import shutil
import types
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, RotatingKVCache

import velox_pack
from commands import python
from velox_pack import convert
from velox_pack.caches.cache import VeloxCache
from velox_pack.manifests.bundle import open_bundle
from velox_pack.manifests.errors import BundleError, RecipeError, SourceError
from velox_pack.reservoir.linear import ReservoirLinear
from velox_pack.source import data_folder, resolve

FAST = {"caches": ["turboquant-mse:bits=4", "affine:group=32"]}
WEIGHTS = "model-00001-of-00001.safetensors"
PROMPT = "She opened the door, and"


@pytest.fixture
def bundle(demo_bundle: Path, tmp_path: Path) -> Path:
    """A copy of the demo's bundle, to damage."""
    return Path(shutil.copytree(demo_bundle, tmp_path / "bundle"))


@pytest.fixture(scope="session")
def tiny_bundle(tiny_model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of a tiny Llama, parameters kept, two data-free cache plans."""
    out = tmp_path_factory.mktemp("tiny") / "bundle"
    return convert(tiny_model("llama", dtype="float32"), out, weights="keep", **FAST)


def relist(bundle: Path, name: str) -> None:
    """Make the manifest vouch for the file as it is now, as an attacker would."""
    from velox_pack.manifests.files import sha256_file

    manifest = json.loads((bundle / "velox.json").read_text())
    manifest["files"][name]["bytes"] = (bundle / name).stat().st_size
    manifest["files"][name]["sha256"] = sha256_file(bundle / name)
    (bundle / "velox.json").write_text(json.dumps(manifest))


def refused(bundle: Path, **options: Any) -> str:
    with pytest.raises(velox_pack.VeloxError) as caught:
        velox_pack.load(bundle, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


# --- three lines ---------------------------------------------------------------------------------


def test_three_lines(demo_bundle: Path) -> None:
    model, tokenizer = velox_pack.load(demo_bundle, dtype=mx.float32)
    text = mlx_lm.generate(model, tokenizer, prompt=PROMPT, max_tokens=48)
    assert all(isinstance(cache, VeloxCache) for cache in model.make_cache())
    known = set((data_folder() / "text" / "heldout.txt").read_text().lower().split())
    words = [word.strip('.,;:!?"()').lower() for word in text.split()]
    assert len(words) >= 20
    assert sum(word in known for word in words) / len(words) > 0.8
    # The premise: the same tokens in another order do not read so.
    mixed = np.random.default_rng(0).permutation([c for c in text if not c.isspace()])
    nonsense = ["".join(mixed[i : i + 5]).lower() for i in range(0, mixed.size, 5)]
    assert sum(word in known for word in nonsense) / len(nonsense) < 0.3


def logits_of(model: Any, tokens: mx.array, caches: Any = None) -> np.ndarray:
    return np.array(model(tokens[None], cache=caches)[0].astype(mx.float32))


def distance(found: np.ndarray, wanted: np.ndarray) -> float:
    """Relative error of logits [L, V], median over positions: one flipped expert is no matter."""
    errors = np.linalg.norm(found - wanted, axis=-1) / np.linalg.norm(wanted, axis=-1)
    return float(np.median(errors))


def test_packed_weights_compute_nearly_the_same(demo_bundle: Path) -> None:
    source = resolve("demo")
    exact = source.skeleton()
    exact.load_weights(list(source.weights().items()))
    exact.set_dtype(mx.float32)
    model, tokenizer = velox_pack.load(demo_bundle, dtype=mx.float32)
    text = (data_folder() / "text" / "heldout.txt").read_text()[:1500]
    tokens = mx.array(tokenizer.encode(text)[:256])
    wanted, found = logits_of(exact, tokens), logits_of(model, tokens)
    assert np.mean(wanted.argmax(-1) == found.argmax(-1)) > 0.7
    assert distance(found, wanted) < 0.25
    assert distance(logits_of(model, tokens[::-1]), wanted) > 0.5  # the premise


def test_kept_weights_compute_exactly_the_same(tiny_model, tiny_bundle: Path) -> None:
    exact, _ = mlx_lm.load(str(tiny_model("llama", dtype="float32")))
    model, _ = velox_pack.load(tiny_bundle, cache="none")
    tokens = mx.arange(60)
    assert np.array_equal(logits_of(exact, tokens), logits_of(model, tokens))


@pytest.mark.parametrize(
    ("architecture", "weights"),
    [
        ("gemma3_text", "affine:bits=6,group=64"),  # hybrid: sliding layers, then a full one
        ("qwen2", "lloyd:bits=3"),  # biases
        ("qwen3", "affine:bits=4,group=32"),  # norms of queries and keys
        ("phi3", "lloyd:bits=4"),  # fused linears
        ("mixtral", "affine:bits=3,group=32"),  # experts
        ("lfm2", "affine:bits=4,group=64"),  # hybrid: convolutions
    ],
)
def test_architectures(tiny_model, tmp_path: Path, architecture: str, weights: str) -> None:
    source = tiny_model(architecture, dtype="float32")
    options = {"caches": ["spectral:bits=4"], "calibration_tokens": 256, "weights": weights}
    out = convert(source, tmp_path / "b", **options)
    layers = open_bundle(out).manifest.model.layers
    model, tokenizer = velox_pack.load(out)
    caches = model.make_cache()
    if architecture == "gemma3_text":
        assert [layer.covered for layer in layers] == [False] * 5 + [True]
        assert layers[0].reason == "sliding window of 16 tokens: its cache is bounded"
        assert (layers[0].attention, layers[0].window) == ("sliding", 16)
        assert [type(c) for c in caches] == [RotatingKVCache] * 5 + [VeloxCache]
    elif architecture == "lfm2":
        assert [layer.covered for layer in layers] == [False, True] * 2
        assert layers[0].reason == "no attention"
    else:
        assert all(isinstance(c, VeloxCache) for c in caches)
    # 80 tokens: past the window of the recipe, so that codes are really used.
    text = (data_folder() / "text" / "heldout.txt").read_text()
    tokens = mx.array(tokenizer.encode(text[:200])[:80])
    plain = logits_of(model, tokens)
    for start in range(0, 80, 20):
        last = logits_of(model, tokens[start : start + 20], caches)
    assert any(isinstance(c, VeloxCache) and c.codes[0] for c in caches)
    assert np.isfinite(last).all()
    assert 0 < distance(last, plain[60:]) < 0.3
    assert isinstance(mlx_lm.generate(model, tokenizer, prompt="hello", max_tokens=4), str)
    reference, _ = mlx_lm.load(str(source))
    wanted = logits_of(reference, tokens)
    assert 0 < distance(plain, wanted) < 0.7
    assert distance(plain[::-1], wanted) > 0.9


def test_quantized_sources_load_and_generate(tiny_model, tmp_path: Path) -> None:
    source = tiny_model("llama", quantize=(4, 32), dtype="float32")
    out = convert(source, tmp_path / "b", **FAST)
    model, tokenizer = velox_pack.load(out)
    reference, _ = mlx_lm.load(str(source))
    tokens = mx.arange(60)
    assert np.array_equal(logits_of(reference, tokens), logits_of(model, tokens))
    assert isinstance(model.make_cache()[0], VeloxCache)
    assert isinstance(mlx_lm.generate(model, tokenizer, prompt="hello", max_tokens=40), str)


# --- caches by name ------------------------------------------------------------------------------


def test_cache_plans_by_name(tiny_bundle: Path) -> None:
    plans = {}
    for name in (None, "turboquant-mse:bits=4", "affine:group=32", "none"):
        model, _ = velox_pack.load(tiny_bundle, cache=name)
        plans[name] = model.make_cache()
    recipes = {n: c[0].fingerprint.partition("/")[2] for n, c in plans.items() if n != "none"}
    assert recipes[None] == "turboquant-mse:bits=4"
    assert recipes["affine:group=32"] == "affine:group=32"
    assert all(type(c) is KVCache for c in plans["none"])
    message = refused(tiny_bundle, cache="kivi")
    assert message.endswith("no cache 'kivi'; it has: turboquant-mse:bits=4, affine:group=32")


def test_two_loads_are_independent(tiny_bundle: Path) -> None:
    first, tokenizer = velox_pack.load(tiny_bundle)
    second, _ = velox_pack.load(tiny_bundle, cache="affine:group=32")
    tokens = mx.arange(60)
    caches = [first.make_cache(), first.make_cache(), second.make_cache()]
    alone = logits_of(first, tokens, caches[0])
    assert caches[0][0].offset == 60
    assert caches[1][0].offset == 0
    logits_of(second, tokens[:40], caches[2])
    second.update({"model": {"norm": {"weight": mx.zeros(128)}}})
    assert np.array_equal(logits_of(first, tokens, caches[1]), alone)
    assert caches[2][0].offset == 40
    del second
    assert mlx_lm.generate(first, tokenizer, prompt="hello", max_tokens=3) is not None


def test_dtype_casts_everything_that_floats(demo_bundle: Path) -> None:
    model, _ = velox_pack.load(demo_bundle, dtype=mx.bfloat16)
    kinds = {a.dtype for _, a in tree_flatten(model.parameters())}
    assert kinds == {mx.bfloat16, mx.uint32}
    plain, _ = velox_pack.load(demo_bundle)
    assert {a.dtype for _, a in tree_flatten(plain.parameters())} == {mx.float16, mx.uint32}


# --- nothing computed again ----------------------------------------------------------------------


def forbid(monkeypatch: pytest.MonkeyPatch, module: Any) -> int:
    """Make every public function of a module raise; how many there were."""
    names = [n for n in dir(module) if not n.startswith("_") and callable(getattr(module, n))]
    count = 0
    for name in names:
        old = getattr(module, name)
        if isinstance(old, (type, types.ModuleType)) or name == "norm":  # a norm is a sum
            continue

        def fail(*args: object, _name: str = name, **kwargs: object) -> None:
            raise AssertionError(f"{module.__name__}.{_name} was called")

        monkeypatch.setattr(module, name, fail)
        count += 1
    return count


def test_nothing_is_computed_again(demo_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pkgutil
    from importlib import import_module

    import scipy.cluster.vq
    import scipy.linalg

    import velox_pack.calibrators

    calibrators = [
        import_module(f"velox_pack.calibrators.{found.name}")
        for found in pkgutil.iter_modules(velox_pack.calibrators.__path__)
    ]
    libraries = [np.linalg, scipy.linalg, scipy.cluster.vq, mx.linalg]
    counts = {m.__name__: forbid(monkeypatch, m) for m in (*libraries, *calibrators)}
    assert counts["numpy.linalg"] > 20
    assert counts["mlx.core.linalg"] > 8
    assert counts["velox_pack.calibrators.spectral"] >= 1
    with pytest.raises(AssertionError):  # the premise: they do raise
        np.linalg.svd(np.eye(2))
    model, tokenizer = velox_pack.load(demo_bundle, verify="sha256")
    text = mlx_lm.generate(model, tokenizer, prompt=PROMPT * 12, max_tokens=4)
    assert text


HOOK = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(("velox_pack.calibrators", "scipy", "sklearn", "threadpoolctl")):
            if name.startswith("velox_pack"):
                raise AssertionError("imported " + name)
            asked.add(name.partition(".")[0])
asked = set()
import velox_pack
heavy = {"mlx", "mlx_lm", "transformers", "scipy", "numpy", "pydantic", "huggingface_hub", "rich"}
print(sorted(heavy & set(sys.modules)))
sys.meta_path.insert(0, Refuse())
model, tokenizer = velox_pack.load(sys.argv[1])
print(sorted({"scipy", "sklearn", "velox_model", "custom_model"} & set(sys.modules)))
from mlx_lm import generate
print(len(generate(model, tokenizer, prompt="She opened the door", max_tokens=3)) > 0)
print([n for n in sys.modules if n.startswith("velox_pack.calibrators")])
"""


def test_what_is_imported(bundle: Path) -> None:
    """Importing velox_pack is light; loading imports no calibrator, SciPy or bundle's Python."""
    (bundle / "velox_model.py").write_text("raise SystemExit('executed')\n".ljust(217))
    relist(bundle, "velox_model.py")
    env = {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"}
    done = python(HOOK, bundle, env=env)
    assert done.code == 0, done.err
    light, loaded, generated, calibrators = done.out.splitlines()
    assert light == "[]"
    assert loaded == "[]"
    assert generated == "True"
    assert calibrators == "[]"


# --- from the Hub --------------------------------------------------------------------------------


def test_bundles_come_from_the_hub(hub, tiny_bundle: Path) -> None:
    files = {p.name: p.read_bytes() for p in tiny_bundle.iterdir()}
    commit = hub.add("me/tiny-velox", files | {"junk.bin": b"0" * 1000})
    model, _ = velox_pack.load("me/tiny-velox")
    assert isinstance(model.make_cache()[0], VeloxCache)
    assert not hub.sent("junk.bin")
    hub.add("me/tiny-velox", {"velox.json": b"{}"})
    velox_pack.load("me/tiny-velox", revision=commit)
    assert "not the manifest of a velox-pack bundle" in refused(Path("me/tiny-velox"))


def test_a_repo_that_is_no_bundle_is_not_downloaded(hub, tiny_model) -> None:
    hub.add("org/tiny", tiny_model("llama"))
    assert "org/tiny: is not a velox-pack bundle" in refused(Path("org/tiny"))
    assert not hub.sent("model.safetensors")


def test_neither_here_nor_there(hub, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no such folder here and no such model on the Hub"):
        velox_pack.load("me/nothing")
    with pytest.raises(SourceError, match="neither a folder here nor a repo id"):
        velox_pack.load(tmp_path / "nowhere")
    with pytest.raises(BundleError, match="not a velox-pack bundle"):
        velox_pack.load(tmp_path)
    with pytest.raises(BundleError, match="revision belongs to a repo"):
        velox_pack.load(tmp_path, revision="main")


def test_a_second_load_needs_no_network(hub, tiny_bundle: Path, monkeypatch) -> None:
    from huggingface_hub import constants

    hub.add("me/tiny-velox", tiny_bundle)
    velox_pack.load("me/tiny-velox")
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    velox_pack.load("me/tiny-velox")
    assert hub.requests == []


def test_overlays_find_their_base(hub, tiny_model, tmp_path: Path) -> None:
    source = tiny_model("llama", dtype="float32")
    commit = hub.add("org/tiny", source)
    out = convert("org/tiny", tmp_path / "b", weights="overlay", **FAST)
    hub.add("org/tiny", tiny_model("llama", seed=1, dtype="float32"))  # the branch moves on
    reference, _ = mlx_lm.load(str(source))
    tokens = mx.arange(60)
    for verify in ("size", "sha256"):
        model, _ = velox_pack.load(out, verify=verify, cache="none")
        assert np.array_equal(logits_of(reference, tokens), logits_of(model, tokens))
    assert not any(isinstance(m, ReservoirLinear) for m in model.modules())
    manifest = json.loads((out / "velox.json").read_text())
    manifest["source"]["revision"] = "main"  # no commit: then its files have to be hashed
    (out / "velox.json").write_text(json.dumps(manifest))
    assert "is not what b was made from: model.safetensors differ" in refused(out)
    manifest["source"]["revision"] = commit
    manifest["source"]["repo"] = str(source)  # a path, not a repo
    (out / "velox.json").write_text(json.dumps(manifest))
    assert "a revision belongs to a repo of the Hub" in refused(out)


def test_overlays_of_quantized_repos(hub, tiny_model, tmp_path: Path) -> None:
    source = tiny_model("llama", quantize=(4, 32), dtype="float32")
    hub.add("org/tiny-4bit", source)
    out = convert("org/tiny-4bit", tmp_path / "b", weights="overlay", **FAST)
    model, _ = velox_pack.load(out, cache="none")
    reference, _ = mlx_lm.load(str(source))
    tokens = mx.arange(60)
    assert np.array_equal(logits_of(reference, tokens), logits_of(model, tokens))


def test_unknown_plan_is_told_before_weights_are_read(tiny_bundle: Path, monkeypatch) -> None:
    def fail(*args: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(mx, "load", fail)
    with pytest.raises(RecipeError):
        velox_pack.load(tiny_bundle, cache="nonsense")


@pytest.mark.parametrize("weights", ["keep", "affine:bits=4,group=32"])
def test_a_head_that_sanitize_drops(own_model, tmp_path: Path, weights: str) -> None:
    """gemma3 ties its head to the embedding when no weights come for it."""
    source = own_model("gemma3_text", dtype="float32")
    file = source / "model.safetensors"
    arrays = {n: a for n, a in mx.load(str(file)).items() if n != "lm_head.weight"}
    mx.eval(arrays)
    mx.save_safetensors(str(file), arrays, {"format": "mlx"})
    bundle = convert(source, tmp_path / "bundle", weights=weights, **FAST)
    model, _ = velox_pack.load(bundle, cache="none")
    plain, _ = mlx_lm.load(str(source))
    tokens = mx.array([[1, 2, 3, 4]])
    difference = mx.abs(model(tokens) - plain(tokens)).max().item()
    assert difference < (1e-4 if weights == "keep" else np.inf)
    stock, _ = mlx_lm.load(str(bundle), trust_remote_code=True)
    np.testing.assert_allclose(np.array(stock(tokens)), np.array(model(tokens)), atol=1e-5)
