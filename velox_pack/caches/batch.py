"""Several sequences in one batch: a cache of its own for each row, behind mlx-lm's batch contract.

A row is the single cache that it would be alone, so windows, flush groups and budgets follow its
own positions, padding never enters codes, and a batched answer is the one that the sequence gets
alone. What is shared is the layout: column c of a mask belongs to token `c - left_padding[i]` of
row i, as in mlx-lm's BatchKVCache, because a model's layers share one mask.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from velox_pack.caches.cache import Pending, VeloxCache


class VeloxBatchCache:
    """Keys and values of one layer for B sequences.

    offset        int32 [B], the position of the next column in each row; negative in left padding
    left_padding  columns of each row before its first token
    """

    def __init__(self, rows: Sequence[VeloxCache], left_padding: Sequence[int]) -> None:
        self.rows = list(rows)
        self.left_padding = list(left_padding)
        self._idx = max((row.offset for row in rows), default=0)
        self.offset = mx.array([row.offset for row in rows])
        self._remaining: list[int] | None = None  # tokens before each row's right padding
        self._spans: list[tuple[int, int]] = []  # columns of the pending chunk that are tokens
        self._value_dim = 0

    @classmethod
    def merge(cls, caches: Sequence[VeloxCache]) -> "VeloxBatchCache":
        """A batch of copies of single caches, whatever their lengths."""
        rows = [row.copy() for row in caches]
        longest = max(row.offset for row in rows)
        return cls(rows, [longest - row.offset for row in rows])

    # ---- what the model calls

    def make_mask(
        self,
        N: int,
        return_array: bool = False,
        window_size: int | None = None,
        **more: Any,
    ) -> mx.array:
        """Bool [B, 1, N, T], as mlx-lm's BatchKVCache answers."""
        padding = mx.array(self.left_padding)
        mask: mx.array = create_causal_mask(
            N, offset=self._idx, window_size=window_size, left_padding=padding, **more
        )
        return mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Give every row its own tokens of `[B, H, L, D]`; answer as a single cache does."""
        B, H, L, _ = keys.shape
        self._spans = [self._span(i, L) for i in range(B)]
        if self._remaining is not None:
            self._remaining = [
                left - (stop - start)
                for left, (start, stop) in zip(self._remaining, self._spans, strict=True)
            ]
        self._idx += L
        self._value_dim = values.shape[3]
        self.offset = self.offset + L
        both: list[Any] = []
        for i, (start, stop) in enumerate(self._spans):
            if start < stop:
                both.append(
                    self.rows[i].update_and_fetch(
                        keys[i : i + 1, :, start:stop], values[i : i + 1, :, start:stop]
                    )
                )
            else:
                both.append(None)
        if all(row.plan.routed for row in self.rows):
            return (
                Pending(self, (B, H, self._idx, keys.shape[-1]), keys.dtype),
                Pending(self, (B, H, self._idx, values.shape[-1]), values.dtype),
            )
        return self._padded(both, 0, keys), self._padded(both, 1, values)

    def _span(self, i: int, L: int) -> tuple[int, int]:
        """The columns of a chunk of L that are tokens of row i."""
        start = min(L, max(0, self.left_padding[i] - self._idx))
        stop = L
        if self._remaining is not None:
            stop = min(L, start + self._remaining[i])
        return start, stop

    def _padded(self, both: Sequence[Any], part: int, like: mx.array) -> mx.array:
        """Decoded rows `[B, H, T, D]`, with zeros where a row has no token."""
        rows = []
        for found, (_, stop) in zip(both, self._spans, strict=True):
            if found is None:
                rows.append(mx.zeros((1, like.shape[1], self._idx, like.shape[3]), like.dtype))
                continue
            behind = like.shape[2] - stop
            ahead = self._idx - behind - found[part].shape[2]
            rows.append(mx.pad(found[part], [(0, 0), (0, 0), (ahead, behind), (0, 0)]))
        return mx.concatenate(rows)

    def attend(
        self, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None
    ) -> mx.array:
        """Attention of the pending chunk, `[B, Hq, L, D]`, zeros in padding."""
        L = queries.shape[2]
        out = []
        for i, (row, (start, stop)) in enumerate(zip(self.rows, self._spans, strict=True)):
            if start == stop:
                shape = (1, queries.shape[1], L, self._value_dim)
                out.append(mx.zeros(shape, queries.dtype))
                continue
            seen = self._mask(mask, i, start, stop)
            own = row.attend(queries[i : i + 1, :, start:stop], scale, seen, sinks)
            if stop - start < L:
                own = mx.pad(own, [(0, 0), (0, 0), (start, L - stop), (0, 0)])
            out.append(own)
        return mx.concatenate(out)

    def _mask(self, mask: Any, i: int, start: int, stop: int) -> Any:
        """The part of a batch's mask that is about a row's own queries and keys."""
        if not isinstance(mask, mx.array):
            return mask
        if mask.ndim == 4:
            mask = mask[i : i + 1] if mask.shape[0] > 1 else mask
        first = self.left_padding[i]
        return mask[..., start:stop, first : first + self.rows[i].offset]

    # ---- what mlx-lm's batches ask

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Announce padding of what comes next; right padding comes with `lengths`.

        Raises ValueError for left padding of rows that hold tokens, and right padding without
        lengths.
        """
        if left_padding is not None:
            if not self.empty():
                raise ValueError("left padding can only be added to an empty cache")
            added = list(left_padding)
            self.left_padding = [a + b for a, b in zip(self.left_padding, added, strict=True)]
            self.offset = self.offset - mx.array(added)
        if right_padding is not None and max(right_padding) > 0:
            if lengths is None:
                raise ValueError("right padding needs the lengths of what is padded")
            self._remaining = list(lengths)

    def finalize(self) -> None:
        """Turn right padding into left padding: the next column of each row is its next token."""
        if self._remaining is None:
            return
        self._remaining = None
        self.left_padding = [self._idx - row.offset for row in self.rows]
        self.offset = mx.array([row.offset for row in self.rows])

    def filter(self, batch_indices: Any) -> None:
        """Keep these rows, in this order."""
        if isinstance(batch_indices, mx.array):
            batch_indices = batch_indices.tolist()
        kept = [int(i) for i in batch_indices]
        self.rows = [self.rows[i] for i in kept]
        self.left_padding = [self.left_padding[i] for i in kept]
        self.offset = self.offset[mx.array(kept, dtype=mx.int32)]
        spare = min((self._idx, *self.left_padding))
        self.left_padding = [p - spare for p in self.left_padding]
        self._idx -= spare

    def extend(self, other: "VeloxBatchCache") -> None:
        """Take the rows of another batch behind one's own."""
        longest = max(self._idx, other._idx)
        mine = [p + longest - self._idx for p in self.left_padding]
        theirs = [p + longest - other._idx for p in other.left_padding]
        self.left_padding = mine + theirs
        self.rows = self.rows + other.rows
        self.offset = mx.concatenate([self.offset, other.offset])
        self._idx = longest

    def extract(self, idx: int) -> VeloxCache:
        """Row `idx` as a single cache."""
        return self.rows[idx].copy()

    def trim(self, n: int) -> int:
        """Forget the last `n` tokens of every row; returns how many columns went."""
        n = min(self._idx, n)
        for row in self.rows:
            row.trim(n)
        self._idx -= n
        self.offset = self.offset - n
        return n

    def is_trimmable(self) -> bool:
        """Whether every row is."""
        return all(row.is_trimmable() for row in self.rows)

    @property
    def state(self) -> list[Any]:
        """The states of the rows, for evaluation and walks; a file holds single caches."""
        return [self.offset, *(row.state for row in self.rows)]

    def empty(self) -> bool:
        """Whether no row has seen a token."""
        return all(row.empty() for row in self.rows)

    def size(self) -> int:
        """Columns, padding included."""
        return self._idx

    def arrays(self) -> Iterable[mx.array]:
        """All arrays of all rows, and the offsets."""
        yield self.offset
        for row in self.rows:
            yield from row.arrays()

    @property
    def nbytes(self) -> int:
        """Bytes of state; padding takes none."""
        return sum(a.nbytes for a in self.arrays())
