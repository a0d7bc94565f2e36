"""Packed codes: a little-endian bitstream in uint32 words, the layout of `mx.quantize`.

Code i of a row of b-bit codes occupies bits [i*b, (i+1)*b) of the row's bitstream; bit t of the
stream is bit t % 32 of word t // 32. Rows (the last axis) start on a word. A row whose bits do not
fill its last word is padded with zero bits. Mixed rows give each position its own width.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import mlx.core as mx
import numpy as np
import numpy.typing as npt

WORD = 32
MAX_BITS = 8
# Codes that are joined by shifts before any bit crosses a word: a power of two of them, so that
# only every fourth or eighth element of an odd width goes through index tables.
_JOINED = {1: 32, 2: 16, 3: 8, 4: 8, 5: 4, 6: 4, 7: 4, 8: 4}


@dataclass(frozen=True)
class _Plan:
    """Where the fields of one period of a row lie: tables [fields, 1] and [words, slots, 1]."""

    fields: int
    words: int
    # A field is ((words[low] >> right) | ((words[high] << 1) << left)) & mask.
    low: mx.array
    high: mx.array
    right: mx.array
    left: mx.array
    mask: mx.array
    straddles: bool
    # A word is the sum over its slots of (fields[slot] << up) >> down.
    slot: mx.array
    up: mx.array
    down: mx.array


@lru_cache(maxsize=512)
def _plan(widths: tuple[int, ...]) -> _Plan:
    width = np.asarray(widths, dtype=np.int64)
    start = np.concatenate([[0], np.cumsum(width)[:-1]])
    words = max(1, -(-int(width.sum()) // WORD))
    low = np.minimum(start // WORD, words - 1)
    right = start % WORD
    straddles = right + width > WORD
    high = np.where(straddles, low + 1, low)
    # `<< 1 << (31 - right)` is `<< (32 - right)` without an undefined shift by 32. A field within
    # one word is shifted by 32 in all there, which adds nothing.
    left = np.where(straddles, WORD - 1 - right, WORD - 1)

    members: list[list[tuple[int, int, int]]] = [[] for _ in range(words)]
    for field, (first, bits) in enumerate(zip(start.tolist(), widths, strict=True)):
        if bits == 0:
            continue
        word, shift = divmod(first, WORD)
        members[word].append((field, shift, 0))
        if shift + bits > WORD:
            members[word + 1].append((field, 0, WORD - shift))
    slots = max(1, max(len(m) for m in members))
    # An unused slot shifts a field (at most 31 bits) down by 31: zero.
    unused = (0, 0, WORD - 1)
    table = np.array([m + [unused] * (slots - len(m)) for m in members], dtype=np.int64)

    def constant(values: npt.NDArray[np.int64]) -> mx.array:
        return mx.array(values.astype(np.uint32))

    plan = _Plan(
        fields=len(widths),
        words=words,
        low=constant(low),
        high=constant(high),
        right=constant(right[:, None]),
        left=constant(left[:, None]),
        mask=constant((1 << width)[:, None] - 1),
        straddles=bool(straddles.any()),
        slot=constant(table[..., 0]),
        up=constant(table[..., 1, None]),
        down=constant(table[..., 2, None]),
    )
    # Evaluated here, so that a trace (mx.compile, vjp) that meets the cache sees plain constants.
    mx.eval(plan.low, plan.high, plan.right, plan.left, plan.mask, plan.slot, plan.up, plan.down)
    return plan


@lru_cache(maxsize=64)
def _shifts(bits: int, joined: int) -> mx.array:
    """Shifts [joined] of the codes that are joined into one field."""
    shifts = mx.array(np.arange(joined, dtype=np.uint32) * bits)
    mx.eval(shifts)
    return shifts


def _field_plan(field: int) -> _Plan | None:
    """How fields of this many bits fill whole words; None if a field is a word."""
    return None if field == WORD else _plan((field,) * (WORD // math.gcd(field, WORD)))


def _check_bits(bits: int) -> None:
    if not 1 <= bits <= MAX_BITS:
        raise ValueError(f"bits is {bits}; packed codes have 1 to {MAX_BITS} bits")


def _check_holds(words: mx.array, bits: int, n: int) -> None:
    if packed_words(n, bits) > words.shape[-1]:
        raise ValueError(f"{words.shape[-1]} words hold fewer than {n} codes of {bits} bits")


def packed_words(n: int, bits: int) -> int:
    """Words that `n` codes of `bits` bits take."""
    _check_bits(bits)
    return -(-n * bits // WORD)


def pack(codes: mx.array, bits: int) -> mx.array:
    """Pack codes [..., n] (any integer dtype) into uint32 words [..., ceil(n * bits / 32)].

    Bits of a code above `bits` are ignored. Raises ValueError if bits is not 1 to 8.
    """
    words = packed_words(codes.shape[-1], bits)
    joined = _JOINED[bits]
    plan = _field_plan(joined * bits)
    period = joined * (plan.fields if plan else 1)
    codes = _pad_to(codes.astype(mx.uint32) & ((1 << bits) - 1), period)
    lead = codes.shape[:-1]
    # Codes of one field never overlap, so the sum is an OR.
    count = codes.shape[-1] // joined
    fields = mx.sum(codes.reshape(*lead, count, joined) << _shifts(bits, joined), axis=-1)
    if plan:
        groups = count // plan.fields
        fields = _fill(fields.reshape(*lead, groups, plan.fields), plan)
        fields = fields.reshape(*lead, groups * plan.words)
    return fields if fields.shape[-1] == words else fields[..., :words]


def unpack(words: mx.array, bits: int, n: int) -> mx.array:
    """Unpack the first `n` codes of uint32 words [..., w] into uint32 codes [..., n].

    Raises ValueError if bits is not 1 to 8 or if the words hold fewer than n codes.
    """
    _check_holds(words, bits, n)
    return _unpack(words, bits, _JOINED[bits], n)


def unpack_joined(words: mx.array, bits: int, joined: int, n: int) -> mx.array:
    """Unpack `n` codes as [..., ceil(n / joined)] numbers of `joined` neighbouring codes each.

    The first code is in the lowest bits; codes beyond n are what the words hold there, or 0. This
    feeds tables over several codes at once. Raises ValueError as `unpack`, or unless `joined`
    divides 32, 16, 8, 8, 4, 4, 4, 4 for 1 to 8 bits.
    """
    _check_holds(words, bits, n)
    if joined < 1 or _JOINED[bits] % joined:
        raise ValueError(f"{joined} codes of {bits} bits cannot be read at once")
    return _unpack(words, bits * joined, _JOINED[bits] // joined, -(-n // joined))


def _unpack(words: mx.array, bits: int, joined: int, n: int) -> mx.array:
    """First n numbers of `bits` bits, `joined` of which make a field of at most a word."""
    need = -(-n * bits // WORD)
    words = _pad_to(words[..., :need], need)
    lead = words.shape[:-1]
    plan = _field_plan(bits * joined)
    fields = words
    if plan:
        words = _pad_to(words, plan.words)
        groups = words.shape[-1] // plan.words
        fields = _gather(words.reshape(*lead, groups, plan.words), plan)
        fields = fields.reshape(*lead, groups * plan.fields)
    codes = (fields[..., None] >> _shifts(bits, joined)) & ((1 << bits) - 1)
    codes = codes.reshape(*lead, fields.shape[-1] * joined)
    return codes if codes.shape[-1] == n else codes[..., :n]


def mixed_words(widths: Sequence[int]) -> int:
    """Words that one row with these widths takes (at least 1)."""
    return _plan(_check_widths(widths)).words


def pack_mixed(codes: mx.array, widths: Sequence[int]) -> mx.array:
    """Pack codes [..., n] with one width (0 to 8 bits) for each position of the row.

    Position i follows position i - 1 in the bitstream without a gap; width 0 stores nothing. Bits
    above a position's width are ignored. Returns uint32 [..., max(1, ceil(sum(widths) / 32))].
    Raises ValueError on a width out of range or another number of codes than widths.
    """
    plan = _plan(_check_widths(widths))
    if codes.shape[-1] != plan.fields:
        raise ValueError(f"{codes.shape[-1]} codes a row for {plan.fields} widths")
    return _fill(codes.astype(mx.uint32), plan)


def unpack_mixed(words: mx.array, widths: Sequence[int]) -> mx.array:
    """Unpack what `pack_mixed` packed: uint32 codes [..., n]; positions of width 0 give code 0.

    Raises ValueError on a width out of range or another number of words than the widths need.
    """
    plan = _plan(_check_widths(widths))
    if words.shape[-1] != plan.words:
        raise ValueError(f"{words.shape[-1]} words a row; these widths take {plan.words}")
    return _gather(words, plan)


def _check_widths(widths: Sequence[int]) -> tuple[int, ...]:
    checked = tuple(int(w) for w in widths)
    if not checked or min(checked) < 0 or max(checked) > MAX_BITS:
        raise ValueError(f"widths must be one or more values from 0 to {MAX_BITS}")
    return checked


def _pad_to(x: mx.array, multiple: int) -> mx.array:
    """Zero-pad the last axis to a multiple."""
    missing = -x.shape[-1] % multiple if multiple else 0
    return mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x


# Both go through columns: taking whole rows of a transposed array is several times faster than
# taking single elements along the last axis.


def _fill(fields: mx.array, plan: _Plan) -> mx.array:
    """Fields [..., plan.fields] to words [..., plan.words]."""
    columns = _columns(fields) & plan.mask
    words = mx.sum((mx.take(columns, plan.slot, axis=0) << plan.up) >> plan.down, axis=1)
    return mx.contiguous(words.T).reshape(*fields.shape[:-1], plan.words)


def _gather(words: mx.array, plan: _Plan) -> mx.array:
    """Words [..., plan.words] to fields [..., plan.fields]."""
    columns = _columns(words)
    fields = mx.take(columns, plan.low, axis=0) >> plan.right
    if plan.straddles:
        fields = fields | ((mx.take(columns, plan.high, axis=0) << 1) << plan.left)
    return mx.contiguous((fields & plan.mask).T).reshape(*words.shape[:-1], plan.fields)


def _columns(x: mx.array) -> mx.array:
    return mx.contiguous(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).T)
