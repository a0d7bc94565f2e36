"""Conversion: same input, same bytes; whole or not at all; every kind of source."""

import hashlib
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

import velox_pack
from commands import python, snapshot, start_python
from velox_pack import conversion, job
from velox_pack.conversion import convert
from velox_pack.manifests import place
from velox_pack.manifests.bundle import open_bundle, verify
from velox_pack.manifests.errors import BundleError, CalibrationError, RecipeError
from velox_pack.manifests.names import CACHE_FILE

FAST = {"caches": ["turboquant-mse"]}  # needs no calibration
CALIBRATED = {"calibration_tokens": 128}


def digests(folder: Path) -> dict[str, str]:
    return {n: hashlib.sha256(data).hexdigest() for n, data in snapshot(folder).items()}


# --- same input, same bytes ----------------------------------------------------------------------

CONVERT = """
import sys
from velox_pack import convert
convert(sys.argv[1], sys.argv[2], calibration_tokens=512, caches=sys.argv[3:])
"""
EVERY_KIND = [
    "ratequant+spectral:bits=4", "affine:group=32", "vecinfer", "commvq", "rabitq", "kvquant",
    "palu",
]  # fmt: skip


def test_same_input_same_bytes(tiny_model, tmp_path: Path) -> None:
    """In processes with other hash seeds and numbers of threads, and in this one."""
    source = tiny_model("llama", anisotropic=True)
    copy = tmp_path / "elsewhere" / source.name
    shutil.copytree(source, copy)
    seeds = {"1": source, "2": copy}
    for seed, folder in seeds.items():
        names = ("PYTHONHASHSEED", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        environment = os.environ | dict.fromkeys(names, seed)
        done = python(CONVERT, folder, tmp_path / seed, *EVERY_KIND, env=environment)
        assert done.code == 0, done.err
    first = digests(tmp_path / "1")
    assert {"velox.json", "README.md", CACHE_FILE, "model-00001-of-00001.safetensors"} <= set(first)
    assert digests(tmp_path / "2") == first
    convert(source, tmp_path / "3", caches=EVERY_KIND, calibration_tokens=512)
    assert digests(tmp_path / "3") == first
    # The premise: bytes do depend on what goes in.
    convert(source, tmp_path / "4", caches=EVERY_KIND, seed=1, calibration_tokens=512)
    changed = {n for n, d in digests(tmp_path / "4").items() if first[n] != d}
    assert changed == {"velox.json", CACHE_FILE, "model-00001-of-00001.safetensors"}


def test_what_the_manifest_says(demo_bundle: Path) -> None:
    manifest = open_bundle(demo_bundle).manifest
    assert (manifest.source.kind, manifest.source.repo) == ("demo", None)
    assert manifest.calibration is not None
    assert (manifest.calibration.text, manifest.calibration.tokens) == ("built-in", 1024)
    assert [c.name for c in manifest.caches] == ["ratequant+joint-spectral"]
    assert manifest.default_cache == "ratequant+joint-spectral"
    assert {a.kind for a in manifest.artifacts} == {
        "allocation", "codebook", "joint-spectral", "qfilters", "rope", "widths",
    }  # fmt: skip
    assert manifest.weights.encoding == "affine"
    assert len(manifest.weights.packed) == 42
    assert [(k.path, k.reason) for k in manifest.weights.kept] == [
        ("model.embed_tokens", "embedding")
    ]
    assert manifest.measured is None
    assert str(demo_bundle.parent) not in (demo_bundle / "velox.json").read_text()
    assert verify(demo_bundle) == []


# --- capture only where it is needed -------------------------------------------------------------


def test_data_free_recipes_skip_capture(
    tiny_model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise AssertionError("captured")

    monkeypatch.setattr("velox_pack.seen.capture", fail)
    monkeypatch.setattr(job, "_tokenize", fail)
    convert(tiny_model("llama"), tmp_path / "b", caches=["turboquant-mse", "affine:group=32"])
    manifest = open_bundle(tmp_path / "b").manifest
    assert manifest.calibration is None
    assert {a.kind for a in manifest.artifacts} == {"codebook", "rope", "rotation", "widths"}


def test_a_text_that_is_given_is_used(tiny_model, tmp_path: Path) -> None:
    text = tmp_path / "my text.txt"
    text.write_text("It was a bright cold day in April. " * 100)
    options = FAST | CALIBRATED
    convert(tiny_model("llama"), tmp_path / "b", calibration=text, **options)
    manifest = open_bundle(tmp_path / "b").manifest
    assert manifest.calibration is not None
    assert manifest.calibration.text == "my text.txt"
    assert manifest.calibration.text_sha256 == hashlib.sha256(text.read_bytes()).hexdigest()
    assert "qfilters" in {a.kind for a in manifest.artifacts}


@pytest.mark.parametrize("tokens", [1, 8, 15, 16, 100, 700])
def test_any_number_of_tokens(tiny_model, tmp_path: Path, tokens: int) -> None:
    """Few tokens are one short sequence, in whole tiles, or refused in one line."""
    options = {"caches": ["spectral"], "calibration_tokens": tokens}
    if tokens < 16:
        with pytest.raises(CalibrationError, match=r"^.*token.*$"):
            convert(tiny_model("llama"), tmp_path / "b", **options)
        assert not list(tmp_path.iterdir())
        return
    convert(tiny_model("llama"), tmp_path / "b", **options)
    found = open_bundle(tmp_path / "b").manifest.calibration
    assert found is not None
    assert found.tokens == {16: 16, 100: 96, 700: 512}[tokens]


def test_sequences_fit_the_model(tiny_model, tmp_path: Path) -> None:
    """gpt2 looks positions up in a table; beyond its end there is nothing but NaN."""
    convert(tiny_model("gpt2"), tmp_path / "b", caches=["spectral"], calibration_tokens=512)
    found = open_bundle(tmp_path / "b").manifest.calibration
    assert found is not None
    assert (found.sequence_length, found.sequences) == (128, 4)


# --- whole or not at all -------------------------------------------------------------------------


def test_an_existing_destination_is_untouched(tiny_model, tmp_path: Path) -> None:
    out = convert(tiny_model("llama"), tmp_path / "b", **FAST)
    before = snapshot(tmp_path)
    with pytest.raises(BundleError, match="pass --overwrite"):
        convert(tiny_model("llama", seed=1), out, **FAST)
    assert snapshot(tmp_path) == before
    convert(tiny_model("llama", seed=1), out, overwrite=True, **FAST)
    assert verify(out) == []
    assert snapshot(tmp_path).keys() == before.keys()
    assert snapshot(tmp_path) != before


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize(
    "error", [RuntimeError("broken"), KeyboardInterrupt(), OSError(28, "full")]
)
@pytest.mark.parametrize("where", ["calibrate", "card"])
def test_a_failure_leaves_nothing_and_loses_nothing(
    tiny_model, tmp_path: Path, monkeypatch, overwrite: bool, error: BaseException, where: str
) -> None:
    out = tmp_path / "b"
    if overwrite:
        convert(tiny_model("llama"), out, **FAST)
    before = snapshot(tmp_path)

    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr(conversion, where, fail)
    with pytest.raises(type(error)):
        convert(tiny_model("llama"), out, overwrite=overwrite, **FAST)
    assert snapshot(tmp_path) == before
    assert [p.name for p in tmp_path.iterdir()] == (["b"] if overwrite else [])


# The child stops where it is told to, says so, and waits to be shot.
STOP = """
import sys, time
from velox_pack import conversion
from velox_pack.manifests import place, writer
source, out, where = sys.argv[1:]
def stop(*args, **kwargs):
    print("here", flush=True)
    time.sleep(60)
if where == "writing":
    conversion.weight_plans.write = stop
elif where == "swapped":  # the new bundle is in place, the old one still lies about
    place.sync = stop
conversion.convert(source, out, overwrite=True, caches=["turboquant-mse"])
"""


@pytest.mark.parametrize(
    ("where", "sent", "code"),
    [
        ("writing", signal.SIGTERM, 143),
        ("writing", signal.SIGKILL, -signal.SIGKILL),
        ("swapped", signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_a_killed_run_leaves_a_whole_bundle(
    tiny_model, tmp_path: Path, where: str, sent: int, code: int
) -> None:
    source, out = tiny_model("llama"), tmp_path / "b"
    convert(source, out, weights="keep", **FAST)
    before = snapshot(out)
    process = start_python(STOP, source, out, where)
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n", process.communicate()[1]
    process.send_signal(sent)
    process.communicate(timeout=60)
    assert process.returncode == code
    assert verify(out) == []
    assert (snapshot(out) == before) == (where == "writing")
    left = {p.name for p in tmp_path.iterdir()} - {"b"}
    assert all(name.startswith(".b.velox-") for name in left)  # nobody ever reads those
    assert not left or sent == signal.SIGKILL
    convert(source, out, overwrite=True, **FAST)
    assert verify(out) == []


def test_the_disk_is_looked_at_before_anything_slow(
    tiny_model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil._ntuple_diskusage(10**9, 10**9 - 1000, 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(conversion, "calibrate", lambda *args: pytest.fail("work was done"))
    with pytest.raises(BundleError, match=r"needs \d+ bytes .* the disk has 1000 free"):
        convert(tiny_model("llama"), tmp_path / "b")
    assert not list(tmp_path.iterdir())


def test_checks_come_before_a_download(hub, tmp_path: Path) -> None:
    """What the arguments alone can tell is told before the Hub is asked."""
    bad: list[dict[str, Any]] = [
        {"caches": ["nonsense"]},
        {"weights": "nonsense"},
        {"calibration": tmp_path / "nowhere.txt"},
    ]
    for options in bad:
        with pytest.raises(velox_pack.VeloxError):
            convert("org/tiny", tmp_path / "b", **options)
    (tmp_path / "taken").mkdir()
    with pytest.raises(BundleError):
        convert("org/tiny", tmp_path / "taken")
    assert hub.requests == []


# --- what is reported ----------------------------------------------------------------------------


def test_progress_says_each_thing_once(tiny_model, tmp_path: Path) -> None:
    lines: list[str] = []
    convert(tiny_model("llama"), tmp_path / "b", report=lines.append, **FAST)
    assert lines == [
        "hashing llama",
        "writing 71 tensors, 0.3 MB",
        *(f"packing model.layers.{i}" for i in range(3)),
    ]


def test_recipes_are_checked_against_every_layer(tiny_model, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"layer 0: .*group=64 does not divide the head dim 32"):
        job.plan(tiny_model("llama"), tmp_path / "b", caches=["affine"])


def test_one_plan_is_not_given_twice(tiny_model, tmp_path: Path) -> None:
    twice = ["spectral", "spectral: bits=3"]
    with pytest.raises(RecipeError, match="given twice"):
        job.plan(tiny_model("llama"), tmp_path / "b", caches=twice)


def test_exchange_is_tried_before_two_renames(tmp_path: Path) -> None:
    """On Linux and macOS the swap is one step; the test above would pass by luck without it."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "x").touch()
    if not place._exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this file system cannot exchange two folders")
    assert (tmp_path / "b" / "x").exists()


@pytest.mark.parametrize("options", [{"calibration_tokens": 32}, {"window": 600}])
def test_ratequant_needs_tokens_behind_the_window(
    tiny_model, tmp_path: Path, options: dict[str, int]
) -> None:
    window = options.pop("window", 24)
    with pytest.raises(CalibrationError, match="at least"):
        convert(
            tiny_model("llama"),
            tmp_path / "b",
            caches=[f"ratequant+spectral:window={window}"],
            **options,
        )
    assert not list(tmp_path.iterdir())
