"""Packed codes straight to levels, several codes for each table entry.

Reading one level for each code costs about three times as much as the unpacking; a table over two,
four or eight neighbouring codes (at most 4,096 entries, 64 kB) cuts both.
"""

import mlx.core as mx

from velox_pack.kernels.packing import MAX_BITS, WORD, unpack_joined

# Codes that one table entry stands for.
_PER_ENTRY = {1: 8, 2: 4, 3: 4, 4: 2, 5: 2, 6: 2, 7: 2, 8: 1}


def level_table(levels: mx.array, bits: int) -> mx.array:
    """Table [2^(bits * j), j] of the levels [2^bits] of j neighbouring codes, for `unpack_levels`.

    Keeps the levels' dtype. Raises ValueError unless bits is 1 to 8 and there are 2^bits levels.
    """
    if not 1 <= bits <= MAX_BITS or levels.shape != (1 << bits,):
        raise ValueError(f"levels of shape {levels.shape} for {bits} bits (1 to {MAX_BITS})")
    per = _PER_ENTRY[bits]
    entries = mx.arange(1 << (bits * per), dtype=mx.uint32)
    shifts = mx.arange(per, dtype=mx.uint32) * bits
    return mx.take(levels, (entries[:, None] >> shifts) & ((1 << bits) - 1))


def unpack_levels(words: mx.array, bits: int, n: int, table: mx.array) -> mx.array:
    """Levels [..., n] of the first `n` codes of uint32 words [..., w], by a `level_table`.

    The same as `levels[unpack(words, bits, n)]`. Raises ValueError on a table for other bits or
    on words that hold fewer than n codes.
    """
    per = _PER_ENTRY.get(bits)
    if per is None or table.shape != (1 << (bits * per), per):
        raise ValueError(f"a level table of shape {table.shape} is not one for {bits} bits")
    if bits * per == 8:
        need = -(-n * bits // WORD)
        if need > words.shape[-1]:
            raise ValueError(f"{words.shape[-1]} words hold fewer than {n} codes of {bits} bits")
        # Little-endian words: byte k holds bits 8k to 8k + 7 of the stream.
        entries = words[..., :need].view(mx.uint8)
    else:
        entries = unpack_joined(words, bits, per, n)
    levels = mx.take(table, entries, axis=0)
    levels = levels.reshape(*words.shape[:-1], entries.shape[-1] * per)
    return levels if levels.shape[-1] == n else levels[..., :n]
