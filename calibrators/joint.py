"""Statistics of KV heads taken together, which `capture` keeps apart: what heads have in common.

The vectors of the heads of a group stand behind one another as one vector of C = group * head
dimension. Their second moment across heads shows what a basis of each head alone cannot use: heads
of a layer repeat each other (measured: at equal bits a joint basis has a third to a half of the
error). Memory grows with C, so large models take smaller groups.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from velox_pack.calibrators.capture import Moments, MomentSums
from velox_pack.calibrators.stream import Captured, StreamingForward
from velox_pack.calibrators.trace import LayerTrace, refuse_if_uncovered
from velox_pack.manifests.errors import CalibrationError

Array = np.ndarray

WIDEST = 256  # coordinates of a group, unless one head alone has more


@dataclass(frozen=True, eq=False)
class Joint:
    """One layer's keys (before RoPE where it can be undone) or values, by G groups of heads.

    `moments` over vectors of C coordinates; `directions` float64 [G, C, C] the second moment of
    (x - origin) / |x - origin|, trace 1, with the origin the mean of the first sequence: long
    vectors count no more there than short ones. `sample` float32 [G, S, C], tokens spread evenly
    over the sequences.
    """

    moments: Moments
    directions: Array
    sample: Array
    group: int
    before_rope: bool


class Collector:
    """A capture hook that adds up `Joint` statistics of the layers in `traces`.

    `group` heads stand together, or as many as make at most WIDEST coordinates. The first
    `skip_first` tokens of a sequence do not count; `sample` tokens of each are kept.
    """

    def __init__(
        self,
        traces: Sequence[LayerTrace],
        group: int | None = None,
        *,
        skip_first: int = 4,
        sample: int = 128,
    ) -> None:
        self.traces = {t.index: t for t in traces if t.covered}
        self.groups = {
            (t.index, part): group_of(t.kv_heads, dim) if group is None else group
            for t in self.traces.values()
            for part, dim in (("keys", t.k_dim), ("values", t.v_dim))
        }
        for (index, _), heads in self.groups.items():
            if heads < 1 or self.traces[index].kv_heads % heads:
                raise CalibrationError(
                    f"layer {index}: {self.traces[index].kv_heads} KV heads "
                    f"are no groups of {heads}"
                )
        self.skip_first, self.sample = skip_first, sample
        self._sums: dict[tuple[int, str], MomentSums] = {}
        self._origin: dict[tuple[int, str], Array] = {}
        self._directions: dict[tuple[int, str], Array] = {}
        self._samples: dict[tuple[int, str], list[Array]] = {}

    def __call__(self, captured: Captured) -> None:
        """Add one sequence of one layer."""
        trace = self.traces.get(captured.layer)
        if trace is None:
            return
        before = captured.keys if trace.rope is None else captured.keys_before
        if before is None:
            raise CalibrationError(f"layer {captured.layer}: RoPE was not seen in this pass")
        for part, array in (("keys", before), ("values", captured.values)):
            place = (captured.layer, part)
            x = grouped(np.array(array)[:, self.skip_first :], self.groups[place])
            if place not in self._sums:
                self._sums[place], self._samples[place] = MomentSums(), []
                self._origin[place] = x.astype(np.float64).mean(axis=1, keepdims=True)
                self._directions[place] = np.zeros((len(x), x.shape[2], x.shape[2]))
            self._sums[place].add(x)
            self._directions[place] += unit_moment(x - self._origin[place]) * x.shape[1]
            rows = np.linspace(0, x.shape[1] - 1, min(self.sample, x.shape[1])).astype(np.int64)
            self._samples[place].append(x[:, rows])

    def done(self, part: str) -> dict[int, Joint]:
        """Statistics of "keys" or "values" by layer."""
        found = {}
        for (layer, name), sums in sorted(self._sums.items()):
            if name != part:
                continue
            place = (layer, part)
            moments = sums.done()
            found[layer] = Joint(
                moments,
                self._directions[place] / moments.count,
                np.concatenate(self._samples[place], axis=1),
                self.groups[place],
                part == "keys" and self.traces[layer].rope is not None,
            )
        return found


def collect(
    streaming: StreamingForward,
    tokens: Array,
    traces: Sequence[LayerTrace],
    group: int | None = None,
) -> Collector:
    """Run the calibration tokens int32 [n, N] through the model for a new `Collector`."""
    refuse_if_uncovered(traces)
    collector = Collector(traces, group)
    mx.eval(streaming.run(tokens, collector))
    return collector


def group_of(heads: int, dim: int, widest: int = WIDEST) -> int:
    """The most heads, a divisor of all, whose coordinates are at most `widest` (at least one)."""
    return max(n for n in range(1, heads + 1) if heads % n == 0 and (n == 1 or n * dim <= widest))


def grouped(x: Array, group: int) -> Array:
    """Vectors [H, N, D] of heads as [H / group, N, group * D]."""
    heads, tokens, dim = x.shape
    by_group = x.reshape(heads // group, group, tokens, dim).transpose(0, 2, 1, 3)
    result: Array = by_group.reshape(heads // group, tokens, group * dim)
    return result


def ungrouped(x: Array, group: int) -> Array:
    """The inverse of `grouped`."""
    groups, tokens, width = x.shape
    by_head = x.reshape(groups, tokens, group, width // group).transpose(0, 2, 1, 3)
    result: Array = by_head.reshape(groups * group, tokens, width // group)
    return result


def unit_moment(centred: Array) -> Array:
    """Second moment [G, C, C] of the directions of vectors [G, S, C]; its trace is 1."""
    size = np.sum(np.square(centred), axis=-1, keepdims=True)
    weighted = centred / np.maximum(size, np.finfo(np.float64).tiny)
    moment: Array = np.swapaxes(weighted, 1, 2) @ centred / centred.shape[1]
    return moment


def by_shape(joint: Mapping[int, Joint]) -> dict[tuple[bool, int, tuple[int, ...]], list[int]]:
    """Layers that agree in standing before RoPE, group and shape: what one artifact can stack."""
    groups: dict[tuple[bool, int, tuple[int, ...]], list[int]] = {}
    for index in sorted(joint):
        own = joint[index]
        key = (own.before_rope, own.group, own.moments.total.shape)
        groups.setdefault(key, []).append(index)
    return groups
