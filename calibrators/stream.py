"""A model's own forward with one layer's weights in memory at a time.

Each layer's class is exchanged for one that reads its weights, runs all sequences through the layer
one by one, and drops the weights again; the moments of its linears' inputs too, if they are asked
for. Masks and arguments are the model's own, because its own forward calls the layers; it is
stopped after the last layer, before the output head.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from velox_pack.calibrators.hooks import (
    AttentionCall,
    LayerCall,
    Watch,
    first_and_rest,
    replaced_calls,
    watch_attention,
)
from velox_pack.calibrators.linear_inputs import LayerInputs, OnLinear
from velox_pack.calibrators.memory import give_back
from velox_pack.calibrators.outside import as_float32, read_in_native_dtype
from velox_pack.calibrators.probed_rope import RopeSpec, keys_before
from velox_pack.calibrators.trace import trace
from velox_pack.manifests.errors import CalibrationError

Weights = Mapping[str, mx.array]


@dataclass(frozen=True, eq=False)
class Captured:
    """Attention of one layer on one sequence, evaluated: all arrays float32, N tokens.

    `queries` [Hq, N, Dk] and `keys` [Hkv, N, Dk] as they reach attention, after RoPE and norms;
    `keys_before` is what RoPE made `keys` from, None without a rotation that can be undone;
    `values` [Hkv, N, Dv]. `mask` is the model's own ("causal", or an array).
    """

    layer: int
    sequence: int
    queries: mx.array
    keys: mx.array
    values: mx.array
    keys_before: mx.array | None
    scale: float
    mask: mx.array | str | None


Hook = Callable[[Captured], None]
OnInput = Callable[[int, mx.array, tuple[Any, ...], dict[str, Any]], None]
Replace = Callable[[int, AttentionCall], tuple[mx.array, mx.array] | None]


class _Finished(Exception):  # noqa: N818 - not an error: ends the model's forward after its layers
    """The last layer is done."""


class StreamingForward:
    """Runs `model` over many sequences a layer at a time.

    `weights()` gives the model's parameters by name as freshly loaded lazy arrays, already through
    the model's `sanitize`: it is called once for each layer, so that no file stays in memory.
    Everything is computed in float32. The model's parameters are replaced by empty arrays for
    good: build a model for this and use it for nothing else. Not thread-safe.

    Raises CalibrationError for missing weights, and for NaN or infinity in activations or weights.
    """

    def __init__(self, model: nn.Module, weights: Callable[[], Weights]) -> None:
        self.model = model
        self.layers: list[nn.Module] = list(model.layers)
        names = {id(module): name for name, module in model.named_modules()}
        self._prefixes = [names[id(layer)] + "." for layer in self.layers]
        self._expected = [set(dict(pairs(layer))) for layer in self.layers]
        self._weights = weights
        self._ropes = _ropes(model)
        self._hands_on_more = False
        for module in (*self.layers, model):
            drop(module)

    def run(
        self,
        tokens: np.ndarray,
        hook: Hook | None = None,
        *,
        replace: Replace | None = None,
        on_input: OnInput | None = None,
        on_linear: OnLinear | None = None,
    ) -> mx.array:
        """Last layer's output, float32 [n, N, hidden], for token ids int32 [n, N].

        `hook` gets what attention of each layer saw, a sequence at a time; `replace(layer, call)`
        may give other keys and values to attend to; `on_input(layer, x, args, kwargs)` gets what
        each layer is called with. `on_linear` gets the second moments of what each linear of a
        layer was called with, one after another, after the layer has seen all sequences and while
        it still has its weights (float32).
        """
        last = len(self.layers) - 1
        self._hands_on_more = False

        def make(index: int, module: nn.Module, original: LayerCall) -> LayerCall:
            def call(*args: Any, **kwargs: Any) -> Any:
                x, args, kwargs = first_and_rest(args, kwargs)
                if x.ndim != 3 or x.shape[0] != len(tokens):
                    raise CalibrationError(
                        f"layer {index} takes activations of shape {list(x.shape)}: it cannot be "
                        "run a sequence at a time"
                    )
                if index == 0:
                    self._check(x, "the embedding of the tokens", "")
                    drop_tables(self.model, self.layers)
                if on_input is not None:
                    on_input(index, x, args, kwargs)
                if replace is not None:
                    watch.replace = lambda attention: replace(index, attention)
                out = self._run_layer(index, original, watch, hook, on_linear, x, args, kwargs)
                if not isinstance(out, mx.array):
                    self._hands_on_more = True
                if index == last:
                    raise _Finished(out if isinstance(out, mx.array) else out[0])
                return out

            return call

        with (
            watch_attention(self.model) as watch,
            read_in_native_dtype(self.model, self.layers),
            replaced_calls(self.layers, make),
        ):
            self.fill_outside()
            try:
                self.model(mx.array(tokens))
            except _Finished as finished:
                hidden: mx.array = finished.args[0]
                return hidden
            finally:
                for module in (*self.layers, self.model):
                    drop(module)
        raise CalibrationError(f"the model never calls its last layer, number {last}")

    def require_single(self) -> None:
        """Raise CalibrationError if layers handed each other more than one array in the last run:
        then no gradient can be found a layer at a time.
        """
        if self._hands_on_more:
            raise CalibrationError(
                "layers of this model hand on more than one activation: sensitivities and "
                "gradients cannot be found a layer at a time"
            )

    def fill(self, index: int) -> None:
        """Read layer `index`'s weights, lazily, as float32."""
        prefix = self._prefixes[index]
        found = {
            name[len(prefix) :]: array
            for name, array in self._weights().items()
            if name.startswith(prefix)
        }
        missing = sorted(self._expected[index] - set(found))
        if missing:
            raise CalibrationError(
                f"the weights lack {prefix}{missing[0]} ({len(missing)} missing)"
            )
        self.layers[index].update(tree_unflatten([(n, as_float32(a)) for n, a in found.items()]))

    def fill_outside(self) -> None:
        """Read everything that belongs to no layer, lazily; large tables keep their own dtype."""
        inside = tuple(self._prefixes)
        outside = [(n, a) for n, a in self._weights().items() if not n.startswith(inside)]
        self.model.update(tree_unflatten([(n, as_float32(a, tables=False)) for n, a in outside]))

    def _run_layer(
        self,
        index: int,
        original: LayerCall,
        watch: Watch,
        hook: Hook | None,
        on_linear: OnLinear | None,
        x: mx.array,
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> Any:
        """The layer's output for all sequences; the weights are there for no longer than this."""
        self.fill(index)
        watch.take()
        prefix = self._prefixes[index]
        inputs = LayerInputs(index, self.layers[index], prefix) if on_linear is not None else None
        outputs = []
        with nullcontext() if inputs is None else inputs.watching():
            for b in range(x.shape[0]):
                rows, named = sequence_of(x.shape[0], b, args, kwargs)
                out = original(x[b : b + 1], *rows, **named)
                calls = watch.take()
                captured = [self._captured(index, b, call) for call in calls]
                for path, array in [] if inputs is None else inputs.seen():
                    self._check(array, f"layer {index}: input of {path}", prefix)
                hidden = out[0] if isinstance(out, tuple) else out
                if not isinstance(hidden, mx.array):
                    raise CalibrationError(
                        f"layer {index} returns a {type(out).__name__}: it cannot be run alone"
                    )
                self._check(hidden, f"layer {index}: output", prefix)
                if hook is not None and len(calls) == 1:
                    hook(captured[0])
                if inputs is not None:
                    inputs.add()
                outputs.append(out)
        del captured, calls
        joined = _joined(outputs)
        mx.eval(joined)
        del outputs, out, hidden
        if inputs is not None and on_linear is not None:
            inputs.hand_out(on_linear)
        drop(self.layers[index])
        give_back()
        return joined

    def _captured(self, index: int, sequence: int, call: AttentionCall) -> Captured:
        """What one call saw, evaluated and found to be finite."""
        spec = self._ropes.get(index)
        before = None if spec is None else keys_before(call, spec)
        for what, array in (
            ("queries", call.queries),
            ("keys before RoPE", before),
            ("keys", call.keys),
            ("values", call.values),
        ):
            if array is not None:
                self._check(array, f"layer {index}: {what}", self._prefixes[index])
        return Captured(
            layer=index,
            sequence=sequence,
            queries=call.queries[0],
            keys=call.keys[0],
            values=call.values[0],
            keys_before=None if before is None else before[0],
            scale=call.scale,
            mask=call.mask,
        )

    def _check(self, array: mx.array, what: str, prefix: str) -> None:
        """Evaluate; raise CalibrationError, naming the weight at fault, if not all is finite."""
        fine = mx.isfinite(array).all()
        mx.eval(array, fine)
        if fine.item():
            return
        for name, weight in sorted(self._weights().items()):
            inside = (
                name.startswith(prefix) if prefix else not name.startswith(tuple(self._prefixes))
            )
            if inside and not mx.isfinite(weight).all().item():
                raise CalibrationError(f"{what}: not finite, since weight {name} holds NaN or inf")
        raise CalibrationError(f"{what}: activations hold NaN or infinity (weights are finite)")


def _ropes(model: nn.Module) -> dict[int, RopeSpec]:
    """Rotations of the layers' keys, where they are known; the model is not loaded yet."""
    try:
        return {t.index: t.rope for t in trace(model) if t.rope is not None}
    except CalibrationError:  # it may run all the same
        return {}


def sequence_of(
    count: int, b: int, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of a layer for sequence `b` alone: batched arrays are cut, masks [N, N] are not."""

    def cut(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(cut(v) for v in value)
        batched = isinstance(value, mx.array) and value.ndim >= 3 and value.shape[0] == count
        return value[b : b + 1] if batched else value

    return [cut(a) for a in args], {k: cut(v) for k, v in kwargs.items()}


def _joined(outputs: Sequence[Any]) -> Any:
    """What a layer returned for each sequence, as it would have returned it for all at once."""
    first = outputs[0]
    if isinstance(first, tuple | list):
        return type(first)(_joined(parts) for parts in zip(*outputs, strict=True))
    batched = isinstance(first, mx.array) and first.ndim >= 3
    return mx.concatenate(list(outputs)) if batched else first


def pairs(module: nn.Module) -> list[tuple[str, mx.array]]:
    """(name, parameter) of all parameters."""
    flat: list[Any] = list(tree_flatten(module.parameters()))
    return flat


def drop(module: nn.Module) -> None:
    """Replace all parameters by arrays of shape (0,), which fail loudly when used."""
    module.update(tree_map(lambda _: mx.zeros((0,)), module.parameters()))


def drop_tables(model: nn.Module, layers: list[nn.Module]) -> None:
    """Drop the embedding tables once their rows have been looked up."""
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.QuantizedEmbedding) and module not in layers:
            drop(module)
