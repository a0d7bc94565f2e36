"""The one cache: exact sinks, codes, an exact window, composed by a plan.

Order of tokens: `sinks | codes | recent`, together `offset` tokens. A chunk attends to itself
exactly and to the past through its codes; it is encoded after its attention, never before.
"""

from collections.abc import Sequence
from math import lcm
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import create_attention_mask

from velox_pack.caches import stretches
from velox_pack.caches.codecs.base import Codec, Packed, copy_rows, rows
from velox_pack.caches.plan import LayerPlan, lookup
from velox_pack.caches.stretches import FEW, STRETCH, Coded, Mixing, Rows, Scoring, split
from velox_pack.manifests.errors import RecipeError


class Pending:
    """Stands for keys or values on their way from `update_and_fetch` to attention.

    Models pass it on untouched; the router hands it back to the cache. It looks like the array
    of all keys (or values) so far where models ask for shape or dtype.
    """

    def __init__(self, cache: Any, shape: tuple[int, ...], dtype: mx.Dtype) -> None:
        self.cache = cache
        self.shape = shape
        self.dtype = dtype
        self.ndim = len(shape)


def _join(parts: Sequence[mx.array | None]) -> mx.array:
    given = [p for p in parts if p is not None]
    held = [p for p in given if p.shape[2]] or given[:1]
    return held[0] if len(held) == 1 else mx.concatenate(held, axis=2)


def _append(old: Packed, new: Packed) -> Packed:
    if not old:
        return new
    return tuple(mx.concatenate([a, b], axis=2) for a, b in zip(old, new, strict=True))


def _span(packed: Packed, codec: Codec, start: int, stop: int) -> Packed:
    """Codes of the coded tokens `start:stop`, whole groups."""
    first, last = start // codec.granularity, stop // codec.granularity
    return tuple(copy_rows(a, first, last) for a in packed) if first < last else ()


class VeloxCache:
    """Keys and values of one layer, packed. Follows mlx-lm's cache contract."""

    def __init__(self, plan: LayerPlan, fingerprint: str, layer: int) -> None:
        self._plan: LayerPlan | None = plan
        self.fingerprint = fingerprint
        self.layer = layer
        self._reset()

    def _reset(self) -> None:
        self.offset = 0
        self.sinks: Packed = ()
        self.codes: tuple[Packed, Packed] = ((), ())
        self.recent: Packed = ()
        self._pending: Packed = ()

    @property
    def plan(self) -> LayerPlan:
        """The layer's plan; a cache from a file finds it among the loaded bundles."""
        if self._plan is None:
            self._plan = lookup(self.fingerprint, self.layer)
        return self._plan

    # ---- what the model calls

    def make_mask(self, N: int, *args: Any, **kwargs: Any) -> Any:
        """Answer as a plain cache at the true offset would: a model's layers share one mask."""
        return create_attention_mask(N, *args, offset=self.offset, **kwargs)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Take `[B, H, L, D]` keys (after RoPE) and values; answer with what attention gets.

        For a routed model that is a pair of handles; otherwise everything decoded.
        """
        plan = self.plan  # an unbound cache refuses before anything has changed
        self._commit()
        self._pending = (keys, values)
        self.offset += keys.shape[2]
        if not plan.routed:
            joined = self._all(keys.dtype)
            self._commit()
            return joined
        shape = (keys.shape[0], keys.shape[1], self.offset)
        return (
            Pending(self, (*shape, keys.shape[-1]), keys.dtype),
            Pending(self, (*shape, values.shape[-1]), values.dtype),
        )

    def attend(
        self, queries: mx.array, scale: float, mask: Any, sinks: mx.array | None
    ) -> mx.array:
        """Attention of the pending chunk, `[B, Hq, L, D]`; then the chunk is put away."""
        if self._in_codes(queries):
            out = stretches.attend(queries, self._stretches(), scale, mask, sinks)
        else:
            keys, values = self._all(queries.dtype)
            out = mx.fast.scaled_dot_product_attention(
                queries, keys, values, scale=scale, mask=mask, sinks=sinks
            )
        self._commit()
        return out

    def _in_codes(self, queries: mx.array) -> bool:
        """Whether attention goes over stretches: there are several, or a codec works in codes."""
        coded, plan = self._coded(), self.plan
        in_codes = isinstance(plan.keys, Scoring) or isinstance(plan.values, Mixing)
        few = queries.shape[1] * queries.shape[2] <= FEW * self._pending[0].shape[1]
        return coded > STRETCH or (coded > 0 and few and in_codes)

    def _stretches(self) -> list[Rows | Coded]:
        plan, chunk = self.plan, self._pending
        heads = int(chunk[0].shape[1])
        found: list[Rows | Coded] = []
        if self.sinks:
            found.append(Rows(*self.sinks))
        packed = self.codes
        found += split((plan.keys, plan.values), packed, plan.sinks, self._coded(), heads)
        late = _append(self.recent, chunk)
        return [*found, Rows(late[0], late[1])]

    # ---- keeping

    def _all(self, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
        """Everything decoded, the pending chunk included, in order of position."""
        plan = self.plan
        both = []
        for i, codec in enumerate((plan.keys, plan.values)):
            coded = codec.decode(self.codes[i], plan.sinks, dtype) if self.codes[i] else None
            parts = [p[i] if p else None for p in (self.sinks, self.recent, self._pending)]
            both.append(_join([parts[0], coded, parts[1], parts[2]]))
        return both[0], both[1]

    def _commit(self) -> None:
        """Move the pending chunk into sinks, window and codes."""
        if not self._pending:
            return
        plan, new = self.plan, self._pending
        self._pending = ()
        held = self.sinks[0].shape[2] if self.sinks else 0
        take = min(plan.sinks - held, new[0].shape[2])
        if take > 0:
            first = tuple(copy_rows(a, 0, take) for a in new)
            self.sinks = _append(self.sinks, first)
            new = tuple(a[:, :, take:] for a in new)
        # Joined rows are a copy already; a first chunk may be a view of something larger.
        owned = bool(self.recent)
        recent = _append(self.recent, new)
        coded = self._coded()
        ready = max(0, plan.boundary(self.offset) - plan.sinks - coded)
        if ready:
            start = plan.sinks + coded
            self.codes = (
                _append(self.codes[0], plan.keys.encode(recent[0][:, :, :ready], start)),
                _append(self.codes[1], plan.values.encode(recent[1][:, :, :ready], start)),
            )
        if ready or not owned:
            recent = tuple(copy_rows(a, ready, a.shape[2]) for a in recent)
        self.recent = recent

    def settle(self) -> None:
        """Put a chunk away whose attention never came (a model that does not attend with it)."""
        self._commit()

    def _coded(self) -> int:
        """Tokens in codes."""
        return rows(self.codes[0], self.plan.keys)

    def trim(self, n: int) -> int:
        """Forget the last `n` tokens; what is in codes stays in codes.

        A group of tokens that can only be decoded together and is cut in the middle comes back
        to the window in its decoded form.
        """
        self._commit()
        n = min(self.offset, n)
        self.offset -= n
        if not self.offset:
            self._reset()
            return n
        plan = self.plan
        recent = self.recent[0].shape[2] if self.recent else 0
        if n <= recent:
            self.recent = tuple(copy_rows(a, 0, recent - n) for a in self.recent)
            return n
        keep = self.offset - plan.sinks
        if keep <= 0:
            self.codes = ((), ())
            self.sinks = tuple(copy_rows(a, 0, self.offset) for a in self.sinks)
            self.recent = tuple(copy_rows(a, 0, 0) for a in self.recent)
            return n
        group = lcm(plan.keys.granularity, plan.values.granularity)
        cut = keep // group * group
        tail, codes = [], []
        for codec, packed, old in zip(
            (plan.keys, plan.values), self.codes, self.recent, strict=True
        ):
            part = copy_rows(old, 0, 0)
            if cut < keep:
                part = codec.decode(
                    _span(packed, codec, cut, cut + group), plan.sinks + cut, old.dtype
                )
            tail.append(copy_rows(part, 0, keep - cut))
            codes.append(_span(packed, codec, 0, cut))
        self.recent = tuple(tail)
        self.codes = (codes[0], codes[1])
        return n

    # ---- what mlx-lm asks

    @staticmethod
    def merge(caches: "Sequence[VeloxCache]") -> Any:
        """A batch of these sequences; mlx-lm's server batches where a cache can do this."""
        from velox_pack.caches.batch import VeloxBatchCache

        return VeloxBatchCache.merge(caches)

    @property
    def state(self) -> list[Any]:
        """Flat list of scalars and packed arrays; reading it is cheap."""
        self._commit()
        pairs = [*(self.sinks or (None, None)), *(self.recent or (None, None))]
        codes_k, codes_v = self.codes
        scalars = [self.fingerprint, self.layer, self.offset, len(codes_k)]
        return [*scalars, *pairs, *codes_k, *codes_v]

    @state.setter
    def state(self, value: Sequence[Any]) -> None:
        if len(value) < 8 or not isinstance(value[0], str):
            raise RecipeError("this is not the state of a velox-pack cache")
        fingerprint, layer, offset, n_k = value[:4]
        if (fingerprint, int(layer)) != (self.fingerprint, self.layer):
            self._plan = None
        self._reset()
        self.fingerprint, self.layer, self.offset = fingerprint, int(layer), int(offset)
        sink_k, sink_v, recent_k, recent_v = value[4:8]
        self.sinks = () if sink_k is None else (sink_k, sink_v)
        self.recent = () if recent_k is None else (recent_k, recent_v)
        codes = tuple(value[8:])
        self.codes = (codes[: int(n_k)], codes[int(n_k) :])

    @classmethod
    def from_state(cls, state: Sequence[Any]) -> "VeloxCache":
        """Rebuild a cache; it finds its plan at first use, among the loaded bundles."""
        cache = cls.__new__(cls)
        cache._plan, cache.fingerprint, cache.layer = None, "", 0
        cache.state = state
        return cache

    def is_trimmable(self) -> bool:
        """Any number of tokens can be forgotten."""
        return True

    def empty(self) -> bool:
        """Whether no token has been seen."""
        return self.offset == 0

    def size(self) -> int:
        """Tokens seen."""
        return self.offset

    def arrays(self) -> list[mx.array]:
        """All arrays that this sequence holds."""
        held = (self.sinks, self.recent, self._pending, *self.codes)
        return [a for group in held for a in group]

    @property
    def nbytes(self) -> int:
        """Bytes of state, found by walking the arrays."""
        return sum(a.nbytes for a in self.arrays())

    def __deepcopy__(self, memo: dict[int, Any]) -> "VeloxCache":
        return self.copy()

    def copy(self) -> "VeloxCache":
        """Arrays are never written in place, so a copy may share them; the plan is shared."""
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        return other
