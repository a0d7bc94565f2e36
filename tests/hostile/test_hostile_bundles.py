"""A sound bundle, damaged in one way each: what `open_bundle` and `verify` must say."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from bundles import make_bundle

from velox_pack.manifests.aligned import read_arrays, write_arrays
from velox_pack.manifests.bundle import open_bundle, verify
from velox_pack.manifests.errors import BundleError
from velox_pack.manifests.files import sha256_file
from velox_pack.manifests.header import PAGE

WEIGHTS = "model-00001-of-00001.safetensors"
CACHE = "model-velox-cache.safetensors"
INDEX = "model.safetensors.index.json"
PACKED = "model.layers.0.mlp.up_proj"

Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound") / "bundle"
    make_bundle(path)
    return path


@pytest.fixture
def bundle(sound: Path, tmp_path: Path) -> Path:
    path = tmp_path / "bundle"
    shutil.copytree(sound, path)
    return path


def manifest(change: Callable[[Any], object]) -> Damage:
    """Edit velox.json."""

    def damage(path: Path) -> None:
        value = json.loads((path / "velox.json").read_text())
        change(value)
        (path / "velox.json").write_text(json.dumps(value))

    return damage


def raw(data: bytes) -> Damage:
    """Replace velox.json."""
    return lambda path: (path / "velox.json").write_bytes(data)


def relisted(path: Path, name: str) -> None:
    """Make the manifest vouch for the file as it is now, as an attacker would."""
    record = {"bytes": (path / name).stat().st_size, "sha256": sha256_file(path / name)}
    manifest(lambda v: v["files"].setdefault(name, {"optional": False}).update(record))(path)


def tensors(file: str, change: Callable[[dict[str, mx.array]], object]) -> Damage:
    """Rewrite a safetensors file, and let the manifest vouch for it."""

    def damage(path: Path) -> None:
        arrays = read_arrays(path / file)
        mx.eval(arrays)
        change(arrays)
        (path / file).unlink()
        write_arrays(path / file, arrays, {"format": "mlx"})
        relisted(path, file)

    return damage


def file(name: str, change: Callable[[bytes], bytes]) -> Damage:
    """Rewrite the bytes of a file, and let the manifest vouch for it."""

    def damage(path: Path) -> None:
        (path / name).write_bytes(change((path / name).read_bytes()))
        relisted(path, name)

    return damage


def link(name: str, target: str) -> Damage:
    """Replace a file by a link."""

    def damage(path: Path) -> None:
        (path / name).unlink(missing_ok=True)
        (path / name).symlink_to(target)

    return damage


def cut(name: str, count: int) -> Damage:
    """Truncate a file by `count` bytes."""
    return lambda path: os.truncate(path / name, (path / name).stat().st_size - count)


def lie(path: Path) -> None:
    """A weight file whose tensors lie about their size; its size and hash are as listed."""
    data = (path / WEIGHTS).read_bytes()
    lying = data.replace(b'"shape":[64,8]', b'"shape":[99,8]')
    assert lying != data
    (path / WEIGHTS).write_bytes(lying)
    relisted(path, WEIGHTS)


def first(key: str) -> Callable[[Any], Any]:
    """The manifest entry of an artifact."""
    return lambda value: next(a for a in value["artifacts"] if a["id"] == key)


def outside(path: Path, name: str) -> None:
    """Put a file (or folder) outside, just as the manifest says, and a link in its place."""
    os.replace(path / name, path.parent / name)
    (path / name).symlink_to(f"../{name}")


def folder(path: Path) -> None:
    """A folder where the manifest should be."""
    (path / "velox.json").unlink()
    (path / "velox.json").mkdir()


def fifo(path: Path) -> None:
    """A pipe: whoever opens it waits for ever."""
    (path / "config.json").unlink()
    os.mkfifo(path / "config.json")


# What both `open_bundle` and `verify(level="size")` must find.
AT_OPEN: dict[str, tuple[Damage, str]] = {
    "no manifest": (lambda p: (p / "velox.json").unlink(), "has no velox.json"),
    "manifest a folder": (folder, "is not a regular file"),
    "manifest a link out": (
        lambda p: outside(p, "velox.json"),
        "velox.json: is a link out of the bundle",
    ),
    "manifest of 17 MiB": (raw(b" " * (17 * 2**20)), "is larger than 16777216 bytes"),
    "manifest empty": (raw(b""), "is not JSON"),
    "manifest cut": (lambda p: cut("velox.json", 100)(p), "is not JSON"),
    "manifest nested": (raw(b"[" * 10**6), "nests deeper"),
    "manifest with NaN": (raw(b'{"format": NaN}'), "holds NaN"),
    "manifest with a key twice": (raw(b'{"format":1,"format":2}'), "twice"),
    "newer major": (manifest(lambda v: v.update(version=[2, 0])), "reads 1.x; upgrade velox-pack"),
    "path out": (
        manifest(lambda v: v["files"].update({"../x": v["files"]["config.json"]})),
        "file name '../x' is not a plain name inside the bundle",
    ),
    "absolute path": (
        manifest(lambda v: v["files"].update({"/etc/passwd": v["files"]["config.json"]})),
        "'/etc/passwd' is not a plain name",
    ),
    "link out": (lambda p: outside(p, "config.json"), "config.json: is a link out of the bundle"),
    "optional link out": (link("README.md", "/etc/passwd"), "README.md: is a link out"),
    "folder link out": (lambda p: outside(p, "plots"), "plots/bits.png: is a link out"),
    "link loop": (link("config.json", "config.json"), "config.json: is missing"),
    "link to a device": (link("config.json", "/dev/zero"), "is not a regular file"),
    "fifo": (fifo, "config.json: is not a regular file"),
    "file missing": (lambda p: (p / WEIGHTS).unlink(), f"{WEIGHTS}: is missing; get the bundle"),
    "shard cut short": (cut(WEIGHTS, 1), "is truncated: 81919 bytes, expected 81920"),
    "shard cut to nothing": (cut(WEIGHTS, 81920), "is truncated: 0 bytes, expected 81920"),
    "shard too long": (
        lambda p: os.truncate(p / WEIGHTS, 81921),
        "is too long: 81921 bytes, expected 81920",
    ),
    "shard cut and vouched for": (
        file(WEIGHTS, lambda data: data[:-1]),
        "is truncated: its header promises 81920 bytes, the file has 81919",
    ),
    "header length of 2**60": (
        file(WEIGHTS, lambda data: (2**60).to_bytes(8, "little") + data[8:]),
        "more than the 25000000 allowed",
    ),
    "tensor lies about its size": (lie, "lies about its size"),
    "artifact file lies": (
        file(CACHE, lambda data: data.replace(b'"F16"', b'"F64"', 1)),
        "lies about its size",
    ),
    "tensors overlap": (
        file(WEIGHTS, lambda data: data.replace(b"[16384,", b"[16380,", 1)),
        f"{WEIGHTS}: ",
    ),
    "packed tensor missing": (
        tensors(WEIGHTS, lambda a: a.pop(f"{PACKED}.codes")),
        f"has no tensor '{PACKED}.codes'",
    ),
    "packed tensor of another shape": (
        tensors(WEIGHTS, lambda a: a.update({f"{PACKED}.scales": mx.ones((64, 2), mx.float16)})),
        f"tensor '{PACKED}.scales' is F16 [64, 2], the manifest needs F16 or BF16 or F32 [64, 1]",
    ),
    "packed tensor of another type": (
        tensors(WEIGHTS, lambda a: a.update({f"{PACKED}.codes": mx.ones((64, 8), mx.int32)})),
        "is I32 [64, 8], the manifest needs U32 [64, 8]",
    ),
    "bits that the codes do not have": (
        manifest(lambda v: v["weights"]["packed"][PACKED].update(bits=8)),
        "the manifest needs U32 [64, 16]",
    ),
    "width beyond all memory": (
        manifest(lambda v: v["weights"]["packed"][PACKED].update(out_features=2**62)),
        "the manifest needs U32 [4611686018427387904, 8]",
    ),
    "artifact tensor missing": (
        tensors(CACHE, lambda a: a.pop("velox.qfilters.filters")),
        "has no tensor 'velox.qfilters.filters', which artifact 'qfilters' needs",
    ),
    "artifact tensor of another shape": (
        tensors(CACHE, lambda a: a.update({"velox.qfilters.filters": mx.ones((1, 2, 16))})),
        "filters has shape [1, 2, 16], not [L, H, D] (L = 2)",
    ),
    "artifact tensor of another type": (
        tensors(CACHE, lambda a: a.update({"velox.widths-3.keys": mx.ones((2, 16))})),
        "keys has type F32, not U8",
    ),
    "artifact without a role": (
        manifest(lambda v: first("spectral-keys")(v)["tensors"].pop("mean")),
        "missing ['mean']",
    ),
    "artifact with a parameter too many": (
        manifest(lambda v: first("spectral-keys")(v)["parameters"].update(run="rm -rf")),
        "unknown ['run']",
    ),
    "parameter of another type": (
        manifest(lambda v: first("rope-0")(v)["parameters"].update(dims=[])),
        "dims is [], not int",
    ),
    "rotation tensor missing": (
        tensors(CACHE, lambda a: a.pop("velox.rotation.w64.signs")),
        "which rotation 'w64' needs",
    ),
    "artifact posing as a weight": (
        tensors(CACHE, lambda a: a.update({"model.norm.weight": mx.ones(64)})),
        f"{CACHE}: tensor 'model.norm.weight' does not belong there",
    ),
    "weight posing as an artifact": (
        tensors(WEIGHTS, lambda a: a.update({"velox.x.y": mx.ones(64)})),
        f"{WEIGHTS}: tensor 'velox.x.y' does not belong there",
    ),
    "no files at all": (manifest(lambda v: v.update(files={})), "has no tensor"),
    "weights marked optional": (
        manifest(lambda v: v["files"][WEIGHTS].update(optional=True)),
        "is marked optional",
    ),
    "weights not listed": (
        manifest(lambda v: v["files"].pop(WEIGHTS)),
        "lists no weight file, and the encoding is not overlay",
    ),
}


def other_shard(path: Path) -> None:
    """A second, vouched-for weight file that holds a tensor of the first."""
    write_arrays(path / "model-00002-of-00002.safetensors", {"model.norm.weight": mx.ones(64)})
    relisted(path, "model-00002-of-00002.safetensors")


AT_OPEN["tensor in two files"] = (other_shard, "'model.norm.weight' is in another file too")


def flip(name: str, at: int) -> Damage:
    """Flip one bit of a file."""

    def damage(path: Path) -> None:
        data = bytearray((path / name).read_bytes())
        data[at] ^= 1
        (path / name).write_bytes(data)

    return damage


def unaligned(path: Path) -> None:
    arrays = read_arrays(path / WEIGHTS)
    mx.eval(arrays)
    mx.save_safetensors(str(path / WEIGHTS), arrays)
    relisted(path, WEIGHTS)


# What a load need not notice, and `verify` must.
AT_VERIFY: dict[str, tuple[Damage, str]] = {
    "a bit of a weight": (flip(WEIGHTS, PAGE + 5), f"{WEIGHTS}: is damaged: sha256"),
    "the last bit of the padding": (flip(WEIGHTS, -1), f"{WEIGHTS}: is damaged: sha256"),
    "a bit of the config": (flip("config.json", 3), "config.json: is damaged: sha256"),
    "NaN in an artifact": (
        tensors(CACHE, lambda a: a.update({"velox.qfilters.filters": mx.full((2, 2, 16), np.nan)})),
        "artifact 'qfilters': qfilters: filters holds NaN",
    ),
    "widths above 8": (
        tensors(CACHE, lambda a: a.update({"velox.widths-3.keys": mx.full((2, 16), 9, mx.uint8)})),
        "a width above 8 bits",
    ),
    "tensors off their pages": (unaligned, "does not start on a page of 16384 bytes"),
    "a stray weight file": (
        lambda p: write_arrays(p / "model-evil.safetensors", {"x": mx.ones(1)}),
        "model-evil.safetensors: is not listed in velox.json; remove it",
    ),
    "a stray Python file": (
        lambda p: (p / "velox_model.py").write_text("import os"),
        "velox_model.py: is not listed in velox.json; remove it",
    ),
    "an index that names another file": (
        file(INDEX, lambda data: data.replace(WEIGHTS.encode(), b"model-9.safetensors", 1)),
        "is not in the file that it names",
    ),
    "an index without a map": (file(INDEX, lambda _: b"{}"), "is not an index of weight files"),
    "an index of lists": (
        file(INDEX, lambda _: b'{"weight_map": {"a": ["b"]}}'),
        "is not an index of weight files",
    ),
}


@pytest.mark.parametrize("name", AT_OPEN)
def test_found_on_opening(name: str, bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damage, message = AT_OPEN[name]
    damage(bundle)

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a damaged bundle reached mx.load")

    monkeypatch.setattr(mx, "load", never)
    with pytest.raises(BundleError) as caught:
        open_bundle(bundle)
    assert message in str(caught.value)
    for level in ("size", "sha256"):
        found = verify(bundle, level)  # type: ignore[arg-type]
        assert any(message in line for line in found)
        assert all("\n" not in line and len(line) < 500 for line in found)


@pytest.mark.parametrize("name", AT_VERIFY)
def test_found_by_verify(name: str, bundle: Path) -> None:
    damage, message = AT_VERIFY[name]
    damage(bundle)
    open_bundle(bundle)
    assert verify(bundle, "size") == []
    found = verify(bundle)
    assert any(message in line for line in found), found
    assert all("\n" not in line for line in found)
    with pytest.raises(BundleError):
        open_bundle(bundle, verify="sha256")


def test_verify_lists_everything(bundle: Path) -> None:
    flip("config.json", 3)(bundle)
    cut(CACHE, 1)(bundle)
    (bundle / INDEX).unlink()
    assert [line.split(":")[0] for line in verify(bundle)] == ["config.json", CACHE, INDEX]


def test_a_file_that_lies_after_opening(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = open_bundle(bundle)
    lie(bundle)
    monkeypatch.setattr(mx, "load", None)
    with pytest.raises(BundleError, match="lies about its size"):
        opened.weights()


def test_nothing_of_a_bundle_is_executed(bundle: Path, tmp_path: Path) -> None:
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\n"
    for name in ("velox_model.py", "conftest.py", "__init__.py", "sitecustomize.py"):
        (bundle / name).write_text(code)
    open_bundle(bundle).artifacts_for()
    verify(bundle)
    assert not (tmp_path / "ran").exists()
