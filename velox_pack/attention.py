"""The attention router: gives every cache the true queries, after RoPE and any q/k norm.

mlx-lm's models import `scaled_dot_product_attention` into their own module. The router replaces
that name in the modules of one model, when a bundle is loaded; it acts on our handles alone and
passes everything else to the function that was there.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from velox_pack.caches.cache import Pending

NAME = "scaled_dot_product_attention"


def _router(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    @wraps(original)
    def route(
        queries: mx.array,
        keys: Any,
        values: Any,
        cache: Any = None,
        scale: float = 1.0,
        mask: Any = None,
        sinks: mx.array | None = None,
        **more: Any,
    ) -> mx.array:
        if isinstance(keys, Pending):
            out: mx.array = keys.cache.attend(queries, scale, mask, sinks)
            return out
        if sinks is not None:
            more["sinks"] = sinks
        return original(queries, keys, values, cache=cache, scale=scale, mask=mask, **more)

    route.velox = True  # type: ignore[attr-defined]  # marks it, so that it is installed once
    return route


def install(model: nn.Module) -> list[str]:
    """Route the attention of `model`'s own modules; return the names of those routed.

    The modules are found through the functions of the model's classes, so that inherited ones and
    those of a file that is no entry of `sys.modules` are among them.
    """
    classes = {cls for module in model.modules() for cls in type(module).__mro__}
    routed = set()
    for function in (f for cls in classes for f in vars(cls).values()):
        space = getattr(function, "__globals__", {})
        original = space.get(NAME)
        if original is None:
            continue
        if not getattr(original, "velox", False):
            space[NAME] = _router(original)
        routed.add(space["__name__"])
    return sorted(routed)
