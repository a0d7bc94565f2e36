"""Where attention truly goes: mass by key, and what is lost when only the best keys are kept.

True queries (after RoPE and norms), the model's own scale and mask, a block of queries at a time:
no [N, N] matrix of all heads is ever held. Sums run over the query heads that share a KV head. A
column of attention sinks that a model adds to the softmax (gpt_oss) is not seen here.

A block of `window` queries is also an observation, as in SnapKV and AdaKV (2407.11550, code read):
the block's own keys and the first `sinks` are kept, and the keys between compete.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
from threadpoolctl import threadpool_limits

from velox_pack.calibrators.stream import Captured
from velox_pack.calibrators.trace import LayerTrace
from velox_pack.manifests.errors import CalibrationError

Array = np.ndarray

# Budgets as shares of the keys that compete: 1 to 1/64, two steps for each halving.
RATIOS = tuple(2.0 ** (-k / 2) for k in range(13))
ORACLE = "oracle"
_UNSEEN = -1e8  # additive masks below this hide a key


@dataclass(frozen=True, eq=False)
class Heads:
    """One sequence of one layer as NumPy float32 arrays [heads, N, D]."""

    layer: int
    queries: Array
    keys: Array
    keys_before: Array | None
    values: Array


# Scores [Hkv, N] of all keys as seen from a position; larger ones are kept.
Selector = Callable[[Heads, int], Array]


@dataclass(frozen=True, eq=False)
class AttentionMass:
    """Attention of one layer over n sequences of N tokens, H KV heads; float64 unless noted.

    `mean_mass` float32 [n, H, N]: mean attention that a key gets from those later queries that can
    see it. `lost` and `error`, by selector, [H, K] for K = len(RATIOS): share of all attention
    that goes to dropped keys, and squared error of a head's output relative to its size, when the
    selector keeps RATIOS[k] of the competing keys. The selector "oracle" knows the mass they get.
    `pooled` [H, K]: budgets of heads, mean 1, when all heads of the layer compete for the best
    keys. `size` [H]: mean squared output. `queries` float32 [Hq, Q, D]: a sample over positions.
    """

    mean_mass: Array
    lost: Mapping[str, Array]
    error: Mapping[str, Array]
    pooled: Array
    size: Array
    queries: Array

    @property
    def by_position(self) -> Array:
        """Mean over sequences, [H, N]: what sinks get shows in the first columns."""
        mean: Array = self.mean_mass.mean(axis=0, dtype=np.float64)
        return mean

    def ratio_for(self, share: float, selector: str = ORACLE) -> Array:
        """Share of the keys that holds `share` of the competing mass, [H]: small if concentrated.

        Interpolated between RATIOS; at least the smallest of them.
        """
        lost = self.lost[selector]
        largest = np.maximum(_at_zero(lost), np.finfo(np.float64).tiny)
        kept = 1 - lost / largest[:, None]
        order = np.array(RATIOS)[::-1]
        return np.array([np.interp(share, row[::-1], order) for row in kept])


@dataclass
class _Layer:
    blocks: int = 0
    masses: list[Array] = field(default_factory=list)
    queries: list[Array] = field(default_factory=list)
    lost: dict[str, Array] = field(default_factory=dict)
    error: dict[str, Array] = field(default_factory=dict)
    pooled: Array | float = 0.0
    size: Array | float = 0.0


class Collector:
    """A capture hook that adds up `AttentionMass` of the covered layers in `traces`.

    `window` queries are one block; `sinks` first keys do not compete; `selectors` are further ways
    to choose keys whose losses are wanted; `sample` query rows of each head are kept in all, over
    `sequences` sequences. Blocks before a quarter of the sequence observe too few keys to count.
    """

    def __init__(
        self,
        traces: Sequence[LayerTrace],
        sequences: int,
        *,
        window: int = 64,
        sinks: int = 4,
        selectors: Mapping[str, Selector] | None = None,
        sample: int = 128,
    ) -> None:
        if window < 1 or sinks < 0:
            raise CalibrationError(f"a window of {window} queries and {sinks} sinks are none")
        self.layers = {t.index: _Layer() for t in traces if t.covered}
        self.window, self.sinks = window, sinks
        self.selectors = dict(selectors or {})
        self.per_sequence = max(1, sample // max(sequences, 1))

    def __call__(self, captured: Captured) -> None:
        """Add one sequence of one layer."""
        layer = self.layers.get(captured.layer)
        if layer is None:
            return
        with threadpool_limits(1):
            self._add(layer, captured)

    def _add(self, layer: _Layer, captured: Captured) -> None:
        heads = heads_of(captured)
        kv_heads, length = heads.keys.shape[:2]
        mass, seen = np.zeros((kv_heads, length)), np.zeros((kv_heads, length))
        for start, weights, visible in blocks(captured, self.window):
            later = visible & (np.arange(visible.shape[-1]) < _rows(start, visible))
            stop = start + visible.shape[-2]
            mass[:, :stop] += np.where(later, weights, 0).sum(axis=(1, 2), dtype=np.float64)
            seen[:, :stop] += np.broadcast_to(later, weights.shape).sum(axis=(1, 2))
            if start - self.sinks >= 8 and start >= length // 4:
                self._observe(layer, heads, start, weights)
        layer.masses.append((mass / np.maximum(seen, 1)).astype(np.float32))
        rows = np.linspace(0, length - 1, min(self.per_sequence, length)).astype(np.int64)
        layer.queries.append(heads.queries[:, rows])

    def _observe(self, layer: _Layer, heads: Heads, start: int, weights: Array) -> None:
        """Losses of one block of queries; weights [H, G, B, start + B]."""
        out = weights @ heads.values[:, None, : weights.shape[-1]]
        rival = weights[..., self.sinks : start]
        values = heads.values[:, self.sinks : start]
        mass = rival.mean(axis=(1, 2))
        budgets = counts(rival.shape[-1])
        scores = {ORACLE: mass}
        for name, select in self.selectors.items():
            scores[name] = select(heads, start)[:, self.sinks : start]
        size = np.square(out).sum(axis=-1, dtype=np.float64).mean(axis=(1, 2))
        for name, score in scores.items():
            lost, error = losses(rival, values, out, score, budgets)
            layer.lost[name] = layer.lost.get(name, 0.0) + lost
            layer.error[name] = layer.error.get(name, 0.0) + error
        layer.pooled = layer.pooled + pooled_shares(mass, budgets)
        layer.size = layer.size + size
        layer.blocks += 1

    def done(self) -> dict[int, AttentionMass]:
        """What was seen, by layer. Raises CalibrationError for sequences too short to observe."""
        found = {}
        for index, layer in sorted(self.layers.items()):
            if not layer.masses:
                continue
            if not layer.blocks:
                raise CalibrationError(
                    f"sequences of {layer.masses[0].shape[-1]} tokens are too short "
                    f"to observe attention with a window of {self.window}"
                )
            size = np.asarray(layer.size) / layer.blocks
            largest = np.maximum(size, np.finfo(np.float64).tiny)[:, None]
            found[index] = AttentionMass(
                mean_mass=np.stack(layer.masses),
                lost={n: x / layer.blocks for n, x in layer.lost.items()},
                error={n: x / layer.blocks / largest for n, x in layer.error.items()},
                pooled=np.asarray(layer.pooled) / layer.blocks,
                size=size,
                queries=np.concatenate(layer.queries, axis=1),
            )
        return found


def heads_of(captured: Captured) -> Heads:
    """The arrays of a captured sequence in NumPy."""
    before = captured.keys_before
    return Heads(
        layer=captured.layer,
        queries=np.array(captured.queries),
        keys=np.array(captured.keys),
        keys_before=None if before is None else np.array(before),
        values=np.array(captured.values),
    )


def blocks(captured: Captured, window: int) -> Iterator[tuple[int, Array, Array]]:
    """(start, weights, visible) of each block of queries.

    `weights` float32 [H, G, B, start + B] are the softmax over the keys up to the block's last,
    `visible` is bool and broadcasts to it.
    """
    queries, keys = np.array(captured.queries), np.array(captured.keys)
    kv_heads, length, dim = keys.shape
    grouped = queries.reshape(kv_heads, -1, length, dim)
    flipped = np.swapaxes(keys, 1, 2)[:, None]
    for start in range(0, length, window):
        stop = min(start + window, length)
        added = _mask(captured.mask, start, stop, kv_heads)
        scores = grouped[:, :, start:stop] @ flipped[..., :stop] * np.float32(captured.scale)
        scores += added
        scores -= scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores)
        weights /= weights.sum(axis=-1, keepdims=True)
        yield start, weights, added > _UNSEEN


def counts(rivals: int) -> Array:
    """Keys kept of `rivals` at each of RATIOS, at least one."""
    kept: Array = np.maximum(np.rint(np.array(RATIOS) * rivals), 1).astype(np.int64)
    return kept


def losses(
    weights: Array, values: Array, out: Array, scores: Array, budgets: Array
) -> tuple[Array, Array]:
    """Mass and squared output error, both [H, K], of keeping the best-scored keys.

    `weights` [H, G, B, C] on the competing keys, `values` [H, C, D], `out` [H, G, B, D] the full
    output, `scores` [H, C]; `budgets` [K] descending from C. What is kept is renormalized.
    """
    order = np.argsort(-scores, axis=-1, kind="stable")
    ranked = np.take_along_axis(weights, order[:, None, None], axis=-1)
    values = np.take_along_axis(values, order[..., None], axis=1)[:, None]
    gone, moved = np.zeros((*out.shape[:-1], 1)), np.zeros(out.shape)
    lost, error = [], []
    last = weights.shape[-1]
    for budget in budgets:
        part = ranked[..., budget:last]
        gone = gone + part.sum(axis=-1, keepdims=True)
        moved = moved + part @ values[:, :, budget:last]
        last = budget
        kept = np.maximum(1 - gone, 1e-6)
        error.append(np.square((gone * out - moved) / kept).sum(axis=-1).mean(axis=(1, 2)))
        lost.append(gone.mean(axis=(1, 2, 3)))
    return np.stack(lost, axis=-1), np.stack(error, axis=-1)


def pooled_shares(mass: Array, budgets: Array) -> Array:
    """Budgets [H, K], mean 1 over heads: how many of the layer's best keys are each head's.

    At budget b the H * b largest of `mass` [H, C] over all heads are taken (AdaKV).
    """
    heads, rivals = mass.shape
    owner = np.argsort(-mass, axis=None, kind="stable") // rivals
    shares = [np.bincount(owner[: heads * b], minlength=heads) / b for b in budgets]
    return np.stack(shares, axis=-1)


def _at_zero(lost: Array) -> Array:
    """Mass of all competing keys, from the last two points of the curve (convex: a lower bound)."""
    step = (lost[:, -1] - lost[:, -2]) / (RATIOS[-2] - RATIOS[-1])
    total: Array = lost[:, -1] + step * RATIOS[-1]
    return total


def _rows(start: int, visible: Array) -> Array:
    return np.arange(start, start + visible.shape[-2])[:, None]


def _mask(mask: mx.array | str | None, start: int, stop: int, kv_heads: int) -> Array:
    """Rows `start:stop` of the model's mask, additive float32, broadcasting to [H, G, B, stop]."""
    if mask is None or isinstance(mask, str):
        late = np.arange(stop) > np.arange(start, stop)[:, None]
        return np.where(late, -np.inf, 0.0).astype(np.float32)
    rows = np.array(mask[..., start:stop, :stop])
    if rows.dtype == np.bool_:
        rows = np.where(rows, 0.0, -np.inf)
    rows = rows.astype(np.float32).reshape(-1, *rows.shape[-2:])  # a mask of one sequence
    by_head: Array = rows[None] if len(rows) == 1 else rows.reshape(kv_heads, -1, *rows.shape[-2:])
    return by_head
