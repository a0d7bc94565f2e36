from __future__ import annotations

import os
import socket
import tracemalloc
from contextlib import suppress
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hostile_files import CASES, pack, row
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from velox_pack.manifests.aligned import read_arrays, read_header, write_arrays
from velox_pack.manifests.errors import BundleError

MLX_LOAD = mx.load


@pytest.fixture(autouse=True)
def no_load(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("a file reached mx.load before it passed the strict check")

    monkeypatch.setattr(mx, "load", never)


@pytest.mark.parametrize("name", CASES)
def test_refused_before_anything_is_loaded(name: str, tmp_path: Path) -> None:
    data, message = CASES[name]
    path = tmp_path / "hostile.safetensors"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(BundleError) as caught:
            read_arrays(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    text = str(caught.value)
    assert text.startswith("hostile.safetensors: ")
    assert message in text
    assert "\n" not in text
    assert len(text) < 400
    assert peak < 200_000 + 100 * len(data)


def test_the_honest_file_of_the_cases_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "honest.safetensors"
    path.write_bytes(pack({"a": row(), "b": row(8, 8, shape=(0, 3))}, bytes(8)))
    assert set(read_header(path)) == {"a", "b"}
    path.write_bytes(pack({"__metadata__": None, "b": row(), "a": row(8, 16)}, bytes(16)))
    assert set(read_header(path)) == {"a", "b"}


def test_sparse_file_with_a_header_length_that_fits(tmp_path: Path) -> None:
    path = tmp_path / "sparse.safetensors"
    with open(path, "wb") as file:
        file.write((2**40 - 8).to_bytes(8, "little"))
        file.truncate(2**40)
    with pytest.raises(BundleError, match="more than the 25000000 allowed"):
        read_header(path)


def test_things_that_are_no_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")  # opening it would wait for ever
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "device").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as server:
        here = os.open(".", os.O_RDONLY)
        os.chdir(tmp_path)  # a socket's path may have 100 letters
        try:
            server.bind("socket")
        finally:
            os.fchdir(here)
            os.close(here)
        for name in ("fifo", "folder", "device", "socket"):
            with pytest.raises(BundleError, match="is not a regular file"):
                read_header(tmp_path / name)
    for name in ("loop", "none"):
        with pytest.raises(BundleError, match="cannot be read"):
            read_header(tmp_path / name)


@pytest.mark.parametrize(
    "name", ["hole between", "same bytes twice", "bytes after the last tensor"]
)
def test_the_premise_mlx_alone_takes_such_files(name: str, tmp_path: Path) -> None:
    path = tmp_path / "hostile.safetensors"
    path.write_bytes(CASES[name][0])
    mx.eval(MLX_LOAD(str(path)))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_damage_is_an_error_or_harmless(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Flip, cut or insert bytes in the header: BundleError, or entries that fit the file."""
    path = tmp_path_factory.mktemp("damage") / "a.safetensors"
    write_arrays(path, {"a": np.ones(5000, np.float32), "b": np.ones((2, 3), np.float16)})
    raw = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, 260))
        match data.draw(st.sampled_from(["flip", "cut", "insert", "truncate"])):
            case "flip":
                raw[at] ^= 1 << data.draw(st.integers(0, 7))
            case "cut":
                del raw[at]
            case "insert":
                raw.insert(at, data.draw(st.integers(0, 255)))
            case "truncate":
                del raw[-data.draw(st.integers(1, 100)) :]
    path.write_bytes(raw)
    with suppress(BundleError):
        assert all(0 <= e.start <= e.stop <= len(raw) for e in read_header(path).values())
        with safe_open(path, "np"):  # what we accept, the reference reader accepts
            pass
