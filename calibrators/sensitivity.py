"""How much the model's predictions suffer from noise on the keys and values of each KV head.

One forward pass keeps each layer's input; one backward pass, a layer at a time with `mx.vjp`, gives
the gradients at the keys and values. To second order, independent noise e on one token's key costs
KL = 1/2 E[(g . e)^2], with g the gradient of -log p(y) summed over the sequence, and labels y drawn
from the model's OWN predictions: then E[g g^T] is the true Fisher information, whose cross terms
between positions vanish, and not the empirical one, which takes the text's labels.

A codec that rotates makes noise alike in all directions, of E|e|^2 = D(b) |x - mean|^2, where D is
its relative error at b bits. RoPE turns gradients and keeps their length, so the gradient after
RoPE serves keys before it. What is returned is thus nats of KL per predicted token for D = 1.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from velox_pack.calibrators.capture import LayerStatistics
from velox_pack.calibrators.hooks import AttentionCall, LayerCall, replaced_calls, watch_attention
from velox_pack.calibrators.outside import read_in_native_dtype
from velox_pack.calibrators.stream import StreamingForward, drop, sequence_of
from velox_pack.calibrators.trace import LayerTrace
from velox_pack.manifests.errors import CalibrationError

Array = np.ndarray

_POSITIONS = 128  # logits held at once: this many times the vocabulary, float32


@dataclass(frozen=True, eq=False)
class Sensitivity:
    """Nats of KL per predicted token for noise of relative size 1, by covered layer.

    `keys[layer]` and `values[layer]` are float64 [Hkv]. Multiply by a codec's relative error D(b)
    and add over layers, heads and parts to predict its KL (good while D is small).
    """

    keys: Mapping[int, Array]
    values: Mapping[int, Array]
    tokens: int


def measure(
    streaming: StreamingForward,
    tokens: Array,
    traces: Sequence[LayerTrace],
    statistics: Mapping[int, LayerStatistics],
    *,
    skip_first: int = 4,
    seed: int = 0,
) -> Sensitivity:
    """Sensitivities of all layers in `statistics`, from token ids int32 [n, N].

    The first `skip_first` tokens of a sequence are never coded, so they do not count. Raises
    CalibrationError where layers hand each other more than one activation.
    """
    inputs: list[mx.array] = []
    arguments: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def keep(index: int, x: mx.array, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(_is_activation(a, x.shape) for a in (*args, *kwargs.values())):
            raise CalibrationError(
                f"layer {index} takes more than one activation: "
                "sensitivities cannot be measured a layer at a time"
            )
        mx.eval(x)
        inputs.append(x)
        arguments.append((args, kwargs))

    hidden = streaming.run(tokens, on_input=keep)
    mx.eval(hidden)
    gradient = _head_gradient(streaming, tokens, hidden, seed)
    del hidden
    keys: dict[int, Array] = {}
    values: dict[int, Array] = {}
    covered = {t.index: t for t in traces if t.index in statistics}
    for index in range(len(streaming.layers) - 1, -1, -1):
        gradient, found = _through_layer(
            streaming,
            index,
            inputs.pop(),
            *arguments.pop(),
            gradient,
            covered,
            statistics,
            skip_first,
        )
        if found is not None:
            keys[index], values[index] = (part / (2 * tokens.size) for part in found)
    return Sensitivity(dict(sorted(keys.items())), dict(sorted(values.items())), tokens.size)


def _is_activation(value: Any, shape: tuple[int, ...]) -> bool:
    return (
        isinstance(value, mx.array)
        and mx.issubdtype(value.dtype, mx.floating)
        and value.ndim >= 3
        and value.shape[:2] == shape[:2]
    )


@contextmanager
def _only_head(streaming: StreamingForward) -> Iterator[Callable[[mx.array, mx.array], mx.array]]:
    """Inside the block: (ids [b, n], last layer's output [b, n, hidden]) -> logits, float32.

    The model's own forward computes them, with layers that do nothing but the last, which answers
    with the given output; the embedding of the ids is not needed, and so never made.
    """
    given: list[mx.array] = []
    last = len(streaming.layers) - 1

    def make(index: int, _module: nn.Module, _original: LayerCall) -> LayerCall:
        return lambda x, *args, **kwargs: given.pop() if index == last else x

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
    with _only_head(streaming) as logits:
        out = logits(mx.array(tokens), hidden)
        mx.eval(out)
    return out


def _head_gradient(
    streaming: StreamingForward, tokens: Array, hidden: mx.array, seed: int
) -> mx.array:
    """Gradient at the last layer's output of -log p(y), y drawn from the model, summed."""
    rows = []
    key = mx.random.key(seed)
    with _only_head(streaming) as logits:

        def loss(h: mx.array, ids: mx.array, own: mx.array) -> mx.array:
            out = logits(ids, h)
            drawn = mx.random.categorical(mx.stop_gradient(out), key=own)
            return nn.losses.cross_entropy(out, drawn, reduction="sum")

        for b in range(hidden.shape[0]):
            parts = []
            for start in range(0, hidden.shape[1], _POSITIONS):
                key, own = mx.random.split(key)
                piece = slice(start, start + _POSITIONS)
                ids = mx.array(tokens[b : b + 1, piece])
                part = mx.grad(loss)(hidden[b : b + 1, piece], ids, own)
                mx.eval(part)
                parts.append(part)
            rows.append(mx.concatenate(parts, axis=1))
    return mx.concatenate(rows)


def _through_layer(
    streaming: StreamingForward,
    index: int,
    x: mx.array,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    gradient: mx.array,
    covered: Mapping[int, LayerTrace],
    statistics: Mapping[int, LayerStatistics],
    skip_first: int,
) -> tuple[mx.array, tuple[Array, Array] | None]:
    """Gradient at the layer's input, and sum over tokens of |g|^2 |x - mean|^2 / D per KV head."""
    layer = streaming.layers[index]
    trace = covered.get(index)
    sums = None if trace is None else (np.zeros(trace.kv_heads), np.zeros(trace.kv_heads))
    rows = []
    streaming.fill(index)
    with watch_attention(streaming.model) as watch:
        for b in range(x.shape[0]):
            own, named = sequence_of(x.shape[0], b, args, kwargs)
            given, back = x[b : b + 1], gradient[b : b + 1]
            if trace is None or sums is None:
                _, (at_input,) = mx.vjp(lambda h: layer(h, *own, **named), [given], [back])  # noqa: B023
                mx.eval(at_input)
                rows.append(at_input)
                continue

            def forward(h: mx.array, dk: mx.array, dv: mx.array) -> list[mx.array]:
                def add(call: AttentionCall) -> tuple[mx.array, mx.array]:
                    return call.keys + dk, call.values + dv

                watch.replace = add
                out = layer(h, *own, **named)  # noqa: B023
                call = watch.take()[0]
                before = call.keys if call.rope is None else call.rope.before
                return [out, before, call.values]

            n = given.shape[1]
            k_shape = (1, trace.kv_heads, n, trace.k_dim)
            v_shape = (1, trace.kv_heads, n, trace.v_dim)
            zeros = [mx.zeros(k_shape), mx.zeros(v_shape)]
            outputs, gradients = mx.vjp(forward, [given, *zeros], [back, *zeros])
            mx.eval(outputs, gradients)
            rows.append(gradients[0])
            means = (statistics[index].keys_before.mean, statistics[index].values.mean)
            for total, x_, g_, mean in zip(sums, outputs[1:], gradients[1:], means, strict=True):
                total += _weighted(np.array(x_[0]), np.array(g_[0]), mean, skip_first)
    drop(layer)
    result = mx.concatenate(rows)
    if not mx.isfinite(result).all().item():
        raise CalibrationError(f"layer {index}: the gradient at its input is not finite")
    return result, sums


def _weighted(x: Array, g: Array, mean: Array, skip_first: int) -> Array:
    """Sum over tokens of |g|^2 |x - mean|^2 / D, [H], for x and g [H, N, D]."""
    size = np.square(x.astype(np.float64) - mean[:, None, :]).mean(axis=-1)
    steep = np.square(g.astype(np.float64)).sum(axis=-1)
    result: Array = (size * steep)[:, skip_first:].sum(axis=1)
    return result
