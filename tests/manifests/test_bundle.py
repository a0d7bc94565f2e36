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
from bundles import make_artifacts, make_bundle, make_rotations, make_weights

from velox_pack.manifests import checks
from velox_pack.manifests.aligned import write_arrays
from velox_pack.manifests.bundle import open_bundle, read_manifest, verify, write_measured
from velox_pack.manifests.errors import BundleError, RecipeError
from velox_pack.manifests.names import CACHE_FILE


def test_everything_comes_back(bundle_path: Path) -> None:
    bundle = open_bundle(bundle_path)
    assert verify(bundle_path) == verify(bundle_path, "size") == []
    for key, fitted in make_artifacts().items():
        again = bundle.artifact(key)
        assert type(again) is type(fitted)
        assert (again.parameters(), again.layers) == (fitted.parameters(), fitted.layers)
        for role, array in fitted.to_tensors().items():
            assert np.array_equal(again.to_tensors()[role], array)
    weights = bundle.weights()
    assert weights.keys() == make_weights().keys()
    for name, array in make_weights().items():
        assert weights[name].dtype == array.dtype
        assert mx.array_equal(weights[name], array)
    for name, matrix in make_rotations().items():
        assert np.array_equal(bundle.rotation("w64")[name.rpartition(".")[2]], matrix)
    assert [p.name for p in bundle.weight_files] == ["model-00001-of-00001.safetensors"]


def test_plans(bundle_path: Path) -> None:
    bundle = open_bundle(bundle_path)
    assert bundle.cache_plan() == bundle.cache_plan("spectral:bits=3")
    assert list(bundle.artifacts_for()) == [
        "codebook-gaussian",
        "rope-0",
        "spectral-keys",
        "widths-3",
    ]
    assert bundle.artifacts_for("qfilters") == {"qfilters": bundle.artifact("qfilters")}
    assert bundle.artifact("qfilters") is bundle.artifact("qfilters")
    with pytest.raises(RecipeError, match="no cache 'kivi'; it has: spectral:bits=3, qfilters"):
        bundle.cache_plan("kivi")
    with pytest.raises(BundleError, match="no artifact 'x'; it has: allocation-3"):
        bundle.artifact("x")
    with pytest.raises(BundleError, match="no rotation 'x'"):
        bundle.rotation("x")


def test_opening_hashes_nothing_and_reads_no_tensor(
    bundle_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("must not be called")

    monkeypatch.setattr(checks, "sha256_file", never)
    monkeypatch.setattr(mx, "load", never)
    bundle = open_bundle(bundle_path)
    assert bundle.manifest.version == (1, 0)
    with pytest.raises(AssertionError):
        open_bundle(bundle_path, verify="sha256")


def test_same_input_same_bytes(tmp_path: Path) -> None:
    first = make_bundle(tmp_path / "a")
    second = make_bundle(tmp_path / "b", order=-1)
    assert first == second
    names = [*first.files, "velox.json"]
    assert all(
        (tmp_path / "a" / n).read_bytes() == (tmp_path / "b" / n).read_bytes() for n in names
    )
    assert open_bundle(tmp_path / "a").fingerprint == open_bundle(tmp_path / "b").fingerprint


def test_progress_tells_every_byte(bundle_path: Path) -> None:
    seen: dict[str, int] = {}

    def progress(name: str, count: int) -> None:
        seen[name] = seen.get(name, 0) + count

    assert verify(bundle_path, "sha256", progress) == []
    manifest = read_manifest(bundle_path)
    assert seen == {n: f.bytes for n, f in manifest.files.items() if not f.optional}


def test_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="no such folder"):
        open_bundle(tmp_path / "none")
    with pytest.raises(BundleError, match=r"not a velox-pack bundle \(it has no velox.json\)"):
        open_bundle(tmp_path)
    assert len(verify(tmp_path)) == 1


def hub_snapshot(bundle: Path, cache: Path) -> Path:
    """The same bundle as the Hub's client would lay it out: a folder of links to blobs."""
    repo = cache / "models--me--tiny"
    snapshot = repo / "snapshots" / ("0" * 40)
    (repo / "blobs").mkdir(parents=True)
    for path in sorted(bundle.rglob("*")):
        if path.is_file():
            blob = repo / "blobs" / f"{len(list((repo / 'blobs').iterdir())):040x}"
            shutil.copyfile(path, blob)
            link = snapshot / path.relative_to(bundle)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(os.path.relpath(blob, link.parent))
    return snapshot


def test_snapshot_in_the_hub_cache(bundle_path: Path, tmp_path: Path) -> None:
    snapshot = hub_snapshot(bundle_path, tmp_path / "hub")
    assert verify(snapshot) == []
    assert open_bundle(snapshot).fingerprint == open_bundle(bundle_path).fingerprint
    # The whole cache may be a link to another disk.
    (tmp_path / "elsewhere").symlink_to(tmp_path / "hub")
    assert verify(tmp_path / "elsewhere" / snapshot.relative_to(tmp_path / "hub")) == []
    # But links go to this repository's blobs only.
    (snapshot / "config.json").unlink()
    other = tmp_path / "hub" / "models--you--x" / "blobs" / "0"
    other.parent.mkdir(parents=True)
    other.write_text('{"model_type": "llama"}')
    (snapshot / "config.json").symlink_to(other)
    assert verify(snapshot) == [
        "config.json: is a link out of the bundle; put the file itself there"
    ]


def test_measured_changes_nothing_else(bundle_path: Path) -> None:
    before = open_bundle(bundle_path)
    old = {name: (bundle_path / name).read_bytes() for name in before.manifest.files}
    card = b"# tiny, measured\n"
    returned = write_measured(
        bundle_path, {"kl": 0.01}, {"README.md": card, "plots/kl.png": b"picture"}
    )
    after = open_bundle(bundle_path)
    assert after.manifest == returned
    assert after.manifest.measured == {"kl": 0.01}
    assert after.fingerprint == before.fingerprint
    assert verify(bundle_path) == []
    assert (bundle_path / "README.md").read_bytes() == card
    for name in set(old) - {"README.md"}:
        assert (bundle_path / name).read_bytes() == old[name]
    assert not [p for p in bundle_path.rglob("*") if p.name.startswith(".")]
    write_measured(bundle_path, None)
    assert read_manifest(bundle_path).measured is None


@pytest.mark.parametrize("name", ["config.json", "../README.md", "plots/../config.json", "x.py"])
def test_measured_touches_optional_files_only(bundle_path: Path, name: str) -> None:
    with pytest.raises(BundleError, match="may change after convert"):
        write_measured(bundle_path, {}, {name: b""})


def test_measured_nan_leaves_the_bundle_alone(bundle_path: Path) -> None:
    before = (bundle_path / "velox.json").read_bytes()
    with pytest.raises(BundleError, match="cannot be written"):
        write_measured(bundle_path, {"kl": float("nan")}, {"README.md": b"new"})
    assert (bundle_path / "velox.json").read_bytes() == before
    assert (bundle_path / "README.md").read_bytes() != b"new"


def edit(path: Path, change: Callable[[Any], None]) -> None:
    value = json.loads((path / "velox.json").read_text())
    change(value)
    (path / "velox.json").write_text(json.dumps(value))


def test_kinds_of_a_newer_minor_version(bundle_path: Path) -> None:
    def change(value: Any) -> None:
        value["version"] = [1, 4]
        next(a for a in value["artifacts"] if a["id"] == "qfilters")["kind_version"] = 2
        next(a for a in value["artifacts"] if a["id"] == "widths-3")["kind"] = "novel"

    edit(bundle_path, change)
    bundle = open_bundle(bundle_path)
    for key in ("qfilters", "widths-3"):
        with pytest.raises(BundleError, match="does not read; upgrade velox-pack"):
            bundle.artifact(key)
    bundle.artifact("spectral-keys")
    with pytest.raises(BundleError, match="newer format"):
        write_measured(bundle_path, {})


def test_optional_files_may_go_or_change(bundle_path: Path) -> None:
    (bundle_path / "README.md").write_text("edited by hand")
    shutil.rmtree(bundle_path / "plots")
    assert verify(bundle_path) == []


def said(call: Callable[[], object]) -> str:
    with pytest.raises(BundleError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_errors_name_the_file_by_its_full_path(bundle_path: Path) -> None:
    bundle = open_bundle(bundle_path)
    cache, weights = (bundle_path / f for f in (CACHE_FILE, "model-00001-of-00001.safetensors"))
    assert said(lambda: bundle.artifact("x")).startswith(f"{bundle_path}/velox.json: has no art")
    assert said(lambda: bundle.rotation("x")).startswith(f"{bundle_path}/velox.json: has no rot")
    assert said(lambda: bundle.tensors("x")) == said(lambda: bundle.artifact_record("x"))
    # Damage after opening.
    for file in (cache, weights):
        os.truncate(file, 100)
    for call in (lambda: bundle.artifact("rope-0"), lambda: bundle.tensors("rope-0")):
        assert said(call).startswith(f"{cache}: is truncated: its header")
    assert said(bundle.artifacts_for).startswith(f"{cache}: is truncated")
    assert said(bundle.weights).startswith(f"{weights}: is truncated")
    # And before: the lines of `verify` are the same, less the folder.
    line = f"{weights.name}: is truncated: 100 bytes, expected 81920; get it again"
    assert line in verify(bundle_path)
    assert said(lambda: open_bundle(bundle_path)) == f"{bundle_path}/{verify(bundle_path)[0]}"
    (bundle_path / "velox.json").write_text("{")
    (line,) = verify(bundle_path)
    assert line.startswith("velox.json: is not JSON")
    assert said(lambda: open_bundle(bundle_path)) == f"{bundle_path}/{line}"


def test_a_missing_weight_and_a_misfit_artifact_name_the_bundle(bundle_path: Path) -> None:
    bundle = open_bundle(bundle_path)

    def change(value: Any) -> None:
        layer = value["weights"]["packed"]["model.layers.0.mlp.up_proj"]
        value["weights"]["packed"] = {"model.layers.7.mlp.up_proj": layer}

    edit(bundle_path, change)
    assert said(lambda: open_bundle(bundle_path)).startswith(
        f"{bundle_path}/model*.safetensors: has no tensor 'model.layers.7.mlp.up_proj.codes'"
    )
    (bundle_path / CACHE_FILE).unlink()
    write_arrays(
        bundle_path / CACHE_FILE,
        {name: np.zeros(3, np.float32) for r in bundle.manifest.artifacts
         for name in r.tensors.values()},
    )  # fmt: skip
    assert said(lambda: bundle.artifact("qfilters")) == (
        f"{bundle_path}/{CACHE_FILE}: 'qfilters': artifact of kind qfilters: "
        "filters has shape [3], not [L, H, D]"
    )


@pytest.mark.parametrize("name", [CACHE_FILE, "velox.json"])
def test_a_file_that_may_not_be_read(
    bundle_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    real = open

    def refuse(file: Any, *args: Any, **options: Any) -> Any:
        if file == bundle_path / name:  # chmod would not stop root
            raise PermissionError(13, "Permission denied", str(file))
        return real(file, *args, **options)

    monkeypatch.setattr("builtins.open", refuse)
    line = f"{name}: cannot be read (Permission denied)"
    assert verify(bundle_path, "size") == [line]
    assert said(lambda: open_bundle(bundle_path)) == f"{bundle_path}/{line}"


def test_nan_in_an_artifact_is_found(tmp_path: Path) -> None:
    from velox_pack.manifests.aligned import spec_of
    from velox_pack.manifests.files import sha256_file
    from velox_pack.manifests.header import read_header

    path = tmp_path / "b"
    make_bundle(path)
    file = path / "model-velox-cache.safetensors"
    entry = read_header(file)["velox.qfilters.filters"]
    assert spec_of(make_artifacts()["qfilters"].to_tensors()["filters"]).shape == entry.shape
    with open(file, "r+b") as handle:
        handle.seek(entry.start)
        handle.write(np.float32(np.nan).tobytes())
    assert "is damaged: sha256" in verify(path)[0]
    edit(path, lambda v: v["files"][file.name].update(sha256=sha256_file(file)))
    assert verify(path, "size") == []
    assert verify(path) == [
        f"{file.name}: artifact 'qfilters': qfilters: filters holds NaN or infinity"
    ]
