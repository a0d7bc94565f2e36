from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from velox_pack.manifests.aligned import (
    PAD_PREFIX,
    PAGE,
    AlignedWriter,
    TensorSpec,
    _buffer,
    layout,
    read_arrays,
    read_header,
    read_metadata,
    spec_of,
    write_arrays,
)
from velox_pack.manifests.dtypes import ITEM_BYTES, MLX_TYPES
from velox_pack.manifests.errors import BundleError
from velox_pack.manifests.header import read_full_header

NUMPY_TYPES = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "U16": np.uint16,
    "I16": np.int16,
    "F16": np.float16,
    "U32": np.uint32,
    "I32": np.int32,
    "F32": np.float32,
    "U64": np.uint64,
    "I64": np.int64,
}
SAFETENSORS_OF_MLX = {dtype: name for name, dtype in MLX_TYPES.items()}


def bits_of(array: mx.array) -> bytes:
    """All bits of an MLX array, independent of our writer."""
    if array.size == 0:
        return b""
    flat = mx.contiguous(array).reshape(-1)
    return np.asarray(flat.view(mx.uint8)).tobytes()


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Name -> (type, shape, random bytes), some of them around the size of a page."""
    names = draw(
        st.lists(
            st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=8),
            unique=True,
            max_size=6,
        )
    )
    result = {}
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    for name in names:
        if name == "__metadata__" or name.startswith(PAD_PREFIX):
            continue
        dtype = draw(st.sampled_from(sorted(MLX_TYPES)))
        shape = draw(
            st.one_of(
                st.lists(st.integers(0, 5), max_size=4).map(tuple),
                st.sampled_from([(PAGE,), (PAGE // 4,), (2, PAGE // 8 + 1), (PAGE // 2 - 1, 1)]),
            )
        )
        count = int(np.prod(shape, dtype=np.int64))
        data = rng.bytes(count * ITEM_BYTES[dtype])
        if dtype == "BOOL":
            data = bytes(b & 1 for b in data)
        result[name] = (dtype, shape, data)
    return result


def as_mlx(dtype: str, shape: tuple[int, ...], data: bytes) -> mx.array:
    if not data:
        return mx.zeros(shape, dtype=MLX_TYPES[dtype])
    return mx.array(np.frombuffer(data, np.uint8)).view(MLX_TYPES[dtype]).reshape(shape)


@settings(max_examples=60, deadline=None)
@given(content=tensors(), reverse=st.booleans())
def test_every_reader_gets_the_same_bits(
    tmp_path_factory: pytest.TempPathFactory,
    content: dict[str, tuple[str, tuple[int, ...], bytes]],
    reverse: bool,
) -> None:
    path = tmp_path_factory.mktemp("aligned") / "model.safetensors"
    specs = {name: TensorSpec(dtype, shape) for name, (dtype, shape, _) in content.items()}
    with AlignedWriter(path, specs, {"k": "v"}) as writer:
        for name in sorted(content, reverse=reverse):
            dtype, shape, data = content[name]
            by_numpy = dtype in NUMPY_TYPES and len(name) % 2
            array = np.frombuffer(data, NUMPY_TYPES[dtype]).reshape(shape) if by_numpy else None
            writer.write(name, as_mlx(dtype, shape, data) if array is None else array)

    entries = read_full_header(path).entries
    for entry in entries.values():
        assert entry.start % (PAGE if entry.nbytes >= PAGE else ITEM_BYTES[entry.dtype]) == 0
    assert path.stat().st_size % PAGE == 0
    assert read_metadata(path) == {"k": "v"}

    ours, theirs = read_arrays(path), mx.load(str(path))
    assert isinstance(theirs, dict)
    assert set(ours) == set(content) == {n for n in theirs if not n.startswith(PAD_PREFIX)}
    numpy_dict = load_file(path) if all(d != "BF16" for d, _, _ in content.values()) else None
    with safe_open(path, "np") as opened:
        assert set(opened.keys()) == set(entries)
        for name, (dtype, shape, data) in content.items():
            for array in (ours[name], theirs[name]):
                assert (SAFETENSORS_OF_MLX[array.dtype], array.shape) == (dtype, shape)
                assert bits_of(array) == data
            if dtype != "BF16":  # NumPy has none
                assert opened.get_tensor(name).tobytes() == data
            if numpy_dict is not None:
                assert numpy_dict[name].shape == shape
                assert numpy_dict[name].tobytes() == data
        for name in entries:
            if name.startswith(PAD_PREFIX):
                assert not opened.get_tensor(name).any()


def test_same_bytes_in_any_order(tmp_path: Path) -> None:
    arrays = {f"layers.{i}.w": mx.random.normal((40, 130)) for i in range(5)}
    arrays |= {f"layers.{i}.norm": mx.ones((33,), dtype=mx.float16) for i in range(5)}
    specs = {name: spec_of(array) for name, array in arrays.items()}
    files = []
    for order in (sorted(specs), sorted(specs, reverse=True)):
        path = tmp_path / f"{len(files)}.safetensors"
        with AlignedWriter(path, {n: specs[n] for n in order}, {"b": "1", "a": "2"}) as writer:
            for name in order:
                writer.write(name, arrays[name])
        files.append(path.read_bytes())
    assert files[0] == files[1]


def test_small_tensors_share_pages_and_big_ones_fill_them() -> None:
    specs = {f"n{i:03d}": TensorSpec("F16", (96,)) for i in range(64)}
    specs |= {f"a{i}": TensorSpec("U32", (PAGE // 4 + 1,)) for i in range(3)}
    plan = layout(specs)
    # Header, one page for 64 small tensors of 192 bytes, two for each of the three big ones.
    assert plan.size == PAGE * (1 + 1 + 3 * 2)
    table = json.loads(plan.header[8:])
    assert [n for n in table if n.startswith(PAD_PREFIX)] == [f"{PAD_PREFIX}{i}" for i in range(4)]


def test_strided_arrays_and_scalars(tmp_path: Path) -> None:
    base = np.arange(60, dtype=np.float32).reshape(5, 12)
    arrays = {
        "transposed": base.T,
        "strided": base[::2, ::-3],
        "big-endian": base.astype(">f4"),
        "mlx-transposed": mx.array(base).T,
        "mlx-slice": mx.array(base)[1:4, ::2],
        "mlx-broadcast": mx.broadcast_to(mx.array([1.0, 2.0]), (3, 2)),
        "scalar": np.float32(3).reshape(()),
        "mlx-scalar": mx.array(4, dtype=mx.bfloat16),
    }
    write_arrays(tmp_path / "a.safetensors", arrays)
    found = read_arrays(tmp_path / "a.safetensors")
    for name, array in arrays.items():
        expected = array if isinstance(array, mx.array) else mx.array(array.astype(np.float32))
        assert found[name].shape == expected.shape
        assert mx.array_equal(found[name], expected)


def test_contiguous_arrays_are_not_copied() -> None:
    array = np.arange(1000, dtype=np.float32)
    assert np.shares_memory(np.frombuffer(_buffer(array), np.uint8), array)
    held = mx.arange(1000, dtype=mx.uint16)
    mx.eval(held)
    view = np.frombuffer(_buffer(held), np.uint8)
    assert np.shares_memory(view, np.frombuffer(memoryview(held), np.uint16))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        ("F4", (2,)),
        ("F6_E2M3", (4,)),
        ("F64", (1,)),
        ("f32", (1,)),
        ("F32", (-1,)),
        ("F32", (2**31,)),
    ],
)
def test_specs_that_no_bundle_holds(dtype: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"dtype|shape"):
        TensorSpec(dtype, shape)


@pytest.mark.parametrize("name", ["", "__metadata__", "__pad__.0", "a\0b"])
def test_reserved_names(name: str) -> None:
    with pytest.raises(ValueError, match="reserved"):
        layout({name: TensorSpec("U8", (1,))})


def test_header_beyond_the_limit() -> None:
    with pytest.raises(ValueError, match="split the file"):
        layout({"x" * 25_000_000: TensorSpec("U8", (1,))})


def test_writer_refuses_what_was_not_planned(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    writer = AlignedWriter(path, {"a": TensorSpec("F32", (2,)), "b": TensorSpec("U8", (1,))})
    with pytest.raises(ValueError, match="not planned"):
        writer.write("c", np.zeros(2, np.float32))
    with pytest.raises(ValueError, match="planned as"):
        writer.write("a", np.zeros(2, np.float16))
    with pytest.raises(ValueError, match="planned as"):
        writer.write("a", mx.zeros((1, 2)))
    with pytest.raises(ValueError, match="takes 8 bytes"):
        writer.write("a", b"1234")
    with pytest.raises(ValueError, match="cannot be stored"):
        writer.write("a", np.zeros(2))
    writer.write("a", bytes(8))
    with pytest.raises(ValueError, match="already written"):
        writer.write("a", bytes(8))
    with pytest.raises(ValueError, match="never came: b"):
        writer.close()
    with pytest.raises(BundleError, match="File exists"):
        AlignedWriter(path, {})


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full, raising=False)
    with pytest.raises(BundleError, match="no room for its 32768 bytes"):
        AlignedWriter(tmp_path / "a.safetensors", {"a": TensorSpec("F32", (2,))})


def test_file_system_without_fallocate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("os.posix_fallocate", unsupported, raising=False)
    write_arrays(tmp_path / "a.safetensors", {"a": np.ones(3, np.float32)})
    assert read_arrays(tmp_path / "a.safetensors")["a"].tolist() == [1, 1, 1]


def test_reading_some_tensors(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    write_arrays(path, {"a": np.ones(3, np.float32), "b": np.zeros(2, np.uint8)})
    assert set(read_arrays(path, ["b"])) == {"b"}
    assert read_arrays(path, []) == {}
    with pytest.raises(BundleError, match="has no tensor 'c'"):
        read_arrays(path, ["c"])
    with pytest.raises(BundleError, match=r"none.safetensors: cannot be read"):
        read_header(tmp_path / "none.safetensors")


def test_files_of_other_writers_pass_the_strict_check(tmp_path: Path) -> None:
    arrays = {"a": mx.ones((3, 5)), "b": mx.zeros((7,), dtype=mx.bfloat16), "s": mx.array(1)}
    mx.save_safetensors(str(tmp_path / "mlx.safetensors"), arrays, {"format": "mlx"})
    assert read_header(tmp_path / "mlx.safetensors").keys() == arrays.keys()
    mx.save_safetensors(str(tmp_path / "bare.safetensors"), arrays)
    assert read_metadata(tmp_path / "bare.safetensors") == {}
    save_file({"x": np.zeros((3, 1), np.uint8), "y": np.ones(5)}, tmp_path / "np.safetensors")
    header = read_header(tmp_path / "np.safetensors")
    assert (header["y"].dtype, header["y"].shape) == ("F64", (5,))
    with pytest.raises(BundleError, match="type F64, which MLX cannot load"):
        read_arrays(tmp_path / "np.safetensors")
