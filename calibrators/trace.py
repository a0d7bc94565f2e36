"""Tracing: what each layer of an mlx-lm model does with keys and values, found without its weights.

The model's own forward is called on 8 tokens with its own caches. MLX is lazy and nothing is
evaluated, so this takes milliseconds and no memory for models of any size. Only where the key is
not what `mx.fast.rope` returned are keys computed, a layer at a time, from an input and parameters
drawn for the purpose.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import CacheList, KVCache, RotatingKVCache, make_prompt_cache

from velox_pack.calibrators.hooks import (
    AttentionCall,
    LayerCall,
    RopeCall,
    Watch,
    replaced_calls,
    watch_attention,
)
from velox_pack.calibrators.probed_rope import RopeSpec, alike, drawn_parameters, find, rope_spec
from velox_pack.manifests.errors import CalibrationError

_Borrowed = dict[int, int | None]
AttentionKind = Literal["full", "sliding", "none", "other"]

TOKENS = 8
# Far behind any model's trained length: a rotation whose base grows with the length shows itself.
LATER = 1 << 24
CHANGING = "RoPE's frequencies change with the length"
PROBED = (0, 500)  # positions at which keys are looked at; float32 angles are still good there


@dataclass(frozen=True)
class LayerTrace:
    """One layer. Sizes are 0 where there is no attention; `window` is in tokens.

    `rope` is None where keys have to be taken as they reach attention: there is no rotation (before
    and after are the same), or it cannot be undone from its parameters (base that grows with the
    length, keys changed after it); then `rope_reason` says why.
    `routed`: the layer calls mlx-lm's scaled_dot_product_attention.
    `covered`: velox-pack can hold this layer's keys and values; otherwise `reason` says why not.
    `cache_index` is the place of the layer's cache in `make_prompt_cache(model)`.
    """

    index: int
    attention: AttentionKind
    heads: int = 0
    kv_heads: int = 0
    k_dim: int = 0
    v_dim: int = 0
    scale: float = 0.0
    window: int | None = None
    rope: RopeSpec | None = None
    routed: bool = False
    covered: bool = False
    reason: str | None = None
    cache_index: int | None = None
    rope_reason: str | None = None


@dataclass(frozen=True, eq=False)
class _Update:
    """Keys and values on their way into cache number `place`; `rope` is what made the keys."""

    place: int
    cache: Any
    listed: bool
    keys: mx.array
    values: mx.array
    rope: RopeCall | None


@dataclass(eq=False)
class _LayerLog:
    calls: list[AttentionCall]
    updates: list[_Update]
    runs: int = 0
    ropes: list[RopeCall] = field(default_factory=list)


def trace(model: nn.Module) -> list[LayerTrace]:
    """Describe all layers of a model built by mlx-lm; nothing is evaluated, no weights are needed.

    Raises CalibrationError for a model without `.layers` or whose forward fails. Not thread-safe.
    """
    layers = getattr(model, "layers", None)
    if not layers:
        raise CalibrationError(f"{_name(model)} has no list of layers: it cannot be traced")
    try:
        logs = _forward(model, offset=0)
    except Exception as error:
        raise CalibrationError(f"cannot trace {_name(model)}: {_one_line(error)}") from error
    try:
        later = _forward(model, offset=LATER)
    except Exception:  # then no rotation can be vouched for, but the layers can still be used
        later = [_LayerLog([], []) for _ in logs]
    borrowed = _borrowed(logs)
    traces = [_describe(i, logs[i], later[i], borrowed) for i in range(len(logs))]
    unclear = [t.index for t in traces if t.covered and t.rope is None and t.rope_reason is None]
    candidates = {i: _candidates(logs[i], later[i]) for i in unclear}
    for i, (spec, reason) in _probe(model, candidates).items():
        if reason is not None and logs[i].ropes and not candidates[i]:
            reason = CHANGING
        traces[i] = replace(traces[i], rope=spec, rope_reason=reason)
    return traces


def refuse_if_uncovered(traces: Sequence[LayerTrace]) -> None:
    """Raise CalibrationError, with the reasons, if no layer can be handled."""
    if any(t.covered for t in traces):
        return
    groups: dict[str, list[int]] = {}
    for t in traces:
        groups.setdefault(t.reason or "no reason known", []).append(t.index)
    reasons = "; ".join(f"{_span(where)}: {reason}" for reason, where in groups.items())
    raise CalibrationError(f"no layer of this model has keys and values we can hold ({reasons})")


def _name(model: nn.Module) -> str:
    return str(getattr(model, "model_type", None) or type(model).__module__.rpartition(".")[2])


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _span(where: Sequence[int]) -> str:
    """`layer 3`, `layers 0-7` or `layers 0, 2, 5`."""
    if len(where) == 1:
        return f"layer {where[0]}"
    if list(where) == list(range(where[0], where[-1] + 1)):
        return f"layers {where[0]}-{where[-1]}"
    return "layers " + ", ".join(map(str, where))


def _forward(model: nn.Module, offset: int, given_alike: Container[int] = ()) -> list[_LayerLog]:
    """One lazy forward at `offset`, with a log for each layer.

    The layers `given_alike` get an input of their own, the same for each token.
    """
    layers: list[nn.Module] = list(model.layers)
    logs = [_LayerLog([], []) for _ in layers]
    current: list[int] = []

    def enter(index: int, module: nn.Module, original: LayerCall) -> LayerCall:
        def call(*args: Any, **kwargs: Any) -> Any:
            logs[index].runs += 1
            current.append(index)
            watch.take()
            if index in given_alike:
                args, kwargs = alike(args, kwargs)
            try:
                return original(*args, **kwargs)
            finally:
                logs[index].ropes += watch.ropes
                logs[index].calls += watch.take()
                current.pop()

        return call

    with watch_attention(model) as watch:
        watch.attend = not offset  # masks of a late offset do not fit the keys of 8 tokens
        caches = make_prompt_cache(model)
        for place, cache in enumerate(caches):
            listed = isinstance(cache, CacheList)
            for leaf in cache.caches if listed else (cache,):
                if hasattr(leaf, "update_and_fetch"):
                    leaf.update_and_fetch = _spy_update(
                        leaf, place, listed, offset, logs, current, watch
                    )
        with replaced_calls(layers, enter):
            model(mx.zeros((1, TOKENS), dtype=mx.int32), cache=caches)
    return logs


def _spy_update(
    cache: Any,
    place: int,
    listed: bool,
    offset: int,
    logs: list[_LayerLog],
    current: list[int],
    watch: Watch,
) -> Callable[..., tuple[mx.array, mx.array]]:
    update = cache.update_and_fetch
    if offset:
        cache.offset = offset

    def spy(keys: mx.array, values: mx.array, *args: Any) -> tuple[mx.array, mx.array]:
        if current:
            rope = watch.rope_of(keys)
            logs[current[-1]].updates.append(_Update(place, cache, listed, keys, values, rope))
        if offset:
            cache.keys, cache.values = keys, values  # for layers that borrow them
        else:
            update(keys, values, *args)
        # The cache is new, so what it would return is what came in: the same objects keep identity.
        return keys, values

    return spy


def _borrowed(logs: Sequence[_LayerLog]) -> _Borrowed:
    """Layers whose attention reads what another layer keeps: {borrower: lender, None if unknown}.

    A lender is known by its very keys or values, or by its cache.
    """
    owner = {
        id(thing): i
        for i, log in enumerate(logs)
        for update in log.updates
        for thing in (update.keys, update.values, update.cache)
    }
    pairs: _Borrowed = {}
    for i, log in enumerate(logs):
        for call in log.calls:
            things = (call.keys, call.values, call.cache)
            lenders = {owner[id(thing)] for thing in things if id(thing) in owner}
            if not log.updates:
                pairs[i] = min(lenders, default=None)
            elif lenders - {i}:
                pairs[i] = min(lenders - {i})
    return pairs


def _describe(index: int, log: _LayerLog, later: _LayerLog, borrowed: _Borrowed) -> LayerTrace:
    kind, window = _kind(log)
    call = log.calls[0] if log.calls else None
    update = log.updates[0] if log.updates else None
    sizes: dict[str, Any] = {}
    if call is not None:
        keys, values = call.keys, call.values
        sizes = {"heads": call.queries.shape[1], "scale": float(call.scale)}
    elif update is not None:
        keys, values = update.keys, update.values
    if call is not None or update is not None:
        sizes |= {"kv_heads": keys.shape[1], "k_dim": keys.shape[-1], "v_dim": values.shape[-1]}
    if update is not None:
        sizes["cache_index"] = update.place
    reason = _reason(index, log, borrowed)
    if reason is None and update is not None:
        rope = _rope(log, later)
        unsure = update.rope is not None and rope is None
        why = CHANGING if later.updates else "its rotation at late positions cannot be traced"
        return LayerTrace(
            index,
            kind,
            window=window,
            rope=rope,
            routed=True,
            covered=True,
            rope_reason=why if unsure else None,
            **sizes,
        )
    routed = call is not None
    if routed and (update is None or update.keys is not call.keys):  # type: ignore[union-attr]
        kind = "other"
    return LayerTrace(index, kind, window=window, routed=routed, reason=reason, **sizes)


def _kind(log: _LayerLog) -> tuple[AttentionKind, int | None]:
    if not log.updates:
        return ("other" if log.calls or log.runs == 0 else "none"), None
    cache = log.updates[0].cache
    if isinstance(cache, RotatingKVCache):
        return "sliding", int(cache.max_size)
    return ("full" if type(cache) is KVCache else "other"), None


def _reason(index: int, log: _LayerLog, borrowed: _Borrowed) -> str | None:
    """Why this layer cannot be handled, or None."""
    lends_to = [i for i, lender in borrowed.items() if lender == index]
    update = log.updates[0] if log.updates else None
    if log.runs != 1:
        return f"the model calls this layer {log.runs} times as a whole in one pass"
    if index in borrowed:
        lender = borrowed[index]
        whose = "that it does not cache" if lender is None else f"of layer {lender}"
        return f"attends to keys and values {whose}"
    if lends_to:
        return f"lends its keys and values to {_span(lends_to)}"
    if update is None:
        return "no attention"
    if None in borrowed.values():  # any layer may be the one that lends
        return "may lend its keys and values: some layer attends to keys that it does not cache"
    if len(log.updates) > 1 or len(log.calls) > 1:
        return f"attends {max(len(log.updates), len(log.calls))} times in one pass"
    if not log.calls:
        return "computes attention by itself, so its queries cannot be routed"
    call = log.calls[0]
    if _repeated(call.keys, update.keys) and _repeated(call.values, update.values):
        return "repeats its KV heads between the cache and attention"
    if call.keys.shape != update.keys.shape or call.values.shape != update.values.shape:
        return "latent attention: its cache holds a compressed form, not keys and values"
    if call.keys is not update.keys or call.values is not update.values:
        return "changes keys or values between the cache and attention"
    if update.listed:
        return "its cache is one part of a CacheList"
    if type(update.cache) not in (KVCache, RotatingKVCache):
        return f"keeps its keys in a {type(update.cache).__name__}"
    return None


def _repeated(given: mx.array, cached: mx.array) -> bool:
    """Whether attention gets more heads than the cache, of the same size."""
    return bool(given.shape[1] > cached.shape[1] and given.shape[2:] == cached.shape[2:])


def _rope(log: _LayerLog, later: _LayerLog) -> RopeSpec | None:
    """The rotation that returned the cached keys, if it is the same at every position."""
    call = log.updates[0].rope
    other = later.updates[0].rope if later.updates else None
    if call is None or other is None or call.before.ndim != 4:
        return None
    spec = rope_spec(call)
    return spec if rope_spec(other) == spec and _is_at(other, LATER) else None


def _is_at(call: RopeCall, position: int) -> bool:
    at = call.offset if isinstance(call.offset, int) else np.array(call.offset)
    return bool(np.all(np.equal(at, position)))


def _candidates(log: _LayerLog, later: _LayerLog) -> list[RopeSpec]:
    """Rotations that happen in this layer and are the same at every position."""
    known = {rope_spec(c) for c in later.ropes if c.before.ndim == 4 and _is_at(c, LATER)}
    return list(dict.fromkeys(s for c in log.ropes if (s := rope_spec(c)) in known))


def _probe(
    model: nn.Module, candidates: Mapping[int, Sequence[RopeSpec]]
) -> dict[int, tuple[RopeSpec | None, str | None]]:
    """For each layer in `candidates` the rotation of its keys, or why it is none of them."""
    if not candidates:
        return {}
    found = {}
    with drawn_parameters(model, list(candidates)) as restore:
        try:
            logs = {start: _forward(model, start, candidates) for start in PROBED}
        except Exception as error:
            reason = f"the layer's rotation could not be probed: {_one_line(error)}"
            return dict.fromkeys(candidates, (None, reason))
        for i, specs in candidates.items():
            found[i] = find([(s, log[i].updates[0].keys) for s, log in logs.items()], specs)
            restore(i)
            for log in logs.values():
                log[i].updates.clear()
    return found
