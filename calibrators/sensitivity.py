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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from velox_pack.calibrators.capture import LayerStatistics
from velox_pack.calibrators.gradients import Gradients, backward
from velox_pack.calibrators.stream import StreamingForward
from velox_pack.calibrators.trace import LayerTrace

Array = np.ndarray

_PARTS = ("keys", "values")


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
    noises: dict[str, dict[int, Array]] = {part: {} for part in _PARTS}
    shrinks: dict[str, dict[int, float]] = {part: {} for part in _PARTS}

    def add(found: Gradients) -> None:
        layer = found.layer
        for part in _PARTS:
            x, g = found.part(part)
            mean = statistics[layer].part(part)[0].mean
            noise, together = _weighted(x, g, mean, skip_first)
            noises[part][layer] = noises[part].get(layer, 0.0) + noise
            shrinks[part][layer] = shrinks[part].get(layer, 0.0) + together

    measured = [t for t in traces if t.index in statistics]
    backward(streaming, tokens, measured, add, window=window, seed=seed)
    count = 2 * tokens.size
    order = sorted(noises["keys"])
    keys, values = ({i: noises[part][i] / count for i in order} for part in _PARTS)
    shrunk = ({i: shrinks[part][i] / count for i in order} for part in _PARTS)
    return Sensitivity(keys, values, tokens.size, *shrunk)


def _weighted(x: Array, g: Array, mean: Array, skip_first: int) -> tuple[Array, float]:
    """For x and g [H, N, D]: sum over tokens of |g|^2 |x - mean|^2 / D, [H], and the square of the
    sum over tokens and heads of g . (x - mean).
    """
    centred = (x.astype(np.float64) - mean[:, None, :])[:, skip_first:]
    steep = g.astype(np.float64)[:, skip_first:]
    noise: Array = (np.square(centred).mean(axis=-1) * np.square(steep).sum(axis=-1)).sum(axis=1)
    return noise, float(np.sum(centred * steep)) ** 2
