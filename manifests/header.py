"""A strict reader of safetensors headers: what stands between a hostile file and `mx.load`.

`mx.load` trusts the header (a file that lies about its size can crash the process), so every
file is checked here first. Rules, from the documentation of safetensors: u64
little-endian header length, JSON that starts with `{` and may end in spaces, no duplicate names,
data without holes or overlap up to the last byte of the file.
"""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from . import strict_json
from .dtypes import ITEM_BYTES
from .errors import BundleError
from .strict_json import shorten

MAX_HEADER_BYTES = 25_000_000  # where the Hub's own readers stop
PAGE = 16384  # bytes; the page of Apple silicon, a multiple of everybody else's
PAD_PREFIX = "__pad__."
_MAX_DIM = 2**31 - 1  # MLX's shapes are int32
_MAX_RANK = 16


@dataclass(frozen=True)
class Entry:
    """One tensor of a file: type, shape, and the half-open byte range [start, stop) in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's data."""
        return self.stop - self.start

    @property
    def page_aligned(self) -> bool:
        """True if the tensor is small enough to share a page, or starts on a page."""
        return self.nbytes < PAGE or self.start % PAGE == 0


@dataclass(frozen=True)
class Header:
    """A checked header: every entry in file order (padding included), metadata, start of data."""

    entries: dict[str, Entry]
    metadata: dict[str, str]
    data_start: int


def read_header(path: str | os.PathLike[str]) -> dict[str, Entry]:
    """Check a safetensors file strictly; its tensors in file order, without `__pad__.*`.

    Nothing is allocated beyond the header, and the header only if the file is that long.
    Raises BundleError that names the file and the tensor.
    """
    entries = read_full_header(path).entries
    return {name: entry for name, entry in entries.items() if not name.startswith(PAD_PREFIX)}


def read_full_header(path: str | os.PathLike[str]) -> Header:
    """As `read_header`, with the padding tensors, the metadata and the start of the data."""
    path = Path(path)
    try:
        return _read(path)
    except OSError as error:
        raise BundleError(f"{path.name}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise BundleError(f"{path.name}: {error}; get the file again") from None


def _read(path: Path) -> Header:
    info = os.stat(path)
    if not stat.S_ISREG(info.st_mode):
        raise ValueError("is not a regular file")
    size = info.st_size
    if size < 10:
        raise ValueError(f"is truncated: {size} bytes are no safetensors file")
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > MAX_HEADER_BYTES:
            raise ValueError(
                f"has a header of {length} bytes, more than the {MAX_HEADER_BYTES} allowed"
            )
        if 8 + length > size:
            raise ValueError(f"is truncated: its header alone ends at {8 + length}, file {size}")
        raw = file.read(length)
    if len(raw) != length:
        raise ValueError(f"is truncated: header of {length} bytes, only {len(raw)} could be read")
    return _parse(raw, size)


def _parse(raw: bytes, size: int) -> Header:
    # serde and nlohmann also take tabs and newlines around the object; the format says spaces.
    if not raw.startswith(b"{") or not raw.rstrip(b" ").endswith(b"}"):
        raise ValueError("has a header that is not one JSON object followed by spaces")
    try:
        table = strict_json.loads(raw)
    except ValueError as error:
        raise ValueError(f"has a header that {error}") from None
    metadata = _metadata(table.pop("__metadata__", None))
    start = 8 + len(raw)
    entries = [(name, _entry(name, spec, start)) for name, spec in table.items()]
    entries.sort(key=lambda item: (item[1].start, item[1].stop))
    _check_cover(entries, start, size)
    return Header(dict(entries), metadata, start)


def _metadata(value: Any) -> dict[str, str]:
    if value is None:  # what mx.save_safetensors writes if it is given none
        return {}
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        raise ValueError("has a __metadata__ that does not map strings to strings")
    return dict(value)


def _entry(name: str, spec: Any, data_start: int) -> Entry:
    where = f"tensor {shorten(name)}"
    if not name or "\0" in name:
        raise ValueError(f"has an impossible tensor name {shorten(name)}")
    if not isinstance(spec, dict) or set(spec) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{where} needs exactly dtype, shape and data_offsets")
    dtype, shape, offsets = spec["dtype"], spec["shape"], spec["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ValueError(
            f"{where} has the type {shorten(json.dumps(dtype))}, which velox-pack does not read"
        )
    if not isinstance(shape, list) or not all(_is_size(n) and n <= _MAX_DIM for n in shape):
        raise ValueError(f"{where} has a shape that is no list of sizes up to {_MAX_DIM}")
    if len(shape) > _MAX_RANK:
        raise ValueError(f"{where} has {len(shape)} dimensions, more than {_MAX_RANK}")
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or not all(_is_size(n) for n in offsets)
        or offsets[0] > offsets[1]
    ):
        raise ValueError(f"{where} has data_offsets that are no pair begin <= end")
    expected = prod(shape) * ITEM_BYTES[dtype]
    if offsets[1] - offsets[0] != expected:
        raise ValueError(
            f"{where} lies about its size: {dtype} {shape} takes "
            f"{expected if expected < 2**63 else 'more than 2**63'} bytes, "
            f"data_offsets span {offsets[1] - offsets[0]}"
        )
    return Entry(dtype, tuple(shape), data_start + offsets[0], data_start + offsets[1])


def _is_size(value: Any) -> bool:
    # bool is an int in Python; 2**63 is where every reader's arithmetic ends.
    return type(value) is int and 0 <= value < 2**63


def _check_cover(entries: list[tuple[str, Entry]], start: int, size: int) -> None:
    position, before = start, "the header"
    for name, entry in entries:
        if entry.start != position:
            fault = "overlaps" if entry.start < position else "leaves a hole after"
            raise ValueError(f"tensor {shorten(name)} {fault} {before} in the data")
        position, before = entry.stop, f"tensor {shorten(name)}"
    if position > size:
        raise ValueError(f"is truncated: its header promises {position} bytes, the file has {size}")
    if position < size:
        raise ValueError(f"has {size - position} bytes after its last tensor")
