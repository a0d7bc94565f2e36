"""Attention over stretches of keys, one after the other, with a running softmax.

Codes are decoded a stretch at a time, so what exists beside the cache is one stretch and not the
context; a codec that can score keys and mix values without decoding them is asked to. The running
softmax is that of Milakov and Gimelshein (1805.02867): the largest score so far, the sum of
exponentials and the mixture below it.
"""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import mlx.core as mx

from velox_pack.caches.codecs.base import Codec, Packed

STRETCH = 1024  # tokens; a multiple of every codec's group
FEW = 16  # queries of a KV head, above which rows are decoded once for all of them
QUERIES = 256  # rows of scores at a time
_HIDDEN = -1e30  # a score that takes no weight; finite, so that differences are


@runtime_checkable
class Scoring(Protocol):
    """A codec of keys that scores them in codes."""

    def scores(self, q: mx.array, packed: Packed, start: int) -> mx.array:
        """Products `[B, H, R, N]` float32 of queries `[B, H, R, D]` float32 with N coded keys."""


@runtime_checkable
class Mixing(Protocol):
    """A codec of values that mixes them in codes."""

    def mix(self, p: mx.array, packed: Packed, start: int) -> mx.array:
        """Sums `[B, H, R, D]` float32 of N coded values, weighted by `p` `[B, H, R, N]`."""


class Rows:
    """A stretch of exact keys and values `[B, H, N, D]`."""

    def __init__(self, keys: mx.array, values: mx.array) -> None:
        self._keys = keys.astype(mx.float32).swapaxes(-1, -2)
        self._values = values.astype(mx.float32)
        self.heads, self.count = int(keys.shape[1]), int(keys.shape[2])

    def scores(self, q: mx.array) -> mx.array:
        """`[B, H, R, N]`."""
        return q @ self._keys

    def mix(self, p: mx.array) -> mx.array:
        """`[B, H, R, D]`."""
        return p @ self._values


class Coded:
    """A stretch of codes of `count` tokens whose first is at position `start`."""

    def __init__(
        self,
        codecs: tuple[Codec, Codec],
        packed: tuple[Packed, Packed],
        start: int,
        count: int,
        heads: int,
    ) -> None:
        self._codecs, self._packed, self._start, self.count = codecs, packed, start, count
        self.heads = heads
        self._decoded: list[mx.array | None] = [None, None]

    def _rows(self, part: int) -> mx.array:
        """Decoded once for all blocks of queries."""
        found = self._decoded[part]
        if found is None:
            codec = self._codecs[part]
            found = codec.decode(self._packed[part], self._start, mx.float32)
            self._decoded[part] = found
        return found

    def scores(self, q: mx.array) -> mx.array:
        """`[B, H, R, N]`."""
        codec = self._codecs[0]
        if isinstance(codec, Scoring) and q.shape[2] <= FEW:
            return codec.scores(q, self._packed[0], self._start)
        return q @ self._rows(0).swapaxes(-1, -2)

    def mix(self, p: mx.array) -> mx.array:
        """`[B, H, R, D]`."""
        codec = self._codecs[1]
        if isinstance(codec, Mixing) and p.shape[2] <= FEW:
            return codec.mix(p, self._packed[1], self._start)
        return p @ self._rows(1)


def split(
    codecs: tuple[Codec, Codec],
    packed: tuple[Packed, Packed],
    start: int,
    count: int,
    heads: int,
) -> list[Coded]:
    """Codes of `count` tokens from position `start` in stretches of at most STRETCH."""
    found = []
    for first in range(0, count, STRETCH):
        last = min(count, first + STRETCH)
        parts = tuple(
            tuple(a[:, :, first // c.granularity : last // c.granularity] for a in arrays)
            for c, arrays in zip(codecs, packed, strict=True)
        )
        found.append(Coded(codecs, (parts[0], parts[1]), start + first, last - first, heads))
    return found


def attend(
    queries: mx.array,
    stretches: Sequence[Rows | Coded],
    scale: float,
    mask: Any,
    sinks: mx.array | None,
) -> mx.array:
    """Attention `[B, Hq, L, Dv]` of `queries` `[B, Hq, L, D]` over all stretches in order.

    `mask` is None, "causal" (the last L keys are the queries' own), bool or additive
    `[..., L, T]`; `sinks` [Hq] are logits that take weight and give nothing.
    """
    L = queries.shape[2]
    total = sum(s.count for s in stretches)
    running = [
        _Running(queries, (first, min(L, first + QUERIES)), scale, sinks)
        for first in range(0, L, QUERIES)
    ]
    column = 0
    for stretch in stretches:
        for block in running:
            block.add(stretch, _part(mask, block.rows, L, column, stretch.count, total))
        column += stretch.count
    parts = [block.result(queries.dtype) for block in running]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)


def _part(
    mask: Any, rows: tuple[int, int], L: int, column: int, count: int, total: int
) -> mx.array | None:
    """What of the mask is about these queries and keys; None where they see all of them."""
    first, last = rows
    if mask is None:
        return None
    if isinstance(mask, mx.array):
        return mask[..., first:last, column : column + count]
    if column + count <= total - L + first + 1:
        return None
    own = mx.arange(total - L + first, total - L + last)[:, None]
    seen: mx.array = own >= mx.arange(column, column + count)[None]
    return seen


class _Running:
    """A block of queries on its way over the keys."""

    def __init__(
        self, queries: mx.array, rows: tuple[int, int], scale: float, sinks: mx.array | None
    ) -> None:
        self.rows = rows
        self._queries = queries[:, :, rows[0] : rows[1]].astype(mx.float32) * scale
        self._sinks = sinks
        self._top: mx.array | None = None
        self._sum = mx.array(0.0)
        self._out = mx.array(0.0)

    def add(self, stretch: Rows | Coded, mask: mx.array | None) -> None:
        """Take a stretch of keys in."""
        B, Hq, L, D = self._queries.shape
        heads = stretch.heads
        folded = self._queries.reshape(B, heads, -1, D)
        scores = stretch.scores(folded).reshape(B, Hq, L, stretch.count)
        if mask is not None:
            scores = mx.where(mask, scores, _HIDDEN) if mask.dtype == mx.bool_ else scores + mask
        top = scores.max(axis=-1, keepdims=True)
        if self._top is None:
            self._start(top)
        assert self._top is not None
        top = mx.maximum(mx.maximum(top, self._top), _HIDDEN)
        kept = mx.exp(self._top - top)
        weights = mx.exp(scores - top)
        if mask is not None:  # in a row that has seen no key yet, hidden ones equal the top
            weights = mx.where(scores > _HIDDEN, weights, 0.0)
        mixed = stretch.mix(weights.reshape(B, heads, -1, stretch.count))
        self._sum = self._sum * kept + weights.sum(axis=-1, keepdims=True)
        self._out = self._out * kept + mixed.reshape(B, Hq, L, -1)
        self._top = top

    def _start(self, top: mx.array) -> None:
        if self._sinks is None:
            self._top = mx.full(top.shape, _HIDDEN)
            return
        self._top = mx.broadcast_to(self._sinks.astype(mx.float32).reshape(1, -1, 1, 1), top.shape)
        self._sum = mx.array(1.0)

    def result(self, dtype: mx.Dtype) -> mx.array:
        """The block's output; zeros for queries that see nothing."""
        return (self._out / mx.maximum(self._sum, 1e-30)).astype(dtype)
