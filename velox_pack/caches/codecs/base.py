"""What a codec is: rows of keys or values in, packed arrays out, and back."""

from typing import Protocol

import mlx.core as mx

Packed = tuple[mx.array, ...]


def copy_rows(x: mx.array, start: int, stop: int) -> mx.array:
    """Tokens `start:stop` of `[B, H, N, ...]` as an array of its own.

    A slice would keep the whole buffer alive, and so would `mx.contiguous` where B * H is 1.
    """
    return mx.take(x, mx.arange(start, stop), axis=2)


class Codec(Protocol):
    """Encodes `[B, H, N, D]` rows of one layer's keys or values.

    Every packed array has B and H first and tokens (or groups of `granularity` tokens) on
    axis 2, so a cache appends, trims and counts them without knowing what they mean. None is a
    view of what was encoded: it would keep the whole chunk in memory.
    """

    @property
    def granularity(self) -> int:
        """Tokens that can only be encoded together (1 for per-token codecs)."""

    def encode(self, x: mx.array, start: int) -> Packed:
        """Encode rows at true positions `start, start + 1, ...`; N is a multiple of granularity."""

    def decode(self, packed: Packed, start: int, dtype: mx.Dtype) -> mx.array:
        """Give back `[B, H, N, D]` in `dtype` for codes whose first row is at position `start`."""

    def constants(self) -> list[mx.array]:
        """Arrays that are shared by all sequences: artifacts and tables, not state."""


def rows(packed: Packed, codec: Codec) -> int:
    """Count the tokens that `packed` holds."""
    return packed[0].shape[2] * codec.granularity if packed else 0
