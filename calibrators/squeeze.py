"""SqueezeAttention (2404.04793): layers that hardly change the hidden state get smaller budgets.

What attention does to a layer is the cosine similarity of each token's hidden state before and
after it (abstract and the authors' measuring code read: residual stream in, residual stream after
adding the attention's output). Layers are put into three groups by it; the group of the highest
similarity is cut to `p` of its budget, which the other layers share. The grouping and the
reallocation follow descriptions of the paper's algorithm, not its text; k-means in one dimension
is solved exactly here, so it needs no seed.

Measured, it is no safe choice: where a few layers stand apart (3 of 30 in SmolLM2-135M) all others
are the group that is cut, and it does worse than uniform budgets.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from velox_pack.calibrators.attention_mass import RATIOS
from velox_pack.calibrators.budget_shares import Shapes, by_shape
from velox_pack.calibrators.hooks import LayerCall, replaced_calls
from velox_pack.manifests.artifacts_attention import Budgets
from velox_pack.manifests.errors import CalibrationError

Array = np.ndarray
GROUPS = 3


class HiddenChange:
    """Watches layers from inside: the hidden state before and after attention.

    `with change.watching(streaming.layers): streaming.run(...)` (or `capture`) fills
    `change.done()`. The state after attention is what goes into the first part of the layer after
    the attention, but for norms of the attention's very output; where attention and MLP stand side
    by side it is the sum of the layer's input and the attention's output. Not thread-safe.
    """

    def __init__(self) -> None:
        self._sums: dict[int, list[float]] = {}

    def done(self) -> dict[int, float]:
        """Mean cosine similarity over tokens, by layer, for layers in which attention was seen."""
        return {i: float(np.mean(values)) for i, values in sorted(self._sums.items())}

    @contextmanager
    def watching(self, layers: Sequence[nn.Module]) -> Iterator[None]:
        """Watch `layers` inside the block."""
        run = _Run()
        parts = [(i, part) for i, layer in enumerate(layers) for part in _parts(layer)]
        attend = mx.fast.scaled_dot_product_attention

        def spy(*args: Any, **kwargs: Any) -> mx.array:
            run.attending = True
            return attend(*args, **kwargs)

        def make_part(_index: int, _module: nn.Module, original: LayerCall) -> LayerCall:
            return run.part(original)

        def make_layer(index: int, _module: nn.Module, original: LayerCall) -> LayerCall:
            def call(x: mx.array, *args: Any, **kwargs: Any) -> Any:
                run.start(x)
                out = original(x, *args, **kwargs)
                after = run.finish()
                if after is not None:
                    self._sums.setdefault(index, []).append(similarity(x, after))
                return out

            return call

        try:
            mx.fast.scaled_dot_product_attention = spy
            with (
                replaced_calls(list(layers), make_layer),
                replaced_calls([part for _, part in parts], make_part),
            ):
                yield
        finally:
            mx.fast.scaled_dot_product_attention = attend


class _Run:
    """One layer on one sequence: which part attended, and what came after it."""

    def __init__(self) -> None:
        self.attending = False
        self.start(None)

    def start(self, x: mx.array | None) -> None:
        self.x, self.inside, self.attending = x, 0, False
        self.given: mx.array | None = None  # what attention read
        self.last: mx.array | None = None  # attention's output, or a norm of it
        self.after: mx.array | None = None

    def part(self, original: LayerCall) -> LayerCall:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.inside:
                return original(*args, **kwargs)
            given = args[0] if args else None
            before = self.attending
            follows = self.last is not None and self.after is None and not before
            if follows and given is not self.last and isinstance(given, mx.array):
                self.after = self._side_by_side() if given is self.given else given
            self.inside += 1
            try:
                out = original(*args, **kwargs)
            finally:
                self.inside -= 1
            if self.attending:
                self.given, self.attending = given, False
                self.last = out[0] if isinstance(out, tuple) else out
            elif follows and given is self.last:
                self.last = out
            return out

        return call

    def _side_by_side(self) -> mx.array | None:
        return None if self.x is None or self.last is None else self.x + self.last

    def finish(self) -> mx.array | None:
        after = self._side_by_side() if self.after is None else self.after
        self.start(None)
        return after


def _parts(layer: nn.Module) -> list[nn.Module]:
    """Modules that are attributes of the layer."""
    children: Mapping[str, Any] = layer.children()
    return [child for child in children.values() if isinstance(child, nn.Module)]


def similarity(before: mx.array, after: mx.array) -> float:
    """Mean over tokens of the cosine of hidden states [..., N, hidden]."""
    size = mx.linalg.norm(before, axis=-1) * mx.linalg.norm(after, axis=-1)
    cosine = (before * after).sum(axis=-1) / mx.maximum(size, 1e-20)
    return float(np.mean(np.array(cosine)))


def fit(similarities: Mapping[int, float], shapes: Shapes, p: float = 0.35) -> tuple[Budgets, ...]:
    """Budgets of layers, from `HiddenChange.done()`; `shapes` [H, Dk, Dv] by layer.

    Layers of one shape share their budget among themselves, in one artifact. `p` is what the group
    of the most similar layers keeps of its own.
    """
    if not 0 < p <= 1:
        raise CalibrationError(f"SqueezeAttention keeps p = {p} of a budget: not in (0, 1]")
    return by_shape(
        shapes,
        "squeeze",
        {"p": p},
        lambda layers: np.broadcast_to(
            shares([_needed(similarities, i) for i in layers], p)[:, None, None],
            (len(layers), 1, len(RATIOS)),
        ),
    )


def shares(similarities: Sequence[float], p: float) -> Array:
    """Shares [L] of mean 1: `p` for the group of highest similarity, the rest spread evenly."""
    values = np.asarray(similarities, dtype=np.float64)
    group = clusters(values)
    cut = group == group.max()
    if group.max() == 0:  # all alike
        return np.ones(len(values))
    return np.where(cut, p, (len(values) - p * cut.sum()) / (~cut).sum())


def clusters(values: Array, most: int = GROUPS) -> Array:
    """Groups 0, 1, ... by rising value [L], at most `most`: k-means, exactly.

    In one dimension the best groups are stretches of the sorted values.
    """
    order = np.argsort(values, kind="stable")
    ranked = values[order]
    places = [i for i in range(1, len(ranked)) if ranked[i] - ranked[i - 1] > 1e-9]
    wanted = min(most - 1, len(places))

    def spread(cuts: tuple[int, ...]) -> float:
        return sum(float(np.square(s - s.mean()).sum()) for s in np.split(ranked, cuts))

    best = min(combinations(places, wanted), key=spread)
    group = np.empty(len(values), np.int64)
    group[order] = np.searchsorted(np.array(best, np.int64), np.arange(len(values)), "right")
    return group


def _needed(similarities: Mapping[int, float], index: int) -> float:
    if index not in similarities:
        raise CalibrationError(f"layer {index}: attention was not seen inside the layer")
    return similarities[index]
