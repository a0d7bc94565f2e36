"""Gradients at the keys and values of every layer, from one backward pass a layer at a time.

What is differentiated is -log p(y), summed over a sequence, with labels y drawn from the model's
own predictions: then E[g g^T] is the Fisher information (see `sensitivity`), and small independent
errors e on one token's key or value cost 1/2 E[(g . e)^2] nats of KL. Gradients at keys are turned
back by the layer's own RoPE, so that they belong to keys as they were before it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from velox_pack.calibrators.head import head_gradient
from velox_pack.calibrators.hooks import AttentionCall, Instead, watch_attention
from velox_pack.calibrators.kept import Kept
from velox_pack.calibrators.memory import give_back
from velox_pack.calibrators.probed_rope import keys_before
from velox_pack.calibrators.stream import StreamingForward, drop, sequence_of
from velox_pack.calibrators.trace import LayerTrace
from velox_pack.kernels.rope import rope_angles, undo_rope
from velox_pack.manifests.errors import CalibrationError

Array = np.ndarray


@dataclass(frozen=True, eq=False)
class Gradients:
    """One layer on one sequence of N tokens, evaluated, all float32 NumPy.

    `keys` [Hkv, N, Dk] before RoPE (where it can be undone) and `values` [Hkv, N, Dv];
    `at_keys` and `at_values` are the gradients there, of the same shapes.
    """

    layer: int
    sequence: int
    keys: Array
    values: Array
    at_keys: Array
    at_values: Array

    def part(self, name: str) -> tuple[Array, Array]:
        """Vectors and gradients of "keys" or "values"."""
        return (self.keys, self.at_keys) if name == "keys" else (self.values, self.at_values)


Hook = Callable[[Gradients], None]


def backward(
    streaming: StreamingForward,
    tokens: Array,
    traces: Sequence[LayerTrace],
    hook: Hook,
    *,
    window: int = 0,
    seed: int = 0,
) -> None:
    """Give `hook` the gradients of all covered layers, last layer first, a sequence at a time.

    `tokens` int32 [n, N]. What a query sees of the last `window` tokens, which caches keep exactly,
    does not count. Raises CalibrationError where layers hand each other more than one
    activation, or for gradients that are not finite.
    """
    arguments: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def keep(index: int, x: mx.array, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(_is_activation(a, x.shape) for a in (*args, *kwargs.values())):
            raise CalibrationError(
                f"layer {index} takes more than one activation: "
                "gradients cannot be found a layer at a time"
            )
        inputs.append(x)
        arguments.append((args, kwargs))

    with Kept() as inputs:
        hidden = streaming.run(tokens, on_input=keep)
        streaming.require_single()
        mx.eval(hidden)
        gradient = head_gradient(streaming, tokens, hidden, seed)
        del hidden
        covered = {t.index: t for t in traces if t.covered}
        for index in range(len(streaming.layers) - 1, -1, -1):
            trace, given = covered.get(index), arguments.pop()
            gradient = _through(
                streaming, index, trace, inputs.pop(), *given, gradient, hook, window
            )


def _through(
    streaming: StreamingForward,
    index: int,
    trace: LayerTrace | None,
    x: mx.array,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    gradient: mx.array,
    hook: Hook,
    window: int,
) -> mx.array:
    """Gradient at the layer's input; what the hook wants to know on the way."""
    layer = streaming.layers[index]
    rows = []
    streaming.fill(index)
    with watch_attention(streaming.model) as watch:
        for b in range(x.shape[0]):
            own, named = sequence_of(x.shape[0], b, args, kwargs)
            given, back = x[b : b + 1], gradient[b : b + 1]
            if trace is None:
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
            zeros = [
                mx.zeros((1, trace.kv_heads, n, trace.k_dim)),
                mx.zeros((1, trace.kv_heads, n, trace.v_dim)),
            ]
            outputs, gradients = mx.vjp(forward, [given, *zeros], [back, *zeros])
            mx.eval(outputs, gradients)
            watch.replace = None
            rows.append(gradients[0])
            at = (_before_rope(gradients[1], trace), gradients[2])
            # Not copied, and gone (unless the hook keeps them) before the next sequence's come.
            hook(Gradients(index, b, *(np.asarray(a[0]) for a in (*outputs[1:], *at))))
            del outputs, gradients, at
    drop(layer)
    give_back()
    result = mx.concatenate(rows)
    if not mx.isfinite(result).all().item():
        raise CalibrationError(f"layer {index}: the gradient at its input is not finite")
    return result


def _is_activation(value: Any, shape: tuple[int, ...]) -> bool:
    return (
        isinstance(value, mx.array)
        and mx.issubdtype(value.dtype, mx.floating)
        and value.ndim >= 3
        and value.shape[:2] == shape[:2]
    )


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


def fisher(
    streaming: StreamingForward,
    tokens: Array,
    traces: Sequence[LayerTrace],
    part: str,
    *,
    skip_first: int = 4,
    window: int = 0,
    seed: int = 0,
) -> dict[int, Array]:
    """1/2 E[g g^T] per coded token, float64 [Hkv, D, D] by layer: a metric for `spectral_metric`.

    tr(M E[e e^T]), summed over heads, layers and parts, is the KL in nats of small errors e. The
    first `skip_first` tokens of a sequence are never coded.
    """
    sums: dict[int, Array] = {}

    def add(found: Gradients) -> None:
        g = found.part(part)[1][:, skip_first:].astype(np.float64)
        total = np.swapaxes(g, 1, 2) @ g
        sums[found.layer] = sums[found.layer] + total if found.layer in sums else total

    backward(streaming, tokens, traces, add, window=window, seed=seed)
    count = 2 * tokens.shape[0] * (tokens.shape[1] - skip_first)
    return {layer: total / count for layer, total in sorted(sums.items())}
