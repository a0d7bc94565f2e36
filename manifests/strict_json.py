"""Reading JSON that nobody vouches for, and writing JSON that is the same bytes each time."""

from __future__ import annotations

import json
import math
from typing import Any

MAX_DEPTH = 32  # no file of ours nests deeper than about 8


def loads(data: bytes) -> Any:
    """Parse UTF-8 JSON; stricter than RFC 8259.

    Raises ValueError (one line) for bad UTF-8 or syntax, duplicate keys, NaN and infinities
    (written out or by overflow), lone surrogates, and nesting deeper than `MAX_DEPTH`.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 (byte {error.start})") from None
    try:
        value = json.loads(
            text,
            object_pairs_hook=_no_duplicates,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            parse_int=_integer,
        )
    except RecursionError:
        raise ValueError(f"nests deeper than {MAX_DEPTH} levels") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON ({error.msg} at character {error.pos})") from None
    _walk(value)
    return value


def dumps(value: Any) -> bytes:
    """Canonical JSON: UTF-8, sorted keys, two-space indent, newline at the end, no NaN.

    Indented rather than compact, so that two manifests can be compared line by line.
    Raises ValueError for NaN, infinities and objects that JSON does not have.
    """
    try:
        text = json.dumps(value, sort_keys=True, indent=2, ensure_ascii=False, allow_nan=False)
    except TypeError as error:
        raise ValueError(str(error)) from None
    return (text + "\n").encode("utf-8")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"has the key {shorten(key)} twice")
            seen.add(key)
    return result


def _refuse_constant(name: str) -> float:
    raise ValueError(f"holds {name}, which JSON does not have")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"holds the number {shorten(text)}, which overflows")
    return value


def _integer(text: str) -> int:
    if len(text) > 20:  # more than 64 bits; thousands of digits would cost quadratic time
        raise ValueError(f"holds the number {shorten(text)}, which overflows")
    return int(text)


def _walk(value: Any) -> None:
    # Level by level, without recursion: the depth is the hostile part.
    level: list[Any] = [value]
    depth = 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise ValueError(f"nests deeper than {MAX_DEPTH} levels")
        deeper: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                deeper.extend(item.keys())
                deeper.extend(item.values())
            elif isinstance(item, list):
                deeper.extend(item)
            elif isinstance(item, str) and not item.isascii():
                _refuse_surrogates(item)
        level = deeper


def _refuse_surrogates(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("holds half a surrogate pair") from None


def shorten(text: str, limit: int = 80) -> str:
    """`text` quoted for a one-line message: control characters escaped, cut at `limit`."""
    quoted = ascii(text) if not text.isprintable() else f"'{text}'"
    return quoted if len(quoted) <= limit else quoted[: limit - 4] + "...'"
