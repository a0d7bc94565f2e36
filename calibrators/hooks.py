"""Watching a model from outside: every attention call, every rotation of keys, every layer.

All of it is done by replacing names for the length of a `with` block and putting them back, so it
is not safe to use from two threads at once, nor while another model runs in the same process.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import base as mlx_lm_base

_NAME = "scaled_dot_product_attention"

LayerCall: TypeAlias = Callable[..., Any]
# Other keys and values to attend to, and perhaps another mask for them.
Instead: TypeAlias = tuple[mx.array, mx.array] | tuple[mx.array, mx.array, mx.array] | None


@dataclass(frozen=True, eq=False)
class RopeCall:
    """One call of `mx.fast.rope`: what went in, what came out, and how it was asked to rotate."""

    before: mx.array
    after: mx.array
    dims: int
    traditional: bool
    base: float | None
    scale: float
    offset: int | mx.array
    freqs: mx.array | None


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One call of mlx-lm's attention: queries [B, Hq, N, Dk], keys [B, Hkv, M, Dk], values.

    `rope` is the rotation whose very result is `keys`, or None (no rotation, or something was done
    to the keys after it). `cache` is what the model passed along, None in a streaming pass.
    """

    queries: mx.array
    keys: mx.array
    values: mx.array
    scale: float
    mask: mx.array | str | None
    rope: RopeCall | None
    cache: Any


class Watch:
    """What `watch_attention` has seen; `take` hands out the attention calls and forgets them.

    `replace(call)` may give other keys and values for the model to attend to (a perturbation, a
    reconstruction from codes), and a mask that fits them; None leaves all as it is. With `attend`
    False attention answers zeros.
    """

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []
        self.ropes: list[RopeCall] = []
        self.attend = True
        self.replace: Callable[[AttentionCall], Instead] | None = None

    def take(self) -> list[AttentionCall]:
        """The attention calls since the last time."""
        calls, self.calls, self.ropes = self.calls, [], []
        return calls

    def rope_of(self, array: mx.array) -> RopeCall | None:
        """The rotation that returned this very object, if any."""
        return next((r for r in reversed(self.ropes) if r.after is array), None)


def _namespaces(model: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Every (namespace, name) under which mlx-lm's attention can be called by this model."""
    original = mlx_lm_base.scaled_dot_product_attention
    spaces = [vars(m) for n, m in list(sys.modules.items()) if m and n.startswith("mlx_lm.models")]
    # A model file of the user's own need not be in sys.modules: find it through its classes.
    for cls in {c for module in model.modules() for c in type(module).__mro__}:
        spaces += [f.__globals__ for f in vars(cls).values() if hasattr(f, "__globals__")]
    unique = {id(space): space for space in spaces}
    return [
        (space, name)
        for space in unique.values()
        for name, value in list(space.items())
        if value is original or (name == _NAME and callable(value))
    ]


@contextmanager
def watch_attention(model: nn.Module) -> Iterator[Watch]:
    """Record all attention and rope calls of `model` inside the block. Not thread-safe."""
    watch = Watch()
    inside = False

    def spy_on(attend: Callable[..., mx.array]) -> Callable[..., mx.array]:
        def attention(
            queries: mx.array,
            keys: mx.array,
            values: mx.array,
            cache: Any = None,
            scale: float = 1.0,
            mask: mx.array | str | None = None,
            **rest: Any,
        ) -> mx.array:
            nonlocal inside
            if not inside:  # a router in between may call the original by name: count once
                rope_call = watch.rope_of(keys)
                call = AttentionCall(queries, keys, values, scale, mask, rope_call, cache)
                watch.calls.append(call)
                if not watch.attend:
                    return mx.zeros((*queries.shape[:-1], values.shape[-1]), queries.dtype)
                if watch.replace is not None and (other := watch.replace(call)) is not None:
                    keys, values, *masks = other
                    mask = masks[0] if masks else mask
            outer, inside = inside, True
            try:
                return attend(queries, keys, values, cache=cache, scale=scale, mask=mask, **rest)
            finally:
                inside = outer

        return attention

    rope = mx.fast.rope

    def spy_rope(
        a: mx.array,
        dims: int,
        *,
        traditional: bool,
        base: float | None,
        scale: float,
        offset: int | mx.array,
        freqs: mx.array | None = None,
        **rest: Any,
    ) -> mx.array:
        out = rope(
            a,
            dims,
            traditional=traditional,
            base=base,
            scale=scale,
            offset=offset,
            freqs=freqs,
            **rest,
        )
        watch.ropes.append(RopeCall(a, out, dims, traditional, base, scale, offset, freqs))
        return out

    places = [(space, name, space[name]) for space, name in _namespaces(model)]
    try:
        for space, name, value in places:
            space[name] = spy_on(value)
        mx.fast.rope = spy_rope
        yield watch
    finally:
        mx.fast.rope = rope
        for space, name, value in places:
            space[name] = value


def first_and_rest(
    args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The activations that a layer is called with, and its other arguments.

    Some models pass all by name; the activations come first in that case too.
    """
    if args:
        return args[0], tuple(args[1:]), kwargs
    first, *others = kwargs
    return kwargs[first], (), {name: kwargs[name] for name in others}


@contextmanager
def replaced_calls(
    modules: Sequence[nn.Module], make: Callable[[int, nn.Module, LayerCall], LayerCall]
) -> Iterator[None]:
    """Give each module another `__call__` inside the block: `make(index, module, original)`.

    The module's CLASS is exchanged for a subclass, so that it keeps every attribute that the model
    looks at; a wrapper module would hide them.
    """
    classes = [type(m) for m in modules]

    def bind(cls: type[nn.Module], module: nn.Module) -> LayerCall:
        return lambda *args, **kwargs: cls.__call__(module, *args, **kwargs)

    try:
        for index, (module, cls) in enumerate(zip(modules, classes, strict=True)):
            call = make(index, module, bind(cls, module))

            def run(_self: nn.Module, *args: Any, _call: LayerCall = call, **kwargs: Any) -> Any:
                return _call(*args, **kwargs)

            object.__setattr__(module, "__class__", type(cls.__name__, (cls,), {"__call__": run}))
        yield
    finally:
        for module, cls in zip(modules, classes, strict=True):
            object.__setattr__(module, "__class__", cls)
