"""`--reuse`: the same bytes as without, and nothing run that need not be."""

from pathlib import Path

import pytest

from commands import snapshot
from velox_pack.conversion import convert
from velox_pack.manifests.errors import BundleError
from velox_pack.manifests.names import CACHE_FILE

CACHES = ["ratequant+spectral", "rabitq"]
SMALL = {"calibration_tokens": 512, "weights": "keep"}


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert("demo", tmp_path_factory.mktemp("old") / "bundle", caches=CACHES, **SMALL)


def refuse(*args: object, **kwargs: object) -> None:
    raise AssertionError("the model was run")


def test_all_is_taken_over_and_nothing_run(
    old: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("velox_pack.seen.Seen.streaming", refuse)
    said: list[str] = []
    convert("demo", tmp_path / "b", caches=CACHES, reuse=old, report=said.append, **SMALL)
    line = next(s for s in said if s.startswith("taken over"))
    for name in ("spectral-keys", "qfilters", "rabitq-keys", "widths"):
        assert name in line
    assert "anew" not in line
    assert snapshot(tmp_path / "b") == snapshot(old)


def test_what_is_new_is_made_as_without_reuse(old: Path, tmp_path: Path) -> None:
    caches = ["spectral:bits=4", "rabitq:centroids=16", "ratequant+spectral"]
    said: list[str] = []
    convert("demo", tmp_path / "b", caches=caches, reuse=old, report=said.append, **SMALL)
    line = next(s for s in said if s.startswith("taken over"))
    taken, _, anew = line.partition("made anew: ")
    assert "spectral-keys" in taken
    assert "rabitq-keys-centroids-16" in anew
    assert "widths-plan-spectral" in anew
    convert("demo", tmp_path / "c", caches=caches, **SMALL)
    assert snapshot(tmp_path / "b") == snapshot(tmp_path / "c")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"seed": 1}, "text, tokens, seed or options"),
        ({"calibration_tokens": 256}, "text, tokens, seed or options"),
    ],
)
def test_nothing_is_taken_over_when_inputs_differ(
    old: Path, tmp_path: Path, change: dict[str, object], why: str
) -> None:
    said: list[str] = []
    options = SMALL | change
    convert("demo", tmp_path / "b", caches=["spectral"], reuse=old, report=said.append, **options)
    assert why in next(s for s in said if s.startswith("nothing of"))


def test_other_weights(old: Path, tiny_model, tmp_path: Path) -> None:
    said: list[str] = []
    convert(tiny_model("llama"), tmp_path / "b", caches=["spectral"], calibration_tokens=128,
            reuse=old, report=said.append)  # fmt: skip
    assert "other weights (demo)" in next(s for s in said if s.startswith("nothing of"))


def test_a_damaged_bundle_is_not_taken_from(old: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "old"
    damaged.mkdir()
    for name, data in snapshot(old).items():
        (damaged / name).write_bytes(data)
    data = bytearray((damaged / CACHE_FILE).read_bytes())
    data[-1] ^= 1
    (damaged / CACHE_FILE).write_bytes(data)
    with pytest.raises(BundleError, match=CACHE_FILE):
        convert("demo", tmp_path / "b", caches=["spectral"], reuse=damaged, **SMALL)
    with pytest.raises(BundleError):
        convert("demo", tmp_path / "b", caches=["spectral"], reuse=tmp_path / "none", **SMALL)
    assert not (tmp_path / "b").exists()
