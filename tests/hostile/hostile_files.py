"""Hostile safetensors files, made by code, and what must be said of each.

`CASES` maps a name to (the file's bytes, a part of the one-line error). None of them may reach
`mx.load`, allocate more than the file's own size would warrant, or take long.
"""

from __future__ import annotations

import json
from typing import Any

Case = tuple[bytes, str]


def pack(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A file of this header (bytes as they are, else JSON) and data."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(raw) if length is None else length).to_bytes(8, "little") + raw + data


def row(
    begin: Any = 0, end: Any = 8, *, dtype: Any = "F32", shape: Any = (2,), **more: Any
) -> dict[str, Any]:
    """A header entry; by default an honest one of 8 bytes."""
    shape = list(shape) if isinstance(shape, tuple) else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end], **more}


def two(first: dict[str, Any], second: dict[str, Any], size: int = 16) -> bytes:
    """A file of two tensors."""
    return pack({"a": first, "b": second}, bytes(size))


HONEST = row()

CASES: dict[str, Case] = {
    # Lengths
    "empty": (b"", "is truncated: 0 bytes"),
    "seven bytes": (bytes(7), "is truncated: 7 bytes"),
    "no header": (bytes(16), "not one JSON object"),
    "header of 2**60 bytes": (pack(HONEST, length=2**60), "more than the 25000000 allowed"),
    "header of 2**64 - 1 bytes": (pack(HONEST, length=2**64 - 1), "more than the 25000000"),
    "header longer than the file": (pack({"a": HONEST}, length=1000), "is truncated: its header"),
    "header one byte longer": (pack({}, length=3), "is truncated: its header alone ends at 11"),
    "header just too long": (pack(b"{" + b" " * 25_000_000), "more than the 25000000"),
    "data cut short": (pack({"a": HONEST}, bytes(7)), "promises 77 bytes, the file has 76"),
    "data missing": (pack({"a": row(0, 2**40, dtype="U8", shape=(2**20, 2**20))}), "is truncated"),
    "bytes after the last tensor": (pack({"a": HONEST}, bytes(9)), "has 1 bytes after its last"),
    # JSON
    "not JSON": (pack(b"{'a': 1}"), "header that is not JSON"),
    "not UTF-8": (pack(b'{"\xff": 1}'), "is not UTF-8"),
    "UTF-16": (pack("{}".encode("utf-16")), "not one JSON object"),
    "byte order mark": (pack(b"\xef\xbb\xbf{}"), "not one JSON object"),
    "space before": (pack(b" {}"), "not one JSON object"),
    "newline after": (pack(b"{}\n"), "not one JSON object"),
    "NUL after": (pack(b"{}\0"), "not one JSON object"),
    "array": (pack([]), "not one JSON object"),
    "two objects": (pack(b"{}{}"), "not JSON"),
    "NaN": (pack(b'{"a": NaN}'), "holds NaN"),
    "lists nested 100,000 deep": (pack(b'{"a":' + b"[" * 100_000 + b"}"), "nests deeper"),
    "objects nested 100,000 deep": (pack(b'{"a":' * 100_000 + b"}"), "nests deeper"),
    "closed lists nested 500 deep": (
        pack(b'{"a":' + b"[" * 500 + b"]" * 500 + b"}"),
        "nests deeper",
    ),
    "number of 100,000 digits": (pack(b'{"a": ' + b"9" * 100_000 + b"}"), "overflows"),
    "half a surrogate pair": (pack({"\ud800": HONEST}, bytes(8)), "surrogate"),
    "name twice": (
        pack(
            b'{"a":%b,"a":%b}' % ((json.dumps(HONEST).encode(),) * 2),
            bytes(8),
        ),
        "has the key 'a' twice",
    ),
    "offsets twice": (
        pack(b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"data_offsets":[0,1]}}', b"0"),
        "has the key 'data_offsets' twice",
    ),
    # Names and metadata
    "empty name": (pack({"": HONEST}, bytes(8)), "impossible tensor name"),
    "NUL in a name": (pack({"a\0b": HONEST}, bytes(8)), "impossible tensor name"),
    "newline in a name": (pack({"a\nb": row(shape=(3,))}, bytes(8)), "'a\\nb' lies about its size"),
    "name of a megabyte": (pack({"x" * 2**20: row(shape=(3,))}, bytes(8)), "lies about its size"),
    "metadata of numbers": (pack({"__metadata__": {"a": 1}}), "strings to strings"),
    "metadata of objects": (pack({"__metadata__": {"a": {"b": "c"}}}), "strings to strings"),
    "metadata a list": (pack({"__metadata__": ["a"]}), "strings to strings"),
    "metadata text": (pack({"__metadata__": "a"}), "strings to strings"),
    # Entries
    "entry a list": (pack({"a": [0, 8]}, bytes(8)), "needs exactly dtype, shape"),
    "entry without dtype": (pack({"a": {"shape": [], "data_offsets": [0, 0]}}), "needs exactly"),
    "entry with more": (pack({"a": row(extra=1)}, bytes(8)), "needs exactly dtype, shape"),
    "4-bit floats": (pack({"a": row(0, 1, dtype="F4")}, b"0"), "type '\"F4\"', which"),
    "6-bit floats": (pack({"a": row(0, 3, dtype="F6_E2M3", shape=(4,))}, bytes(3)), "F6_E2M3"),
    "type in small letters": (pack({"a": row(dtype="f32")}, bytes(8)), "does not read"),
    "type of another kind": (pack({"a": row(dtype=["F32"])}, bytes(8)), "does not read"),
    "shape a number": (pack({"a": row(shape=2)}, bytes(8)), "no list of sizes"),
    "shape negative": (pack({"a": row(shape=(-1, -2))}, bytes(8)), "no list of sizes"),
    "shape a float": (pack({"a": row(shape=(2.0,))}, bytes(8)), "no list of sizes"),
    "shape true": (pack({"a": row(0, 4, shape=(True,))}, bytes(4)), "no list of sizes"),
    "shape beyond int32": (
        pack({"a": row(0, 0, shape=(2**31, 0))}),
        "no list of sizes up to 2147483647",
    ),
    "shape whose product wraps 64 bits to 0": (
        pack({"a": row(0, 0, dtype="U8", shape=(2**22, 2**21, 2**21))}),
        "lies about its size",
    ),
    "shape whose product wraps 64 bits to 8": (
        pack({"a": row(dtype="U8", shape=(8, 5, 8681, 5581, 49477, 384773))}, bytes(8)),
        "takes more than 2**63 bytes",
    ),
    "shape whose product has 150 digits": (
        pack({"a": row(shape=(2**31 - 1,) * 16)}, bytes(8)),
        "takes more than 2**63 bytes",
    ),
    "shape of a thousand ones": (pack({"a": row(0, 4, shape=(1,) * 1000)}, bytes(4)), "dimensions"),
    "shape larger than the data": (pack({"a": row(shape=(3,))}, bytes(8)), "takes 12 bytes"),
    "shape smaller than the data": (pack({"a": row(shape=(1,))}, bytes(8)), "takes 4 bytes"),
    "type larger than the data": (pack({"a": row(dtype="I64")}, bytes(8)), "I64 [2] takes 16"),
    "offsets one number": (
        pack({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0]}}, b"0"),
        "no pair begin <= end",
    ),
    "offsets backwards": (pack({"a": row(8, 0)}, bytes(8)), "no pair begin <= end"),
    "offsets negative": (pack({"a": row(-8, 0)}, bytes(8)), "no pair begin <= end"),
    "offsets of 2**64": (pack({"a": row(2**64 - 8, 2**64)}, bytes(8)), "no pair begin <= end"),
    "offsets as floats": (pack({"a": row(0.0, 8.0)}, bytes(8)), "no pair begin <= end"),
    "offsets as text": (pack({"a": row("0", "8")}, bytes(8)), "no pair begin <= end"),
    # Cover
    "overlap by one byte": (two(row(), row(7, 15)), "'b' overlaps tensor 'a'"),
    "same bytes twice": (two(row(), row(), 8), "'b' overlaps tensor 'a'"),
    "one inside the other": (two(row(0, 16, shape=(4,)), row(4, 12)), "'b' overlaps tensor 'a'"),
    "empty inside another": (two(row(0, 16, shape=(4,)), row(4, 4, shape=(0,))), "'b' overlaps"),
    "hole between": (two(row(), row(12, 20), 20), "'b' leaves a hole after tensor 'a'"),
    "hole at the start": (pack({"a": row(8, 16)}, bytes(16)), "'a' leaves a hole after the header"),
    "starts at the end of the file": (
        pack({"a": row(10**12, 10**12 + 8)}, bytes(8)),
        "'a' leaves a hole after the header",
    ),
}
