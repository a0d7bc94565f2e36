"""One pass over a text whose logits are those of decoding it token by token.

Decoding token t sees sinks and recent tokens exactly and older ones through their codes, and a
plan's boundary says which is which from t alone. So one pass can score exact and decoded keys,
take for each (query, key) the one that decoding would have seen, and mix values likewise. A
test shows that this equals token-by-token decoding to 1e-4.
"""

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import create_attention_mask

from velox_pack.caches.cache import Pending
from velox_pack.caches.plan import LayerPlan

_BLOCK = 256


class OnePassCache:
    """Stands in for one layer's cache while a whole text `[B, L]` goes through the model once.

    itself  the token being decoded is seen through its codes too, as mlx-lm's QuantizedKVCache
            shows it; ours see it exactly
    """

    def __init__(self, plan: LayerPlan, itself: bool = False) -> None:
        self.plan = plan
        self.itself = itself
        self.offset = 0

    def make_mask(self, N: int, *args: Any, **kwargs: Any) -> Any:
        """As a plain cache would."""
        return create_attention_mask(N, *args, offset=self.offset, **kwargs)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Pending, Pending]:
        """Take the text's keys and values, once."""
        if self.offset:
            raise RuntimeError("a OnePassCache takes one text once")
        self.offset = keys.shape[2]
        self._pair = (keys, values)
        return Pending(self, keys.shape, keys.dtype), Pending(self, values.shape, values.dtype)

    def attend(
        self, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None
    ) -> mx.array:
        """Attention `[B, Hq, L, D]` with generation semantics, a block of queries at a time."""
        plan, L = self.plan, self.offset
        last = L if self.itself else plan.boundary(L - 1)
        exact, coded = [], []
        for codec, x in zip((plan.keys, plan.values), self._pair, strict=True):
            part = x[:, :, plan.sinks : last]
            exact.append(x)
            if part.shape[2]:
                part = codec.decode(codec.encode(part, plan.sinks), plan.sinks, x.dtype)
            ends = [x[:, :, : plan.sinks], part, x[:, :, max(last, plan.sinks) :]]
            coded.append(mx.concatenate(ends, axis=2))
        del self._pair
        blocks = []
        for start in range(0, L, _BLOCK):
            stop = min(L, start + _BLOCK)
            seen = self._seen_coded(start, stop)
            rows = self._mask(mask, start, stop)
            blocks.append(
                _attend(queries[:, :, start:stop], exact, coded, seen, scale, rows, sinks)
            )
            mx.eval(blocks[-1])
        return mx.concatenate(blocks, axis=2)

    def _seen_coded(self, start: int, stop: int) -> mx.array:
        """Which keys the queries `start:stop` see through their codes, bool [rows, L]."""
        first = 0 if self.itself else self.plan.sinks
        ends = [t + 1 if self.itself else self.plan.boundary(t) for t in range(start, stop)]
        columns = mx.arange(self.offset)[None]
        return (columns >= first) & (columns < mx.array(ends)[:, None])

    def _mask(self, mask: Any, start: int, stop: int) -> mx.array:
        """Rows of the model's mask, additive float32 [..., rows, L]."""
        if mask is None or isinstance(mask, str):
            rows = mx.arange(start, stop)[:, None]
            mask = rows >= mx.arange(self.offset)[None]
        elif mask.ndim >= 2:
            mask = mask[..., start:stop, :]
        if mask.dtype == mx.bool_:
            mask = mx.where(mask, 0.0, -mx.inf)
        added: mx.array = mask.astype(mx.float32)
        return added


def _attend(
    queries: mx.array,
    exact: list[mx.array],
    coded: list[mx.array],
    seen: mx.array,
    scale: float,
    mask: mx.array,
    sinks: mx.array | None,
) -> mx.array:
    B, Hq, L, D = queries.shape
    Hkv = exact[0].shape[1]
    q = (queries.astype(mx.float32) * scale).reshape(B, Hkv, Hq // Hkv, L, D)
    keys = [k.astype(mx.float32)[:, :, None].swapaxes(-1, -2) for k in (exact[0], coded[0])]
    scores = mx.where(seen, q @ keys[1], q @ keys[0])
    if mask.ndim > 2:
        mask = mask[:, :, None] if mask.shape[1] == 1 else mask.reshape(B, Hkv, -1, *mask.shape[2:])
    scores = scores + mask
    if sinks is not None:
        column = mx.broadcast_to(sinks.reshape(1, Hkv, -1, 1, 1), (*scores.shape[:-1], 1))
        scores = mx.concatenate([scores, column.astype(mx.float32)], axis=-1)
    weights = mx.softmax(scores, axis=-1)[..., : exact[0].shape[2]]
    values = [v.astype(mx.float32)[:, :, None] for v in (exact[1], coded[1])]
    out = mx.where(seen, 0.0, weights) @ values[0] + mx.where(seen, weights, 0.0) @ values[1]
    return out.reshape(B, Hq, L, -1).astype(queries.dtype)
