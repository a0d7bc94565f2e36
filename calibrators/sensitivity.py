"""How much the model's predictions suffer from noise on the keys and values of each KV head.

One forward pass keeps each layer's input; one backward pass, a layer at a time with `mx.vjp`, gives
the gradients at the keys and values. To second order, independent noise e on one token's key costs
KL = 1/2 E[(g . e)^2], with g the gradient of -log p(y) summed over the sequence, and labels y drawn
from the model's OWN predictions: then E[g g^T] is the true Fisher information, whose cross terms
between positions vanish, and not the empirical one, which takes the text's labels.

A codec that rotates makes noise alike in all directions, of E|e|^2 = D(b) |x - mean|^2, where D is
its relative error at b bits. RoPE turns gradients and keeps their length, so the gradient after
RoPE serves keys before it. What is returned is thus nats of KL per predicted token for D = 1.

Not all of a codec's error is noise, though: levels of least squared error are the means of their
cells, so what comes back is shrunk towards the mean by the factor 1 - D, for all tokens at once.
Attention averages noise over tokens, but not that: it costs D^2 times a coefficient of its own,
1/2 E[(sum over tokens and heads of g . (x - mean))^2], which decides at 1 and 2 bits for heads that
attend broadly (measured: the values of a first layer at 1 bit cost 16 times what noise would).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from velox_pack.calibrators.capture import LayerStatistics
from velox_pack.calibrators.hooks import (
    AttentionCall,
    Instead,
    LayerCall,
    first_and_rest,
    replaced_calls,
    watch_attention,
)
from velox_pack.calibrators.kept import Kept
from velox_pack.calibrators.memory import give_back
from velox_pack.calibrators.outside import read_in_native_dtype
from velox_pack.calibrators.probed_rope import keys_before
from velox_pack.calibrators.stream import StreamingForward, drop, sequence_of
from velox_pack.calibrators.trace import LayerTrace
from velox_pack.kernels.rope import rope_angles, undo_rope
from velox_pack.manifests.errors import CalibrationError

Array = np.ndarray

_POSITIONS = 128  # whose logits are held at once, some eight times over,
_LOGITS = 1 << 24  # unless that is more than this: 64 MiB in float32


@dataclass(frozen=True, eq=False)
class Sensitivity:
    """Nats of KL per predicted token for noise of relative size 1, by covered layer.

    `keys[layer]` and `values[layer]` are float64 [Hkv], for noise; `shrink_keys[layer]` and
    `shrink_values[layer]` are for shrinking all heads of a layer. Multiply the former by a codec's
    relative error D(b), the latter by its square, and add over layers, heads and parts to predict
    its KL.
    """

    keys: Mapping[int, Array]
    values: Mapping[int, Array]
    tokens: int
    shrink_keys: Mapping[int, float] = field(default_factory=dict)
    shrink_values: Mapping[int, float] = field(default_factory=dict)


def measure(
    streaming: StreamingForward,
    tokens: Array,
    traces: Sequence[LayerTrace],
    statistics: Mapping[int, LayerStatistics],
    *,
    skip_first: int = 4,
    window: int = 0,
    seed: int = 0,
) -> Sensitivity:
    """Sensitivities of all layers in `statistics`, from token ids int32 [n, N].

    The first `skip_first` tokens of a sequence are never coded, so they do not count. Nor does
    what a query sees of the last `window` tokens, which caches keep exactly: without this, heads
    that look at their neighbours seem to need bits that they never use (measured on a 12-layer
    model: RateQuant then loses to uniform bits). Raises CalibrationError where layers hand each
    other more than one activation.
    """
    arguments: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def keep(index: int, x: mx.array, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(_is_activation(a, x.shape) for a in (*args, *kwargs.values())):
            raise CalibrationError(
                f"layer {index} takes more than one activation: "
                "sensitivities cannot be measured a layer at a time"
            )
        inputs.append(x)
        arguments.append((args, kwargs))

    with Kept() as inputs:
        hidden = streaming.run(tokens, on_input=keep)
        streaming.require_single()
        mx.eval(hidden)
        gradient = _head_gradient(streaming, tokens, hidden, seed)
        del hidden
        keys: dict[int, Array] = {}
        values: dict[int, Array] = {}
        shrink: tuple[dict[int, float], dict[int, float]] = ({}, {})
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
                window,
            )
            if found is not None:
                (keys[index], shrink[0][index]), (values[index], shrink[1][index]) = (
                    (noise / (2 * tokens.size), together / (2 * tokens.size))
                    for noise, together in found
                )
    order = sorted(keys)
    return Sensitivity(
        {i: keys[i] for i in order},
        {i: values[i] for i in order},
        tokens.size,
        *({i: part[i] for i in order} for part in shrink),
    )


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
    window: int,
) -> tuple[mx.array, list[tuple[Array, float]] | None]:
    """Gradient at the layer's input, and for keys and values the sums of `_weighted`."""
    layer = streaming.layers[index]
    trace = covered.get(index)
    sums = None if trace is None else [(np.zeros(trace.kv_heads), 0.0)] * 2
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
                watch.replace = lambda call: noisy_behind(call, dk, dv, window)
                out = layer(h, *own, **named)  # noqa: B023
                call = watch.take()[0]
                return [out, keys_before(call, trace.rope), call.values]

            n = given.shape[1]
            k_shape = (1, trace.kv_heads, n, trace.k_dim)
            v_shape = (1, trace.kv_heads, n, trace.v_dim)
            zeros = [mx.zeros(k_shape), mx.zeros(v_shape)]
            outputs, gradients = mx.vjp(forward, [given, *zeros], [back, *zeros])
            mx.eval(outputs, gradients)
            rows.append(gradients[0])
            means = (statistics[index].keys_before.mean, statistics[index].values.mean)
            at = [_before_rope(gradients[1], trace), gradients[2]]
            for part, (x_, g_, mean) in enumerate(zip(outputs[1:], at, means, strict=True)):
                more = _weighted(np.array(x_[0]), np.array(g_[0]), mean, skip_first)
                sums[part] = (sums[part][0] + more[0], sums[part][1] + more[1])
    drop(layer)
    give_back()
    result = mx.concatenate(rows)
    if not mx.isfinite(result).all().item():
        raise CalibrationError(f"layer {index}: the gradient at its input is not finite")
    return result, sums


def noisy_behind(call: AttentionCall, dk: mx.array, dv: mx.array, window: int) -> Instead:
    """Keys and values, noisy for queries at least `window` tokens later and exact for others.

    Both kinds stand side by side, [exact | noisy], and the mask lets each query see each token in
    one of the two forms.
    """
    keys, values = call.keys + dk, call.values + dv
    if window <= 0:
        return keys, values
    rows, columns = call.queries.shape[2], call.keys.shape[2]
    behind = mx.arange(columns - rows, columns)[:, None] - mx.arange(columns)[None]
    mask = call.mask
    if mask is None or isinstance(mask, str):
        mask = behind >= 0 if mask else mx.ones((rows, columns), mx.bool_)
    far = behind >= window
    if mask.dtype == mx.bool_:
        halves = [mask & ~far, mask & far]
    else:
        halves = [mx.where(far, -mx.inf, mask), mx.where(far, mask, -mx.inf)]
    return (
        mx.concatenate([call.keys, keys], axis=2),
        mx.concatenate([call.values, values], axis=2),
        mx.concatenate(halves, axis=-1).astype(mask.dtype),
    )


def _before_rope(gradient: mx.array, trace: LayerTrace) -> mx.array:
    """Gradient at keys [1, H, N, D] as they were before RoPE, where that can be undone."""
    if trace.rope is None:
        return gradient
    tables = rope_angles(mx.array(trace.rope.inv_freq), mx.arange(gradient.shape[2]))
    return undo_rope(gradient, *tables, trace.rope.traditional)


def _weighted(x: Array, g: Array, mean: Array, skip_first: int) -> tuple[Array, float]:
    """For x and g [H, N, D]: sum over tokens of |g|^2 |x - mean|^2 / D, [H], and the square of the
    sum over tokens and heads of g . (x - mean).
    """
    centred = (x.astype(np.float64) - mean[:, None, :])[:, skip_first:]
    steep = g.astype(np.float64)[:, skip_first:]
    noise: Array = (np.square(centred).mean(axis=-1) * np.square(steep).sum(axis=-1)).sum(axis=1)
    return noise, float(np.sum(centred * steep)) ** 2
