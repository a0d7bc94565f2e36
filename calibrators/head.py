"""The model behind its last layer: the logits it makes of that layer's output, and the gradient."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from velox_pack.calibrators.hooks import LayerCall, first_and_rest, replaced_calls
from velox_pack.calibrators.memory import give_back
from velox_pack.calibrators.outside import read_in_native_dtype
from velox_pack.calibrators.stream import StreamingForward, drop

Array = np.ndarray

_POSITIONS = 128  # whose logits are held at once, some eight times over,
_LOGITS = 1 << 24  # unless that is more than this: 64 MiB in float32


@contextmanager
def only_head(streaming: StreamingForward) -> Iterator[Callable[[mx.array, mx.array], mx.array]]:
    """Inside the block: (ids [b, n], last layer's output [b, n, hidden]) -> logits, float32.

    The model's own forward computes them, with layers that do nothing but the last, which answers
    with the given output; the embedding of the ids is not needed, and so never made.
    """
    given: list[mx.array] = []
    last = len(streaming.layers) - 1

    def make(index: int, _module: nn.Module, _original: LayerCall) -> LayerCall:
        def call(*args: Any, **kwargs: Any) -> Any:
            return given.pop() if index == last else first_and_rest(args, kwargs)[0]

        return call

    def logits(ids: mx.array, hidden: mx.array) -> mx.array:
        given.append(hidden)
        out: mx.array = streaming.model(ids)
        return out.astype(mx.float32)

    with (
        read_in_native_dtype(streaming.model, streaming.layers),
        replaced_calls(streaming.layers, make),
    ):
        streaming.fill_outside()
        try:
            yield logits
        finally:
            drop(streaming.model)


def head(streaming: StreamingForward, tokens: Array, hidden: mx.array) -> mx.array:
    """Logits float32 [n, N, vocabulary] for the output of `streaming.run(tokens)`."""
    with only_head(streaming) as logits:
        out = logits(mx.array(tokens), hidden)
        mx.eval(out)
    return out


def head_gradient(
    streaming: StreamingForward, tokens: Array, hidden: mx.array, seed: int
) -> mx.array:
    """Gradient at the last layer's output `hidden` [n, N, hidden] of -log p(y), of its shape.

    Summed over the tokens int32 [n, N], with labels y drawn from the model from `seed`.
    """
    rows = []
    key = mx.random.key(seed)
    with only_head(streaming) as logits:

        def loss(h: mx.array, ids: mx.array, own: mx.array) -> mx.array:
            out = logits(ids, h)
            drawn = mx.random.categorical(mx.stop_gradient(out), key=own)
            return nn.losses.cross_entropy(out, drawn, reduction="sum")

        vocabulary = logits(mx.array(tokens[:1, :1]), hidden[:1, :1]).shape[-1]
        positions = max(32, min(_POSITIONS, _LOGITS // vocabulary // 32 * 32))
        for b in range(hidden.shape[0]):
            parts = []
            for start in range(0, hidden.shape[1], positions):
                key, own = mx.random.split(key)
                piece = slice(start, start + positions)
                ids = mx.array(tokens[b : b + 1, piece])
                part = mx.grad(loss)(hidden[b : b + 1, piece], ids, own)
                mx.eval(part)
                parts.append(part)
            rows.append(mx.concatenate(parts, axis=1))
    give_back()
    return mx.concatenate(rows)
