"""Page-aligned safetensors: written in any order, read after a strict check.

Layout: the header is padded with spaces so that the data starts on a page of 16384 bytes. Small
tensors (less than a page) come first, sorted by name, one after the other at their natural
alignment; then every tensor of a page or more, sorted by name, each starting on a page. Each gap
is a tensor `__pad__.<n>` of U8 zeros, the last one up to the end of its page, so the file is
plain safetensors without holes, and every big tensor can be adopted from a memory map as whole
pages (start and length).
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType

import mlx.core as mx
import numpy as np

from .dtypes import ITEM_BYTES, LOADABLE, MLX_TYPES, dtype_name
from .errors import BundleError
from .header import MAX_HEADER_BYTES, PAD_PREFIX, PAGE, Entry, read_full_header, read_header

__all__ = ["PAD_PREFIX", "PAGE", "AlignedWriter", "Entry", "Plan", "TensorSpec"]
__all__ += ["layout", "read_arrays", "read_header", "read_metadata", "spec_of", "write_arrays"]


@dataclass(frozen=True)
class TensorSpec:
    """Type (a safetensors name such as "BF16") and shape of a tensor that will be written."""

    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in MLX_TYPES:
            raise ValueError(f"dtype {self.dtype!r} cannot be stored; use {', '.join(MLX_TYPES)}")
        if any(type(n) is not int or not 0 <= n < 2**31 for n in self.shape):
            raise ValueError(f"shape {self.shape} is no tuple of sizes below 2**31")

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's data."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]


def spec_of(array: mx.array | np.ndarray) -> TensorSpec:
    """The spec of an array; ValueError for a type that a bundle does not hold."""
    return TensorSpec(dtype_name(array), tuple(array.shape))


@dataclass(frozen=True)
class Plan:
    """Where everything goes: the header's bytes, each tensor's start, the size of the file."""

    header: bytes
    starts: dict[str, int]
    size: int


def layout(specs: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None = None) -> Plan:
    """Plan a file; the same specs and metadata give the same bytes whatever their order.

    Raises ValueError for a reserved name or a header beyond 25 MB.
    """
    for name in specs:
        if not name or name == "__metadata__" or name.startswith(PAD_PREFIX) or "\0" in name:
            raise ValueError(f"tensor name {name!r} is reserved by the format")
    table: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    offsets: dict[str, int] = {}
    position = pads = 0

    def pad_to(alignment: int) -> None:
        nonlocal position, pads
        gap = -position % alignment
        if gap:
            table[f"{PAD_PREFIX}{pads}"] = _row("U8", (gap,), position)
            position, pads = position + gap, pads + 1

    for name in sorted(specs, key=lambda name: (specs[name].nbytes >= PAGE, name)):
        spec = specs[name]
        pad_to(PAGE if spec.nbytes >= PAGE else ITEM_BYTES[spec.dtype])
        table[name] = _row(spec.dtype, spec.shape, position)
        offsets[name] = position
        position += spec.nbytes
    pad_to(PAGE)
    text = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    length = len(text) + -(8 + len(text)) % PAGE
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"{len(specs)} tensors need a header of {length} bytes; split the file")
    data_start = 8 + length
    return Plan(
        header=length.to_bytes(8, "little") + text.ljust(length, b" "),
        starts={name: data_start + offset for name, offset in offsets.items()},
        size=data_start + position,
    )


def _row(dtype: str, shape: tuple[int, ...], start: int) -> dict[str, object]:
    stop = start + prod(shape) * ITEM_BYTES[dtype]
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


class AlignedWriter:
    """Writes one file whose tensors are known beforehand but arrive in any order.

    The file is preallocated (a full disk shows at once), each tensor goes straight to its place,
    and no array is copied unless it is not contiguous in memory. As a context manager it closes
    on success and only releases the file on an exception; removing it is up to the caller.

    Raises BundleError if the file cannot be made or the disk is full.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        specs: Mapping[str, TensorSpec],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.path = Path(path)
        self.specs = dict(specs)
        self._missing = set(self.specs)
        plan = layout(specs, metadata)
        self._starts = plan.starts
        try:
            self._file = open(self.path, "xb", buffering=0)  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise BundleError(f"{self.path}: cannot be created ({error.strerror})") from None
        try:
            self._preallocate(plan.size)
            self._write_at(0, memoryview(plan.header))
        except BaseException:
            self._file.close()
            raise

    def write(self, name: str, data: mx.array | np.ndarray | bytes) -> None:
        """Write one tensor, once. Raises ValueError if it is unknown, written or does not fit."""
        if name not in self.specs:
            raise ValueError(f"tensor {name!r} was not planned for {self.path.name}")
        if name not in self._missing:
            raise ValueError(f"tensor {name!r} of {self.path.name} is already written")
        spec = self.specs[name]
        if isinstance(data, bytes):
            if len(data) != spec.nbytes:
                raise ValueError(f"tensor {name!r} takes {spec.nbytes} bytes, got {len(data)}")
        elif spec_of(data) != spec:
            raise ValueError(f"tensor {name!r} was planned as {spec}, got {spec_of(data)}")
        if spec.nbytes:
            self._write_at(self._starts[name], _buffer(data))
        self._missing.remove(name)

    def close(self) -> None:
        """Flush to disk. Raises ValueError, after releasing the file, if a tensor is missing."""
        if self._file.closed:
            return
        try:
            if self._missing:
                first = ", ".join(sorted(self._missing)[:3])
                raise ValueError(
                    f"{self.path.name}: {len(self._missing)} tensors never came: {first}"
                )
            os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def abandon(self) -> None:
        """Release the file as it is; for a run that has failed."""
        self._file.close()

    def __enter__(self) -> AlignedWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def _preallocate(self, size: int) -> None:
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file.fileno(), 0, size)
            else:
                os.ftruncate(self._file.fileno(), size)
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                os.ftruncate(self._file.fileno(), size)  # a file system without fallocate
                return
            raise BundleError(
                f"{self.path}: no room for its {size} bytes ({error.strerror})"
            ) from None

    def _write_at(self, start: int, data: memoryview) -> None:
        done = 0
        try:
            # One call writes at most about 2 GB on Linux.
            while done < len(data):
                done += os.pwrite(self._file.fileno(), data[done : done + 2**30], start + done)
        except OSError as error:
            raise BundleError(f"{self.path}: cannot be written ({error.strerror})") from None


def _buffer(data: mx.array | np.ndarray | bytes) -> memoryview:
    """The bytes of an array, without a copy where it lies in memory as it will in the file."""
    if isinstance(data, bytes):
        return memoryview(data)
    if isinstance(data, mx.array):
        if data.ndim == 0:
            data = data.reshape(1)
        # NumPy has no bfloat16 and memoryview no cast from it: every type goes as integers.
        same_width = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}[data.itemsize]
        data = mx.contiguous(data).view(same_width)
        mx.eval(data)
        return memoryview(data).cast("B")  # type: ignore[arg-type]  # has the buffer protocol
    little = np.ascontiguousarray(data.astype(data.dtype.newbyteorder("<"), copy=False))
    return little.reshape(-1).view(np.uint8).data


def write_arrays(
    path: str | os.PathLike[str],
    arrays: Mapping[str, mx.array | np.ndarray],
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a whole file at once, for arrays that are all in memory anyway."""
    with AlignedWriter(path, {name: spec_of(a) for name, a in arrays.items()}, metadata) as writer:
        for name, array in arrays.items():
            writer.write(name, array)


def read_arrays(
    path: str | os.PathLike[str], names: Iterable[str] | None = None
) -> dict[str, mx.array]:
    """Lazy MLX arrays of a file (all but padding, or `names`), after the strict check.

    Nothing is read before the arrays are evaluated. Raises BundleError for a damaged file, a
    name that is not in it, or a type that MLX cannot load.
    """
    path = Path(path)
    entries = read_header(path)
    wanted = list(entries) if names is None else list(names)
    for name in wanted:
        if name not in entries:
            raise BundleError(f"{path.name}: has no tensor {name!r}; get the bundle again")
    foreign = next((n for n, e in entries.items() if e.dtype not in LOADABLE), None)
    if foreign is not None:
        raise BundleError(
            f"{path.name}: tensor {foreign!r} has type {entries[foreign].dtype}, "
            "which MLX cannot load"
        )
    if not wanted:
        return {}
    loaded = mx.load(str(path), format="safetensors")
    if not isinstance(loaded, dict):
        raise BundleError(f"{path.name}: MLX did not find tensors in it")
    return {name: loaded[name] for name in wanted}


def read_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """The `__metadata__` of a file, after the strict check."""
    return read_full_header(path).metadata
