"""What the passes over the calibration text would refuse, known before any weight is read.

As in tracing, the model's forward is called on a few tokens and nothing is evaluated.
"""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from velox_pack.calibrators.hooks import LayerCall, first_and_rest, replaced_calls

SEQUENCES, TOKENS = 2, 13  # sizes that no head count or head dimension is mistaken for


@dataclass(frozen=True)
class Rehearsed:
    """Why each pass is impossible, or None where nothing speaks against it.

    forward   running the model a layer and a sequence at a time
    backward  finding sensitivities and gradients, a layer at a time too
    """

    forward: str | None = None
    backward: str | None = None


def rehearse(model: nn.Module) -> Rehearsed:
    """Run `model`, built by mlx-lm, lazily; its parameters are not needed.

    A forward that fails says nothing: the pass itself then tells what is wrong.
    """
    layers: list[nn.Module] = list(model.layers)
    forward: list[str] = []
    backward: list[str] = []

    def watched(index: int, _module: nn.Module, original: LayerCall) -> LayerCall:
        def call(*args: Any, **kwargs: Any) -> Any:
            x, others, named = first_and_rest(args, kwargs)
            if x.ndim != 3 or x.shape[0] != SEQUENCES:
                forward.append(f"layer {index} takes activations with axes {list(x.shape)}")
            out = original(*args, **kwargs)
            if any(_is_activation(value) for value in (*others, *named.values())):
                backward.append(f"layer {index} takes more than one activation")
            elif not isinstance(out, mx.array):
                backward.append(f"layer {index} hands on more than one activation")
            return out

        return call

    try:
        with replaced_calls(layers, watched):
            model(mx.zeros((SEQUENCES, TOKENS), dtype=mx.int32))
    except Exception:  # an architecture fails in its own way
        return Rehearsed()
    first = next(iter(forward), None)
    return Rehearsed(first, next(iter(backward), None) or first)


def _is_activation(value: Any) -> bool:
    """A float array with numbers for every token: a gradient would have to be found for it too."""
    return (
        isinstance(value, mx.array)
        and mx.issubdtype(value.dtype, mx.floating)
        and value.ndim >= 3
        and value.shape[:2] == (SEQUENCES, TOKENS)
    )
