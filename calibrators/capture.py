"""Sufficient statistics and a fixed-size sample of what attention sees, from one streaming pass.

Sums are float64 and are added sequence by sequence in order; the sample is chosen from a seed. So
the same tokens give the same statistics, and memory does not grow with their number.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from velox_pack.calibrators.linear_inputs import OnLinear
from velox_pack.calibrators.stream import Captured, Hook, StreamingForward
from velox_pack.calibrators.trace import LayerTrace, refuse_if_uncovered
from velox_pack.manifests.errors import CalibrationError

Array = np.ndarray


@dataclass(frozen=True, eq=False)
class Moments:
    """Sums over `count` vectors of each of H heads, float64: all that means and bases need.

    `total` [H, D] is the sum, `second` [H, D, D] the sum of x x^T (not centred), `largest` [H, D]
    the greatest absolute value of each coordinate.
    """

    count: int
    total: Array
    second: Array
    largest: Array

    @property
    def mean(self) -> Array:
        """[H, D]."""
        mean: Array = self.total / self.count
        return mean

    @property
    def uncentred(self) -> Array:
        """E[x x^T], [H, D, D]."""
        second: Array = self.second / self.count
        return second

    @property
    def covariance(self) -> Array:
        """E[(x - mean)(x - mean)^T], [H, D, D]; symmetric."""
        mean = self.mean
        centred: Array = self.uncentred - mean[:, :, None] * mean[:, None, :]
        return centred


@dataclass(frozen=True, eq=False)
class LayerStatistics:
    """One covered layer. `keys_before` is the same object as `keys` where `rotated` is False.

    Keys and values leave out the first `skip_first` tokens of each sequence (attention sinks, which
    caches keep exactly); queries (after RoPE, Hq heads) do not. Samples are float32 [Hkv, S, D]:
    row s of head h is the same token in `sample_keys`, `sample_keys_before` and `sample_values`,
    but heads have tokens of their own, spread evenly over sequences and positions.
    """

    index: int
    rotated: bool
    queries: Moments
    keys: Moments
    keys_before: Moments
    values: Moments
    sample_keys: Array
    sample_keys_before: Array
    sample_values: Array
    sample_sequences: Array
    sample_positions: Array

    def part(self, name: str) -> tuple[Moments, Array]:
        """Moments and sample of "keys" (before RoPE where it can be undone) or "values"."""
        if name == "values":
            return self.values, self.sample_values
        return self.keys_before, self.sample_keys_before


class MomentSums:
    """Moments under construction."""

    def __init__(self) -> None:
        self.count = 0
        self.total: Array | float = 0.0
        self.second: Array | float = 0.0
        self.largest: Array | float = 0.0

    def add(self, x: Array) -> None:
        """Add vectors float32 [H, N, D]."""
        wide = x.astype(np.float64)
        self.count += x.shape[1]
        self.total = self.total + wide.sum(axis=1)
        self.second = self.second + np.swapaxes(wide, 1, 2) @ wide
        self.largest = np.maximum(self.largest, np.abs(wide).max(axis=1))

    def done(self) -> Moments:
        """The moments of all vectors so far."""
        return Moments(
            self.count, np.asarray(self.total), np.asarray(self.second), np.asarray(self.largest)
        )


class _Collector:
    """Statistics of one layer under construction."""

    def __init__(self, trace: LayerTrace, skip_first: int, positions: Array) -> None:
        self.trace, self.skip_first, self.positions = trace, skip_first, positions
        self.sums = {name: MomentSums() for name in ("queries", "keys", "before", "values")}
        self.samples: dict[str, list[Array]] = {"keys": [], "before": [], "values": []}

    def add(self, captured: Captured) -> None:
        keys = np.array(captured.keys)
        parts = {"keys": keys, "before": keys, "values": np.array(captured.values)}
        if self.trace.rope is not None:
            if captured.keys_before is None:
                raise CalibrationError(f"layer {self.trace.index}: RoPE was not seen in this pass")
            parts["before"] = np.array(captured.keys_before)
        self.sums["queries"].add(np.array(captured.queries))
        rows = self.positions[captured.sequence][:, :, None]  # [H, S/n, 1]
        for name, x in parts.items():
            if name != "before" or self.trace.rope is not None:
                self.sums[name].add(x[:, self.skip_first :])
            self.samples[name].append(np.take_along_axis(x, rows, axis=1))

    def done(self) -> LayerStatistics:
        rotated = self.trace.rope is not None
        moments = {name: sums.done() for name, sums in self.sums.items() if sums.count}
        samples = {n: np.concatenate(x, axis=1) for n, x in self.samples.items()}
        sequences, heads, per = self.positions.shape
        return LayerStatistics(
            index=self.trace.index,
            rotated=rotated,
            queries=moments["queries"],
            keys=moments["keys"],
            keys_before=moments["before"] if rotated else moments["keys"],
            values=moments["values"],
            sample_keys=samples["keys"],
            sample_keys_before=samples["before"] if rotated else samples["keys"],
            sample_values=samples["values"],
            sample_sequences=np.broadcast_to(
                np.repeat(np.arange(sequences), per), (heads, sequences * per)
            ),
            sample_positions=self.positions.transpose(1, 0, 2).reshape(heads, -1),
        )


def sample_positions(
    sequences: int, length: int, heads: int, *, skip_first: int, sample: int, seed: Sequence[int]
) -> Array:
    """Token positions to keep, int64 [sequences, heads, S / sequences], ascending in each row.

    Each row has one position from each of equal stretches of [skip_first, length), chosen for each
    head by itself; all are taken if there are no more than were asked for.
    """
    available = length - skip_first
    per = min(available, max(1, sample // sequences))
    edges = skip_first + (np.arange(per + 1) * available) // per
    uniform = np.random.Generator(np.random.PCG64(list(seed))).random((sequences, heads, per))
    positions: Array = edges[:-1] + np.floor(uniform * np.diff(edges)).astype(np.int64)
    return positions


def capture(
    streaming: StreamingForward,
    tokens: Array,
    traces: Sequence[LayerTrace],
    *,
    skip_first: int = 4,
    sample: int = 1024,
    seed: int = 0,
    also: Sequence[Hook] = (),
    on_linear: OnLinear | None = None,
) -> dict[int, LayerStatistics]:
    """Statistics of all covered layers over token ids int32 [n, N], by layer index.

    `sample` is the number of tokens kept for each KV head (at least one a sequence). `also` are
    collectors of other calibrations, which see the same pass: all attention layers that the hook
    of `StreamingForward.run` is called for, covered or not; `on_linear` gets the second moments of
    the linears' inputs, each layer's in its own turn. Raises CalibrationError if nothing is
    covered, for too short sequences, or for non-finite activations.
    """
    refuse_if_uncovered(traces)
    if tokens.ndim != 2 or not tokens.size:
        raise CalibrationError(f"calibration tokens have shape {list(tokens.shape)}, not [n, N]")
    if tokens.shape[1] <= 2 * skip_first:
        raise CalibrationError(
            f"sequences of {tokens.shape[1]} tokens are too short: each leaves out {skip_first}"
        )
    n, length = tokens.shape

    def positions(t: LayerTrace) -> Array:
        return sample_positions(
            n, length, t.kv_heads, skip_first=skip_first, sample=sample, seed=(seed, t.index)
        )

    collectors = {t.index: _Collector(t, skip_first, positions(t)) for t in traces if t.covered}

    def hook(captured: Captured) -> None:
        if captured.layer in collectors:
            collectors[captured.layer].add(captured)
        for other in also:
            other(captured)

    mx.eval(streaming.run(tokens, hook, on_linear=on_linear))
    unseen = [i for i, c in collectors.items() if not c.sums["keys"].count]
    if unseen:
        raise CalibrationError(f"layer {unseen[0]} did not attend in this pass")
    return {index: collector.done() for index, collector in collectors.items()}
