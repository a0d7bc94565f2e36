"""A model's own forward with one layer's weights in memory at a time.

Each layer's class is exchanged for one that reads its weights, runs all sequences through the layer
one by one, and drops the weights again. Masks and arguments are the model's own, because its own
forward calls the layers; it is stopped after the last layer, before the output head.
"""

from collections.abc import Callable, Mapping
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
    replaced_calls,
    watch_attention,
)
from velox_pack.calibrators.outside import as_float32, read_in_native_dtype
from velox_pack.manifests.errors import CalibrationError

Weights = Mapping[str, mx.array]


@dataclass(frozen=True, eq=False)
class Captured:
    """Attention of one layer on one sequence, evaluated: all arrays float32, N tokens.

    `queries` [Hq, N, Dk] and `keys` [Hkv, N, Dk] as they reach attention, after RoPE and norms;
    `keys_before` is what RoPE made `keys` from, or None if there was no rotation to see;
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
        for module in (*self.layers, model):
            drop(module)

    def run(
        self,
        tokens: np.ndarray,
        hook: Hook | None = None,
        *,
        replace: Replace | None = None,
        on_input: OnInput | None = None,
    ) -> mx.array:
        """Last layer's output, float32 [n, N, hidden], for token ids int32 [n, N].

        `hook` gets what attention of each layer saw, a sequence at a time; `replace(layer, call)`
        may give other keys and values to attend to; `on_input(layer, x, args, kwargs)` gets what
        each layer is called with.
        """
        last = len(self.layers) - 1

        def make(index: int, module: nn.Module, original: LayerCall) -> LayerCall:
            def call(x: mx.array, *args: Any, **kwargs: Any) -> Any:
                if index == 0:
                    self._check(x, "the embedding of the tokens", "")
                    drop_tables(self.model, self.layers)
                if on_input is not None:
                    on_input(index, x, args, kwargs)
                if replace is not None:
                    watch.replace = lambda attention: replace(index, attention)
                x = self._run_layer(index, original, watch, hook, x, args, kwargs)
                if index == last:
                    raise _Finished(x)
                return x

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
        x: mx.array,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        self.fill(index)
        watch.take()
        outputs = []
        for b in range(x.shape[0]):
            rows, named = sequence_of(x.shape[0], b, args, kwargs)
            out = original(x[b : b + 1], *rows, **named)
            calls = watch.take()
            if not isinstance(out, mx.array):
                raise CalibrationError(
                    f"layer {index} returns a {type(out).__name__}: it cannot be run alone"
                )
            self._check(out, f"layer {index}", self._prefixes[index])
            if hook is not None and len(calls) == 1:
                hook(self._captured(index, b, calls[0]))
            outputs.append(out)
        drop(self.layers[index])
        return mx.concatenate(outputs)

    def _captured(self, index: int, sequence: int, call: AttentionCall) -> Captured:
        before = None if call.rope is None else call.rope.before
        arrays = {"queries": call.queries, "keys": call.keys, "values": call.values}
        if before is not None:
            arrays["keys before RoPE"] = before
        for what, array in arrays.items():
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


def sequence_of(
    count: int, b: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of a layer for sequence `b` alone: batched arrays are cut, masks [N, N] are not."""

    def cut(value: Any) -> Any:
        batched = isinstance(value, mx.array) and value.ndim >= 3 and value.shape[0] == count
        return value[b : b + 1] if batched else value

    return [cut(a) for a in args], {k: cut(v) for k, v in kwargs.items()}


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
