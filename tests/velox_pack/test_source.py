"""Sources: what is found, what is refused in one line, and that weights are mlx-lm's own."""

import hashlib
import json
import shutil
from pathlib import Path

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx.utils import tree_flatten

from models import ARCHITECTURES, edit_config
from velox_pack.manifests.errors import SourceError
from velox_pack.source import check_finite, resolve

REPO = "org/tiny"


def refused(source: object, **options: object) -> str:
    """Return the message with which `resolve` or `check_weights` refuses: always one line."""
    with pytest.raises(SourceError) as caught:
        resolve(str(source), **options).check_weights()
    message = str(caught.value)
    assert message
    assert "\n" not in message
    return message


def rewrite(folder: Path, change: dict[str, mx.array | None]) -> Path:
    """Replace, add or (None) remove tensors of an unsharded model."""
    path = folder / "model.safetensors"
    weights = {n: mx.array(np.array(a)) for n, a in mx.load(str(path)).items()} | change
    kept = {n: a for n, a in weights.items() if a is not None}
    mx.save_safetensors(str(path), kept, metadata={"format": "mlx"})
    return folder


# --- what is found -------------------------------------------------------------------------------


def test_demo_is_found_without_network() -> None:
    demo = resolve("demo")
    assert (demo.kind, demo.name, demo.repo, demo.revision) == ("demo", "demo", None, None)
    assert demo.config["model_type"] == "llama"
    assert [f.name for f in demo.weight_files] == ["model.safetensors"]
    demo.check_weights()
    assert demo.tokenizer().decode(demo.tokenizer().encode("hello")).endswith("hello")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("quantize", [None, (4, 32)], ids=["plain", "quantized"])
def test_weights_are_what_mlx_lm_loads(tiny_model, architecture, quantize) -> None:
    folder = tiny_model(architecture, quantize=quantize, shards=2 if quantize else 1)
    source = resolve(str(folder))
    source.check_weights()
    model, _ = mlx_lm.load(str(folder))
    expected = dict(tree_flatten(model.parameters()))
    weights = source.weights()
    skeleton = source.skeleton()
    assert type(skeleton) is type(model)
    assert weights.keys() == expected.keys()
    assert dict(tree_flatten(skeleton.parameters())).keys() == expected.keys()
    for name, array in expected.items():
        assert weights[name].dtype == array.dtype
        assert mx.array_equal(weights[name], array)
    assert bool(source.native_quantized) == bool(quantize)
    for settings in source.native_quantized.values():
        assert settings == {"bits": 4, "group_size": 32, "mode": "affine"}


def test_a_skeleton_filled_with_the_weights_computes_the_same(tiny_model) -> None:
    folder = tiny_model("gemma3_text", dtype="float32")
    source = resolve(str(folder))
    skeleton = source.skeleton()
    skeleton.load_weights(list(source.weights().items()))
    model, _ = mlx_lm.load(str(folder))
    tokens = mx.arange(40)[None]
    assert mx.array_equal(skeleton(tokens), model(tokens))


def test_nothing_is_evaluated_by_looking(tiny_model) -> None:
    source = resolve(str(tiny_model("llama", hidden_size=512, dtype="float32")))
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    source.check_weights()
    kept = source.skeleton(), source.weights()
    assert mx.get_peak_memory() - before < 100_000
    assert sum(a.nbytes for a in kept[1].values()) > 4_000_000


def test_mixed_native_quantization_is_read_from_the_files(own_model) -> None:
    folder = own_model("llama", quantize=(4, 64))
    name = "model.layers.1.mlp.down_proj"
    wide = mx.quantize(mx.random.normal((128, 256)), group_size=32, bits=8)
    parts = zip(("weight", "scales", "biases"), wide, strict=True)
    rewrite(folder, {f"{name}.{part}": array for part, array in parts})
    found = resolve(str(folder)).native_quantized
    assert found.pop(name) == {"bits": 8, "group_size": 32, "mode": "affine"}
    assert set(map(str, found.values())) == {"{'bits': 4, 'group_size': 64, 'mode': 'affine'}"}


def test_hashes_and_copy_list_name_the_right_files(own_model) -> None:
    folder = own_model("llama", shards=2)
    for name in ("LICENSE", "LICENSE.txt", "README.md", "generation_config.json", "train.py"):
        (folder / name).write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    source = resolve(str(folder))
    assert [p.name for p in source.copy_list()] == [
        "LICENSE",
        "LICENSE.txt",
        "chat_template.jinja",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    hashes = source.hashes()
    assert list(hashes) == [
        "chat_template.jinja",
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    for name, digest in hashes.items():
        assert digest == hashlib.sha256((folder / name).read_bytes()).hexdigest()


def test_end_tokens_of_the_generation_config_are_known(own_model) -> None:
    folder = own_model("llama")
    (folder / "generation_config.json").write_text('{"eos_token_id": [257, 258]}')
    source = resolve(str(folder))
    assert source.tokenizer().eos_token_ids == {257, 258}
    assert source.mlx_config()["eos_token_id"] == [257, 258]
    assert source.config["eos_token_id"] == 257


# --- folders that are refused --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "~/no-such-folder", "a/b/c"])
def test_missing_folder(name: str) -> None:
    assert "no such folder" in refused(name)


def test_a_revision_needs_a_repo(tiny_model) -> None:
    assert "revision belongs to a repo" in refused(tiny_model(), revision="main")
    assert "revision belongs to a repo" in refused("demo", revision="main")


def test_a_file_is_no_folder(tiny_model) -> None:
    assert "not a folder" in refused(tiny_model() / "config.json")


@pytest.mark.parametrize(
    ("beside", "said"),
    [
        ({}, "no config.json"),
        ({"adapter_config.json": "{}"}, "an adapter"),
        ({"model_index.json": "{}"}, "a diffusion pipeline"),
        ({"model-Q4_K.gguf": ""}, "only GGUF: convert to safetensors first"),
    ],
)
def test_no_config(tmp_path: Path, beside: dict[str, str], said: str) -> None:
    for name, text in beside.items():
        (tmp_path / name).write_text(text)
    assert said in refused(tmp_path)


@pytest.mark.parametrize("text", ["{", "[1]", "\x80", "[" * 100_000])
def test_damaged_config(own_model, text: str) -> None:
    folder = own_model()
    (folder / "config.json").write_text(text, encoding="latin-1")
    assert "config.json" in refused(folder)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model_type": None}, "has no model_type"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "an encoder for masked"),
        ({"model_type": "bert", "architectures": None}, "but an encoder (model_type 'bert')"),
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "encoder-decoder"),
        ({"model_type": "whisper", "architectures": None}, "a speech model"),
        ({"model_type": "vit", "architectures": ["ViTForImageClassification"]}, "images"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "a classifier of texts"),
        ({"model_type": "warp_drive"}, "has no model_type 'warp_drive'"),
        ({"model_type": "cache"}, "has no model_type 'cache'"),
        ({"model_type": "..cache"}, "has no model_type '..cache'"),
        ({"model_type": "llama.evil"}, "has no model_type"),
        ({"model_file": "modeling.py"}, "never done"),
    ],
)
def test_not_a_causal_language_model(own_model, fields: dict[str, object], said: str) -> None:
    assert said in refused(edit_config(own_model(), **fields))


def test_python_of_the_repo_is_never_run(own_model) -> None:
    folder = edit_config(own_model(), model_file="modeling.py")
    (folder / "modeling.py").write_text("raise SystemExit('ran')")
    refused(folder)
    folder = edit_config(own_model(), auto_map={"AutoTokenizer": ["tok.Tok", None]})
    (folder / "tok.py").write_text("raise SystemExit('ran')")
    edited = json.loads((folder / "tokenizer_config.json").read_text())
    edited |= {"tokenizer_class": "Tok", "auto_map": {"AutoTokenizer": ["tok.Tok", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(edited))
    with pytest.raises(SourceError, match="own Python"):
        resolve(str(edit_config(folder, model_file=None))).tokenizer()


def test_a_bundle_is_no_source(own_model) -> None:
    folder = edit_config(own_model(), model_file="velox_model.py")
    (folder / "velox.json").write_text("{}")
    assert "is a velox-pack bundle" in refused(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.gguf", "consolidated.safetensors"])
def test_no_safetensors(own_model, name: str) -> None:
    folder = own_model()
    (folder / "model.safetensors").rename(folder / name)
    assert f"only {name}: convert to safetensors first" in refused(folder)


def test_an_impossible_configuration(own_model) -> None:
    assert "cannot build" in refused(edit_config(own_model(), hidden_size="wide"))


def test_no_tokenizer(own_model) -> None:
    folder = own_model()
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(SourceError, match="tokenizer cannot be loaded"):
        resolve(str(folder)).tokenizer()
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(SourceError, match="no tokenizer in"):
        resolve(str(folder)).tokenizer()


# --- weights that are refused --------------------------------------------------------------------


def test_truncated_shard(own_model) -> None:
    folder = own_model(shards=2)
    shard = folder / "model-00002-of-00002.safetensors"
    size = shard.stat().st_size
    with shard.open("r+b") as stream:
        stream.truncate(size - 100)
    message = refused(folder)
    assert all(part in message for part in (shard.name, str(size), str(size - 100)))
    with pytest.raises(SourceError, match="truncated"):  # nothing reads a file before the check
        resolve(str(folder)).weights()


def test_missing_shard(own_model) -> None:
    folder = own_model(shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors" in refused(folder)


def test_tensor_twice(own_model) -> None:
    folder = own_model(shards=2)
    shutil.copy(folder / "model-00001-of-00002.safetensors", folder / "model.safetensors")
    assert "is both in model-00001-of-00002.safetensors and model.safetensors" in refused(folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model.norm.weight": None}, "missing: model.norm.weight"),
        ({"model.extra": mx.zeros(3)}, "not wanted by the model: model.extra"),
        ({"model.norm.weight": mx.zeros(7)}, "model.norm.weight (7,), not (128,)"),
        (
            {"model.layers.0.mlp.up_proj.weight": mx.zeros((256, 128), mx.uint8)},
            "model.layers.0.mlp.up_proj.weight (mlx.core.uint8)",
        ),
    ],
)
def test_wrong_tensors_are_named(own_model, change, said: str) -> None:
    assert said in refused(rewrite(own_model(), change))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_check_finite_names_the_tensor(bad: float) -> None:
    array = mx.ones((4, 4), mx.bfloat16)
    check_finite("a.weight", array)
    check_finite("a.codes", mx.ones((4,), mx.uint32))
    array[1, 2] = bad
    with pytest.raises(SourceError, match=r"a\.weight: 1 of 16 weights are NaN or infinite"):
        check_finite("a.weight", array)
