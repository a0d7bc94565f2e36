"""Second moments of the inputs of linears, for error feedback, in each layer's own turn.

Linears that read the same array (q, k and v; gate and up) share one moment. Moments of a layer are
handed out one after another while its weights are still there, and then dropped: those of all
layers together can be larger than the model. Experts of a mixture share one moment, over all
(token, expert) pairs: one for each expert would take as many times the memory.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from scipy.linalg.blas import ssyrk
from threadpoolctl import threadpool_limits

from velox_pack.calibrators.hooks import LayerCall, replaced_calls
from velox_pack.manifests.errors import CalibrationError

Array = np.ndarray

LINEARS = (nn.Linear, nn.QuantizedLinear, SwitchLinear, QuantizedSwitchLinear)

_BLOCK = 512  # rows and columns mirrored at a time


@dataclass(frozen=True, eq=False)
class InputMoment:
    """What the linears `paths` (module paths in the model) of a layer were given: `count` vectors.

    `second` float32 [in, in] is E[x x^T], not centred, symmetric; `mean` float64 [in] is E[x].
    All tokens count, the first of a sequence too. For experts `count` is of (token, expert) pairs.
    """

    layer: int
    paths: tuple[str, ...]
    count: int
    mean: Array
    second: Array


OnLinear = Callable[[InputMoment], None]


class _Sums:
    """One moment under construction: float32 products, half of them, added in place."""

    def __init__(self, width: int) -> None:
        self.count = 0
        self.total = np.zeros(width)
        self.second = np.zeros((width, width), np.float32, order="F")

    def add(self, x: Array) -> None:
        """Add vectors float32 [N, in]."""
        self.count += len(x)
        self.total += x.sum(axis=0, dtype=np.float64)
        with threadpool_limits(1):  # sums in one order, whatever the number of threads
            self.second = ssyrk(1.0, x.T, beta=1.0, c=self.second, overwrite_c=1)

    def done(self) -> tuple[Array, Array]:
        """Mean and second moment; the sums are used up."""
        second = self.second
        width = len(second)
        for a in range(0, width, _BLOCK):
            rows = slice(a, a + _BLOCK)
            corner = np.triu(second[rows, rows])
            second[rows, rows] = corner + np.triu(corner, 1).T
            for b in range(a + _BLOCK, width, _BLOCK):
                columns = slice(b, b + _BLOCK)
                second[columns, rows] = second[rows, columns].T
        second /= np.float32(self.count)
        return self.total / self.count, second.T  # symmetric: the transpose is C-ordered


class LayerInputs:
    """Adds up the inputs of all linears of one layer; `prefix` is the layer's path and a dot."""

    def __init__(self, layer: int, module: nn.Module, prefix: str) -> None:
        self.layer = layer
        self._modules = {
            prefix + name: m for name, m in module.named_modules() if isinstance(m, LINEARS)
        }
        self._seen: dict[str, list[mx.array]] = {}
        self._sums: dict[tuple[str, ...], _Sums] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside the block the linears remember what they are called with."""
        paths = list(self._modules)

        def make(index: int, _module: nn.Module, original: LayerCall) -> LayerCall:
            def call(x: mx.array, *args: Any, **kwargs: Any) -> Any:
                self._seen.setdefault(paths[index], []).append(x)
                return original(x, *args, **kwargs)

            return call

        with replaced_calls(list(self._modules.values()), make):
            yield

    def seen(self) -> list[tuple[str, mx.array]]:
        """(first path, input) of each array that linears were called with since the last `add`."""
        first: dict[int, tuple[str, mx.array]] = {}
        for path, inputs in self._seen.items():
            for x in inputs:
                first.setdefault(id(x), (path, x))
        return list(first.values())

    def add(self) -> None:
        """Add what the linears were called with, evaluated and finite, and forget it."""
        groups: dict[tuple[int, ...], list[str]] = {}
        for path, inputs in self._seen.items():
            groups.setdefault(tuple(map(id, inputs)), []).append(path)
        for paths in groups.values():
            key = tuple(paths)
            inputs = self._seen[paths[0]]
            if key not in self._sums:
                if any(path in other for other in self._sums for path in paths):
                    raise CalibrationError(
                        f"layer {self.layer}: {paths[0]} shares its input with others in one "
                        "sequence and not in the next"
                    )
                self._sums[key] = _Sums(inputs[0].shape[-1])
            for x in inputs:
                rows = x.reshape(-1, x.shape[-1]).astype(mx.float32)
                self._sums[key].add(np.array(rows, copy=False))
        self._seen.clear()

    def hand_out(self, on_linear: OnLinear) -> None:
        """Give each moment to `on_linear`, in the order of calls, and drop it."""
        for paths in list(self._sums):
            sums = self._sums.pop(paths)
            mean, second = sums.done()
            count = sums.count
            del sums
            on_linear(InputMoment(self.layer, paths, count, mean, second))
            del mean, second
