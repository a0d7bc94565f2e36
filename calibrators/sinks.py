"""Sinks beyond the first tokens: which tokens collect attention, and how to tell them by a length.

Read: the abstract of 2508.04257 (KVSink) and summaries of its method: attention sinks appear beyond
the first tokens too, their values are small, and keeping them exactly is worth more than keeping
more of the first tokens. KVSink finds them by an outlier channel of the hidden state in the layer
where they arise, which a cache never sees; a cache sees keys and values.

So for every layer: a sink is a token to which later queries give on average at least `LEAST` of
their attention, and `TIMES` the layer's median (measured with the true queries, in blocks); then of
five statistics (short or long keys, short or long values, none) the one that finds most sinks with
at most `TOLERATED` of the others is kept with its threshold. The medians of each head make lengths
comparable. Lengths are the same before and after RoPE. Measured: sinks are short, not long (key a
half of the median, value a tenth to a third), in SmolLM2's layers 3 to 10 they hold 30 to 49 % of
all attention, and 97 to 100 % of them are found by 1.5 % of the tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from threadpoolctl import threadpool_limits

from velox_pack.calibrators.attention_mass import blocks
from velox_pack.calibrators.stream import Captured, StreamingForward
from velox_pack.calibrators.trace import LayerTrace, refuse_if_uncovered
from velox_pack.manifests.artifacts_channels import STATISTICS, Sinks
from velox_pack.manifests.errors import CalibrationError

Array = np.ndarray

LEAST = 0.02
TIMES = 20.0
TOLERATED = 0.01
ENOUGH = 0.5  # a statistic that finds fewer sinks than this is not used
FOLLOWED = 32  # tokens with fewer later queries are not judged
_BLOCK = 64


@dataclass(frozen=True, eq=False)
class LayerMass:
    """One layer, all tokens of n sequences of N.

    `mass` float32 [n, N]: mean over heads and over the queries that see a token of the attention
    they give it; `keys`, `values` float32 [n, H, N] lengths; `seen` int64 [N] queries that see it.
    """

    index: int
    mass: Array
    keys: Array
    values: Array
    seen: Array


class Masses:
    """A capture hook that collects attention and lengths of every token of the covered layers."""

    def __init__(self, traces: Sequence[LayerTrace]) -> None:
        self.traces = {t.index: t for t in traces if t.covered}
        self._rows: dict[int, list[tuple[Array, Array, Array]]] = {}
        self._seen: dict[int, Array] = {}

    def __call__(self, captured: Captured) -> None:
        """Add one sequence of one layer."""
        if captured.layer not in self.traces:
            return
        total, seen = attention_received(captured)
        lengths = [np.array(mx.linalg.norm(x, axis=-1)) for x in (captured.keys, captured.values)]
        self._seen[captured.layer] = seen
        mass = (total / np.maximum(seen, 1)).astype(np.float32)
        self._rows.setdefault(captured.layer, []).append((mass, *lengths))

    def done(self) -> dict[int, LayerMass]:
        """Statistics by layer."""
        found = {}
        for i, rows in sorted(self._rows.items()):
            mass, keys, values = (np.stack(c) for c in zip(*rows, strict=True))
            found[i] = LayerMass(i, mass, keys, values, self._seen[i])
        return found


def attention_received(captured: Captured) -> tuple[Array, Array]:
    """Attention that each token gets, summed over queries and averaged over heads, float64 [N].

    And the number of queries that see it, int64 [N], in the first head. A block of queries at a
    time. Attention sinks that a model has as parameters are not counted.
    """
    count = captured.keys.shape[1]
    total, seen = np.zeros(count), np.zeros(count, np.int64)
    with threadpool_limits(1):
        for _, weights, visible in blocks(captured, _BLOCK):
            stop = weights.shape[-1]
            total[:stop] += weights.mean(axis=(0, 1)).sum(axis=0, dtype=np.float64)
            seen[:stop] += visible.reshape(-1, *visible.shape[-2:])[0].sum(axis=0)
    return total, seen


def collect(
    streaming: StreamingForward, tokens: Array, traces: Sequence[LayerTrace]
) -> dict[int, LayerMass]:
    """Run token ids int32 [n, N] through the model for attention and lengths."""
    refuse_if_uncovered(traces)
    collector = Masses(traces)
    mx.eval(streaming.run(tokens, collector))
    return collector.done()


def fit(
    masses: Mapping[int, LayerMass], *, skip_first: int = 4, least: float = LEAST
) -> tuple[Sinks, ...]:
    """What tells a sink in each layer; layers with the same number of heads are stacked.

    Raises CalibrationError for sequences too short to judge any token.
    """
    groups: dict[int, list[int]] = {}
    for index in sorted(masses):
        groups.setdefault(masses[index].keys.shape[1], []).append(index)
    made = []
    for indices in groups.values():
        rows = [_fit_layer(masses[i], skip_first, least) for i in indices]
        columns = [np.stack(c) for c in zip(*rows, strict=True)]
        statistic, *others = columns
        names = ["keys", "values", "threshold", "mass", "recall", "false_positives", "protected"]
        made.append(
            Sinks(
                skip_first=skip_first,
                least=float(least),
                statistic=statistic.astype(np.uint8),
                **{n: c.astype(np.float32) for n, c in zip(names, others, strict=True)},
                layers=tuple(indices),
            )
        )
    return tuple(made)


def _fit_layer(layer: LayerMass, skip_first: int, least: float) -> tuple[Array | float, ...]:
    """Statistic, medians, threshold, mass, recall, false positives, protected."""
    judged = np.zeros(layer.mass.shape, bool)
    judged[:, skip_first:] = layer.seen[skip_first:] >= FOLLOWED
    if not judged.any():
        raise CalibrationError(
            f"layer {layer.index}: no token has {FOLLOWED} queries after it: take longer sequences"
        )
    medians = [
        np.maximum(np.median(x[:, :, skip_first:], axis=(0, 2)), 1e-6)
        for x in (layer.keys, layer.values)
    ]
    median = float(np.median(layer.mass[judged]))
    sinks = judged & (layer.mass >= max(least, TIMES * median))
    others = judged & ~sinks
    share = layer.mass * layer.seen  # of all attention: the rows sum to N
    mass = float(share[sinks].sum() / share.sum())
    best, found, threshold = 0, 0.0, 0.0
    if sinks.any() and others.any():
        for n in range(1, len(STATISTICS)):
            value = statistics_of(n, layer.keys, layer.values, *medians)
            edge = float(np.quantile(value[others], 1 - TOLERATED))
            recall = float(np.mean(value[sinks] > edge))
            if recall > max(found, ENOUGH):
                best, found = n, recall
                threshold = _between(value[sinks], value[others], edge)
    if not best:
        return 0, *medians, 0.0, mass, 0.0, 0.0, 0.0
    called = statistics_of(best, layer.keys, layer.values, *medians) >= threshold
    rates = [float(np.mean(called[which])) for which in (sinks, others)]
    return best, *medians, threshold, mass, *rates, float(np.mean(called[:, skip_first:]))


def _between(sinks: Array, others: Array, edge: float) -> float:
    """A threshold halfway from `edge` to the weakest sink beyond it."""
    beyond = sinks[sinks > edge]
    return (edge + float(beyond.min())) / 2


def statistics_of(which: int, keys: Array, values: Array, k: Array, v: Array) -> Array:
    """Mean over heads of ln(length / median), [...]; lengths [..., H, N], medians [H].

    Negative for the short ones, so that larger always means more of a sink.
    """
    name = STATISTICS[which]
    length, median = (keys, k) if name.endswith("keys") else (values, v)
    logs = np.log(np.maximum(length, 1e-12) / median[:, None]).mean(axis=-2)
    found: Array = -logs if name.startswith("short") else logs
    return found


def is_sink(artifact: Sinks, row: int, keys: Array, values: Array) -> Array:
    """Mask bool [N] of tokens to keep exactly, of keys [H, N, Dk] and values [H, N, Dv]."""
    which = int(artifact.statistic[row])
    if not which:
        return np.zeros(keys.shape[1], bool)
    lengths = [np.linalg.norm(np.asarray(x, np.float64), axis=-1) for x in (keys, values)]
    medians = [np.asarray(a[row], np.float64) for a in (artifact.keys, artifact.values)]
    found: Array = statistics_of(which, *lengths, *medians) >= float(artifact.threshold[row])
    return found
