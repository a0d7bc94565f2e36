from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from bundles import fill, make_artifacts, make_bundle, make_manifest, make_rotations, make_weights

from velox_pack.manifests import files, place
from velox_pack.manifests.aligned import TensorSpec, spec_of
from velox_pack.manifests.bundle import verify
from velox_pack.manifests.errors import BundleError
from velox_pack.manifests.files import require_space
from velox_pack.manifests.manifest import Manifest
from velox_pack.manifests.place import check_destination
from velox_pack.manifests.writer import BundleWriter


def listing(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def build(out: Path, action: Callable[[BundleWriter], object], *, overwrite: bool = False) -> None:
    with BundleWriter(out, overwrite=overwrite) as writer:
        action(writer)


def test_finish_fills_files_and_leaves_one_folder(tmp_path: Path) -> None:
    manifest = make_bundle(tmp_path / "b")
    assert listing(tmp_path) == ["b"]
    assert set(manifest.files) == set(snapshot(tmp_path / "b")) - {"velox.json"}
    assert {n for n, f in manifest.files.items() if f.optional} == {"README.md", "plots/bits.png"}
    assert all(f.bytes == (tmp_path / "b" / n).stat().st_size for n, f in manifest.files.items())
    assert verify(tmp_path / "b") == []


def test_nothing_shows_before_the_end(tmp_path: Path) -> None:
    with BundleWriter(tmp_path / "b") as writer:
        manifest = fill(writer)
        assert listing(tmp_path) == [f".b.velox-tmp-{os.getpid()}"]
        assert not (writer.folder / "velox.json").exists()
        writer.finish(manifest)
        assert listing(tmp_path) == ["b"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("overwrite", [False, True])
def test_failure_leaves_nothing_and_loses_nothing(
    tmp_path: Path, error: type[BaseException], overwrite: bool
) -> None:
    out = tmp_path / "b"
    if overwrite:
        make_bundle(out)
    before = snapshot(tmp_path)

    def fail(writer: BundleWriter) -> None:
        fill(writer)
        raise error

    with pytest.raises(error):
        build(out, fail, overwrite=overwrite)
    assert snapshot(tmp_path) == before
    assert listing(tmp_path) == (["b"] if overwrite else [])


def test_without_finish_nothing_is_left(tmp_path: Path) -> None:
    with BundleWriter(tmp_path / "b") as writer:
        fill(writer)
    assert listing(tmp_path) == []


@pytest.mark.parametrize("failing", [1, 2])
@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyboardInterrupt()])
def test_old_bundle_survives_a_failed_swap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int, error: BaseException
) -> None:
    out = tmp_path / "b"
    make_bundle(out)
    (out / "plots" / "old.png").write_bytes(b"old")
    before = snapshot(tmp_path)
    calls = 0
    rename = place._rename

    def fail(source: Path, target: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == failing:
            raise error
        rename(source, target)

    monkeypatch.setattr(place, "_rename", fail)
    monkeypatch.setattr(place, "_exchange", lambda one, other: False)
    with pytest.raises((OSError, KeyboardInterrupt)):
        make_bundle(out, overwrite=True)
    assert snapshot(tmp_path) == before
    assert listing(tmp_path) == ["b"]


@pytest.mark.parametrize("exchange", [True, False])
def test_overwrite_replaces_the_whole_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    if not exchange:
        monkeypatch.setattr(place, "_exchange", lambda one, other: False)
    out = tmp_path / "b"
    make_bundle(out)
    fresh = snapshot(out)
    (out / "plots" / "old.png").write_bytes(b"old")
    (out / "config.json").write_text("damaged")
    make_bundle(out, overwrite=True)
    assert snapshot(out) == fresh
    assert listing(tmp_path) == ["b"]


def test_destinations_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(out: Path, overwrite: bool = True) -> str:
        before = snapshot(tmp_path)
        with pytest.raises(BundleError) as caught:
            check_destination(out, overwrite=overwrite)
        with pytest.raises(BundleError), BundleWriter(out, overwrite=overwrite):
            raise AssertionError("must not get here")
        assert snapshot(tmp_path) == before
        assert "\n" not in str(caught.value)
        return str(caught.value)

    make_bundle(tmp_path / "b")
    assert "pass --overwrite" in refused(tmp_path / "b", overwrite=False)
    (tmp_path / "precious").mkdir()
    assert "pass --overwrite" in refused(tmp_path / "precious", overwrite=False)
    (tmp_path / "precious" / "thesis.tex").write_text("years of work")
    assert "it has no velox.json" in refused(tmp_path / "precious")
    (tmp_path / "file").write_text("x")
    assert "is a file" in refused(tmp_path / "file")
    assert "does not exist; make it first" in refused(tmp_path / "none" / "b")
    assert "does not exist" in refused(tmp_path / "file" / "b")
    (tmp_path / "b" / ".git").mkdir()
    assert "also holds .git" in refused(tmp_path / "b")
    (tmp_path / "b" / ".git").rmdir()
    (tmp_path / "b" / "velox.json").write_text("{")
    assert "cannot be read, so it is not overwritten" in refused(tmp_path / "b")
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "cannot be written to" in refused(tmp_path / "new")


def test_an_empty_folder_may_be_overwritten(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    make_bundle(tmp_path / "b", overwrite=True)
    assert verify(tmp_path / "b") == []


def test_destination_that_appears_meanwhile(tmp_path: Path) -> None:
    def action(writer: BundleWriter) -> None:
        manifest = fill(writer)
        (tmp_path / "b").mkdir()
        (tmp_path / "b" / "x").write_text("somebody else's")
        writer.finish(manifest)

    with pytest.raises(BundleError, match="exists already"):
        build(tmp_path / "b", action)
    assert snapshot(tmp_path) == {"b/x": b"somebody else's"}


def test_leftovers_of_killed_runs_are_left_alone(tmp_path: Path) -> None:
    for name in (f".b.velox-tmp-{os.getpid()}", f".b.velox-old-{os.getpid()}", ".b.velox-tmp-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text("left")
    make_bundle(tmp_path / "b")
    make_bundle(tmp_path / "b", overwrite=True)
    assert len(listing(tmp_path)) == 4
    assert verify(tmp_path / "b") == []


def test_missing_tensor_or_contradiction(tmp_path: Path) -> None:
    def missing(writer: BundleWriter) -> None:
        manifest = fill_without(writer, "nothing", write=False)
        writer.finish(manifest)

    def contradiction(writer: BundleWriter) -> None:
        writer.finish(fill(writer).model_copy(update={"default_cache": "none"}))

    def incomplete(writer: BundleWriter) -> None:
        writer.finish(fill_without(writer, "levels"))

    with pytest.raises(ValueError, match=r"16 tensors never came: model.embed"):
        build(tmp_path / "b", missing)
    with pytest.raises(BundleError, match="none of the caches"):
        build(tmp_path / "b", contradiction)
    with pytest.raises(BundleError, match=r"would be damaged: model.*: has no tensor .*levels"):
        build(tmp_path / "b", incomplete)
    assert listing(tmp_path) == []


def fill_without(writer: BundleWriter, ending: str, write: bool = True) -> Manifest:
    records = writer.artifacts(make_artifacts(), make_rotations())
    some = {n: a for n, a in make_weights().items() if not n.endswith(ending)}
    weights = writer.weights({n: spec_of(a) for n, a in some.items()})
    for name, array in some.items() if write else ():
        weights.write(name, array)
    return make_manifest(artifacts=records)


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/b/c", ".x", "velox.json"])
def test_names_stay_inside(tmp_path: Path, name: str) -> None:
    with BundleWriter(tmp_path / "b") as writer, pytest.raises(BundleError, match=r"velox.json|pl"):
        writer.path(name)


def test_links_cannot_be_packed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")

    def action(writer: BundleWriter) -> None:
        manifest = fill(writer)
        writer.path("config.json").unlink()
        writer.path("config.json").symlink_to(tmp_path / "secret")
        writer.finish(manifest)

    with pytest.raises(BundleError, match=r"config.json: is not a regular file"):
        build(tmp_path / "b", action)


def test_use_outside_of_with(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not open"):
        BundleWriter(tmp_path / "b").path("x")


def test_disk_space_is_asked_for_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: usage)
    require_space(tmp_path / "not" / "yet" / "there", 1000)
    with pytest.raises(BundleError, match=r"needs 1001 bytes \(0.00 GB\), the disk has 1000 free"):
        require_space(tmp_path, 1001)
    with (
        pytest.raises(BundleError, match="the disk has 1000 free"),
        BundleWriter(tmp_path / "b") as writer,
    ):
        writer.weights({"a": TensorSpec("F32", (1,))})
    assert listing(tmp_path) == []


CHILD = """
import os, signal, sys, time
sys.path.insert(0, sys.argv[1])
from bundles import fill
from velox_pack.manifests.writer import BundleWriter
with BundleWriter(sys.argv[2], overwrite=True) as writer:
    fill(writer)
    print("ready", flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_clean_up(tmp_path: Path, number: int) -> None:
    out = tmp_path / "b"
    make_bundle(out)
    before = snapshot(tmp_path)
    helper = str(Path(__file__).parent)
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, helper, str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        assert len(listing(tmp_path)) == 2
        child.send_signal(number)
        assert child.wait() != 0
    assert snapshot(tmp_path) == before
    assert listing(tmp_path) == ["b"]


def test_sigterm_handler_is_given_back(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with BundleWriter(tmp_path / "b"):
        pass
    assert signal.getsignal(signal.SIGTERM) is before


def test_overlay_stores_no_weights(tmp_path: Path) -> None:
    def action(writer: BundleWriter) -> None:
        writer.path("config.json").write_text("{}")
        records = writer.artifacts(make_artifacts())
        manifest = make_manifest(artifacts=records)
        changes = {"encoding": "overlay", "rotations": {}, "packed": {}, "parameters": {}}
        weights = manifest.weights.model_copy(update=changes)
        writer.finish(manifest.model_copy(update={"weights": weights}))

    build(tmp_path / "b", action)
    assert verify(tmp_path / "b") == []
