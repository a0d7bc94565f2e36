"""Finding the source of a bundle again, without naming anybody's folders in the bundle."""

import os
import shutil
from pathlib import Path

import pytest

from velox_pack import known_sources
from velox_pack.manifests.errors import SourceError
from velox_pack.manifests.manifest import Source as Record
from velox_pack.source import Source, resolve


def record(source: Source) -> Record:
    return Record(
        kind=source.kind,
        repo=source.repo,
        revision=source.revision,
        name=source.name,
        files=source.hashes(),
    )


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_demo_is_always_there(cache: Path) -> None:
    demo = resolve("demo")
    known_sources.remember(demo, demo.hashes())
    assert not cache.exists()
    assert known_sources.find(record(demo)).path == demo.path


def test_local_folders_are_remembered(own_model, cache: Path, monkeypatch) -> None:
    source = resolve(str(own_model("llama")))
    with pytest.raises(SourceError, match="made from the local folder llama, which is not known"):
        known_sources.find(record(source))
    monkeypatch.chdir(source.path.parent)
    relative = resolve("./llama")
    known_sources.remember(relative, relative.hashes())
    monkeypatch.chdir("/")
    assert known_sources.find(record(source)).path == source.path
    assert [p.parent.name for p in cache.rglob("*.json")] == ["sources"]


def test_repos_are_fetched_at_their_commit(hub, tiny_model) -> None:
    hub.add("org/tiny", tiny_model("llama"))
    source = resolve("org/tiny")
    hub.add("org/tiny", tiny_model("llama", seed=1))
    assert known_sources.find(record(source)).revision == source.revision


def test_another_model_is_refused(own_model, tiny_model) -> None:
    source = resolve(str(own_model("llama")))
    wanted = record(source)
    with pytest.raises(SourceError, match="is not the model that the bundle was made from"):
        known_sources.find(wanted, tiny_model("llama", seed=1))
    known_sources.remember(source, source.hashes())
    with (source.path / "model.safetensors").open("r+b") as file:  # the same folder, other weights
        file.seek(-1, os.SEEK_END)
        file.write(b"\x77")
    with pytest.raises(SourceError, match="is not the model that the bundle was made from"):
        known_sources.find(wanted)


def test_a_given_folder_comes_first(own_model, tmp_path: Path) -> None:
    source = resolve(str(own_model("llama")))
    known_sources.remember(source, source.hashes())
    copy = Path(shutil.copytree(source.path, tmp_path / "copy"))
    assert known_sources.find(record(source), copy).path == copy
    with pytest.raises(SourceError, match="no such folder"):
        known_sources.find(record(source), tmp_path / "nowhere")


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"path": 7}', '{"path": "/no/such"}'])
def test_a_damaged_memory_is_no_memory(own_model, cache: Path, text: str) -> None:
    source = resolve(str(own_model("llama")))
    known_sources.remember(source, source.hashes())
    (file,) = cache.rglob("*.json")
    file.write_text(text)
    with pytest.raises(SourceError, match="not known here"):
        known_sources.find(record(source))


def test_a_memory_that_cannot_be_kept_is_no_error(own_model, cache: Path, monkeypatch) -> None:
    source = resolve(str(own_model("llama")))
    cache.write_text("a file where a folder should be")
    known_sources.remember(source, source.hashes())

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    known_sources.remember(source, source.hashes())
    with pytest.raises(SourceError, match="not known here"):
        known_sources.find(record(source))
