"""A sample of tokens, the same in all layers: what relates a layer to the one before.

Runs of consecutive tokens, spread evenly over the sequences, so that codes whose groups run along
tokens can be tried on it too. Keys are held before RoPE where it can be undone, and turned again
when asked for. Memory is bounded by `budget`, whatever the model and the text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from velox_pack.calibrators.stream import Captured, StreamingForward
from velox_pack.calibrators.trace import LayerTrace, refuse_if_uncovered
from velox_pack.kernels import apply_rope, rope_angles
from velox_pack.manifests.errors import CalibrationError

Array = np.ndarray

RUN = 64  # consecutive tokens
BUDGET = 256 << 20  # bytes held for all layers


@dataclass(frozen=True, eq=False)
class LayerTokens:
    """One layer's sample of S tokens, in runs of `run`: keys and values float32 [H, S, D].

    `keys` before RoPE where the layer's `trace` has one; row s is the same token in all layers.
    `positions` int64 [S] in the sequence, `sequences` int64 [S].
    """

    trace: LayerTrace
    keys: Array
    values: Array
    positions: Array
    sequences: Array
    run: int

    @property
    def index(self) -> int:
        """The layer's place in the model."""
        return self.trace.index

    @property
    def rotated(self) -> bool:
        """Whether keys before and after RoPE differ."""
        return self.trace.rope is not None

    def part(self, name: str, *, before_rope: bool = True) -> Array:
        """Vectors of "keys" or "values", [H, S, D]."""
        if name == "values":
            return self.values
        rope = self.trace.rope
        if before_rope or rope is None:
            return self.keys
        table = rope_angles(mx.array(rope.inv_freq), mx.array(self.positions))
        turned = apply_rope(mx.array(self.keys)[None], *table, rope.traditional)
        return np.array(turned[0])


class Neighbours:
    """A capture hook that keeps the sample; `shape` is that of the token ids, (n, N).

    The first `skip_first` tokens of a sequence are left out. Raises CalibrationError for sequences
    that have no tokens left.
    """

    def __init__(
        self,
        traces: Sequence[LayerTrace],
        shape: tuple[int, ...],
        *,
        run: int = RUN,
        skip_first: int = 4,
        budget: int = BUDGET,
    ) -> None:
        self.traces = {t.index: t for t in traces if t.covered}
        self.rows, self.run = sample_runs(
            *shape, tokens=budget // max(1, self._token_bytes()), run=run, skip_first=skip_first
        )
        self._held: dict[tuple[int, str], list[Array]] = {}

    def _token_bytes(self) -> int:
        return sum(4 * t.kv_heads * (t.k_dim + t.v_dim) for t in self.traces.values())

    def __call__(self, captured: Captured) -> None:
        """Keep one sequence's rows of one layer."""
        trace = self.traces.get(captured.layer)
        if trace is None:
            return
        keys = captured.keys if trace.rope is None else captured.keys_before
        if keys is None:
            raise CalibrationError(f"layer {captured.layer}: RoPE was not seen in this pass")
        rows = mx.array(self.rows)
        for part, x in (("keys", keys), ("values", captured.values)):
            self._held.setdefault((captured.layer, part), []).append(np.array(x[:, rows]))

    def done(self) -> dict[int, LayerTokens]:
        """The sample by layer."""
        found = {}
        for index, trace in self.traces.items():
            if (index, "keys") not in self._held:
                raise CalibrationError(f"layer {index} did not attend in this pass")
            keys, values = self._held[index, "keys"], self._held[index, "values"]
            found[index] = LayerTokens(
                trace,
                np.concatenate(keys, axis=1),
                np.concatenate(values, axis=1),
                np.tile(self.rows, len(keys)),
                np.repeat(np.arange(len(keys)), len(self.rows)),
                self.run,
            )
        return found


def sample_runs(
    sequences: int, length: int, *, tokens: int, run: int, skip_first: int
) -> tuple[Array, int]:
    """Positions int64 to keep of each sequence, in runs spread evenly, and the length of a run.

    As many runs as make at most `tokens` tokens of all sequences, at least one of each.
    """
    room = length - skip_first
    if room < 1:
        raise CalibrationError(
            f"sequences of {length} tokens are too short: each leaves out {skip_first}"
        )
    run = min(run, room)
    slots = room // run
    count = int(np.clip(tokens // (sequences * run), 1, slots))
    chosen = np.floor((np.arange(count) + 0.5) * slots / count).astype(np.int64)
    rows: Array = (skip_first + chosen[:, None] * run + np.arange(run)).ravel()
    return rows, run


def collect(
    streaming: StreamingForward,
    tokens: Array,
    traces: Sequence[LayerTrace],
    *,
    budget: int = BUDGET,
) -> dict[int, LayerTokens]:
    """Run token ids int32 [n, N] through the model for a sample of their tokens."""
    refuse_if_uncovered(traces)
    collector = Neighbours(traces, tokens.shape, budget=budget)
    mx.eval(streaming.run(tokens, collector))
    return collector.done()


def means(tokens: Mapping[int, LayerTokens], part: str) -> dict[int, Array]:
    """Each layer's mean vector, float64 [H, 1, D] (keys before RoPE)."""
    return {
        i: t.part(part).mean(axis=1, keepdims=True, dtype=np.float64) for i, t in tokens.items()
    }
