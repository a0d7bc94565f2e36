"""What calibrators_attention.py measures with: held-out attention, scores of keys, evictions."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from velox_pack.calibrators import (
    attention_filter,
    attention_mass,
    expected_attention,
    qfilters,
    squeeze,
)
from velox_pack.calibrators.attention_mass import Heads, blocks, heads_of, losses
from velox_pack.calibrators.capture import LayerStatistics, capture
from velox_pack.calibrators.filter_report import FOLLOWED, first_direction, spearman
from velox_pack.calibrators.head import head
from velox_pack.calibrators.hooks import AttentionCall
from velox_pack.calibrators.stream import Captured, StreamingForward
from velox_pack.calibrators.text import load_text, sequences
from velox_pack.calibrators.trace import trace
from velox_pack.manifests.artifacts import Artifact
from velox_pack.manifests.artifacts_attention import Budgets
from velox_pack.source import data_folder, resolve

Array = np.ndarray
SINKS, WINDOW, CALIBRATION, LENGTH = 4, 64, 4096, 512
FEW = 4  # sequences of the second pass
Score = Callable[[Heads, int], Array]  # [H, N], of all keys as seen from a position


def places(artifacts: tuple[Artifact, ...]) -> dict[int, tuple[Any, int]]:
    return {i: (a, n) for a in artifacts for n, i in enumerate(a.layers)}


class Calibrated:
    """One model's calibrations: a pass with all collectors, and one that needs its results."""

    def __init__(self, path: str, heldout: int) -> None:
        self.source = resolve(path)
        self.all_traces = trace(self.source.skeleton())
        self.traces = [t for t in self.all_traces if t.covered and t.window is None]
        tokenizer = self.source.tokenizer()
        self.tokens = sequences(tokenizer, load_text(), CALIBRATION, LENGTH, 0)
        text = load_text(data_folder() / "text" / "heldout.txt")
        self.heldout = sequences(tokenizer, text, heldout * LENGTH, LENGTH, 0)
        self.seconds: dict[str, float] = {}
        count = len(self.tokens)
        mass = Timed(attention_mass.Collector(self.traces, count))
        filters = Timed(attention_filter.Collector(self.traces))
        moments = Timed(expected_attention.Collector(self.traces))
        change = squeeze.HiddenChange()
        streaming = self.streaming()
        start = time.perf_counter()
        with change.watching(streaming.layers):
            self.statistics: dict[int, LayerStatistics] = capture(
                streaming, self.tokens, self.traces, also=[mass, filters, moments]
            )
        self.seconds["pass"] = time.perf_counter() - start
        self.mass, self.change = mass.inner.done(), change.done()
        self.qfilters = self.timed("qfilters", lambda: qfilters.fit(self.statistics))
        self.fitted = {
            frame: self.timed(f"filter {frame}", lambda: attention_filter.fit(filters.inner, frame))  # noqa: B023
            for frame in attention_filter.FRAMES
        }
        self.paper = self.timed("expected", lambda: expected_attention.fit(moments.inner))
        weigher = Timed(expected_attention.Weigher(self.paper))
        chosen = {"qfilter": self.by_filter, "moving": self.by_moving}
        again = Timed(attention_mass.Collector(self.traces, FEW, selectors=chosen))
        start = time.perf_counter()

        def both(captured: Captured) -> None:
            weigher(captured)
            again(captured)

        self.streaming().run(self.tokens[:FEW], both)
        self.seconds["second pass"] = time.perf_counter() - start
        self.selected = again.inner.done()
        self.weighted = expected_attention.fit(moments.inner, weights=weigher.inner.weights())
        for name, timed in (
            ("attention mass", mass),
            ("filter sums", filters),
            ("query moments", moments),
            ("weights", weigher),
        ):
            self.seconds[name] = timed.seconds

    def streaming(self) -> StreamingForward:
        return StreamingForward(self.source.skeleton(), self.source.weights)

    def timed(self, what: str, call: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = call()
        self.seconds[what] = time.perf_counter() - start
        return result

    def by_filter(self, heads: Heads, start: int) -> Array:
        artifact, n = places(self.qfilters)[heads.layer]
        return np.einsum("hnd,hd->hn", heads.keys, artifact.filters[n])

    def by_moving(self, heads: Heads, start: int) -> Array:
        artifact, n = places(self.fitted["moving"])[heads.layer]
        t = next(t for t in self.traces if t.index == heads.layer)
        turned = attention_filter.turn(artifact.filters[n], t, start + artifact.lead)
        return attention_filter.score(heads.keys, turned, artifact.norm[n])

    def scores(self) -> dict[str, Score]:
        """Every way to score keys; those that move with the position say so."""

        def keys_axis(h: Heads, start: int) -> Array:
            return np.einsum("hnd,hd->hn", h.keys, first_direction(self.statistics[h.layer]))

        def mean_query(h: Heads, start: int) -> Array:
            mean = self.statistics[h.layer].queries.mean
            grouped = mean.reshape(len(h.keys), -1, mean.shape[-1]).mean(axis=1)
            return np.einsum("hnd,hd->hn", h.keys, grouped)

        def before_rope(h: Heads, start: int) -> Array:
            """Q-Filter of queries before RoPE, on keys before RoPE."""
            artifact, n = places(self.paper)[h.layer]
            grouped = artifact.mean[n].reshape(len(h.keys), -1, artifact.mean.shape[-1])
            keys = h.keys if h.keys_before is None else h.keys_before
            return np.einsum("hnd,hd->hn", keys, grouped.mean(axis=1))

        def fixed(h: Heads, start: int) -> Array:
            artifact, n = places(self.fitted["fixed"])[h.layer]
            return attention_filter.score(h.keys, artifact.filters[n], artifact.norm[n])

        def expected(
            artifacts: tuple[Artifact, ...], weights: tuple[float, ...] | None, values: bool
        ) -> Score:
            def score(h: Heads, start: int) -> Array:
                artifact, n = places(artifacts)[h.layer]
                if weights is not None:
                    given = np.broadcast_to(np.float32(weights), artifact.weights.shape)
                    artifact = replaced(artifact, weights=np.ascontiguousarray(given))
                found = expected_attention.score(artifact, n, h.keys, start, SINKS)
                size = np.linalg.norm(h.values, axis=-1)
                return found + np.log(size) if values else found

            return score

        return {
            "q-filter": self.by_filter,
            "minus key norm": lambda h, start: -np.linalg.norm(h.keys, axis=-1),
            "svd of keys": keys_axis,
            "mean query": mean_query,
            "mean query before RoPE, keys before RoPE": before_rope,
            "fitted filter, fixed": fixed,
            "expected attention, mean alone (moves)": expected(self.paper, (1, 0, 0), False),
            "expected attention (moves)": expected(self.paper, None, False),
            "expected attention * value norm (moves)": expected(self.paper, None, True),
            "expected attention, weighted (moves)": expected(self.weighted, None, False),
            "fitted filter, moving (moves)": self.by_moving,
        }


@dataclass
class Timed:
    """A collector with the seconds that it took."""

    inner: Any
    seconds: float = 0.0

    def __call__(self, captured: Captured) -> None:
        start = time.perf_counter()
        self.inner(captured)
        self.seconds += time.perf_counter() - start


def replaced(artifact: Any, **changes: Any) -> Any:
    tensors = {role: getattr(artifact, role) for role in artifact.forms}
    return type(artifact)(**(artifact.parameters() | tensors | changes), layers=artifact.layers)


@dataclass
class HeldOut:
    """Held-out attention: correlations of scores by head, and what an eviction loses."""

    model: Calibrated
    observed: tuple[int, ...] = (256, 320, 384, 448)
    found: dict[str, dict[str, list[Array]]] = field(default_factory=dict)

    def table(self) -> list[dict[str, Any]]:
        scores = self.model.scores()

        def hook(captured: Captured) -> None:
            if captured.layer in self.model.mass:
                self._add(captured, scores)

        self.model.streaming().run(self.model.heldout, hook)
        rows = []
        for name, columns in self.found.items():
            row: dict[str, Any] = {"score": name}
            row |= {key: round(float(np.mean(x)), 4) for key, x in columns.items()}
            row["heads_positive"] = round(float(np.mean(np.stack(columns["spearman"]) > 0)), 4)
            row["worst_head_next"] = round(
                float(np.mean(np.stack(columns["spearman_next"]), axis=-1).min()), 4
            )
            rows.append(row)
        return rows

    def _add(self, captured: Captured, scores: Mapping[str, Score]) -> None:
        heads = heads_of(captured)
        length = heads.keys.shape[1]
        mass = attention_mass.Collector(
            [t for t in self.model.traces if t.index == captured.layer], 1
        )
        mass(captured)
        truth = mass.done()[captured.layer].mean_mass[0, :, SINKS:-FOLLOWED]
        seen = {start: w for start, w, _ in blocks(captured, WINDOW) if start in self.observed}
        for name, score in scores.items():
            columns = self.found.setdefault(name, {})

            def add(key: str, value: Array) -> None:
                columns.setdefault(key, []).append(value)  # noqa: B023

            at = length // 2 if "moves" in name else length
            add("spearman", spearman(score(heads, at)[:, SINKS:-FOLLOWED], truth))
            rho, kept, error = [], [], []
            for start, weights in seen.items():
                rivals = slice(SINKS, start - FOLLOWED)
                given = score(heads, start)[:, rivals]
                some = weights[..., rivals]
                mean = some.mean(axis=(1, 2))
                rho.append(spearman(given, mean))
                out = weights @ heads.values[:, None, : weights.shape[-1]]
                budgets = np.array([given.shape[1] // n for n in (4, 8, 16)])
                lost, wrong = losses(some, heads.values[:, rivals], out, given, budgets)
                kept.append(1 - lost / mean.sum(axis=-1, keepdims=True))
                error.append(wrong / np.square(out).sum(axis=-1).mean(axis=(1, 2))[:, None])
            add("spearman_next", np.stack(rho, axis=-1))
            for n, key in enumerate(("quarter", "eighth", "sixteenth")):
                add(f"kept_{key}", np.stack(kept)[..., n])
                add(f"error_{key}", np.stack(error)[..., n])


class Evicted:
    """KL after one eviction at position `at`: keys between sinks and there, by head.

    Queries from `at` on see the sinks, what is kept, and everything from `at` on. Selection uses
    the scores of the exact model: the oracle's is the mean mass from the next 64 queries.
    """

    def __init__(self, model: Calibrated, windows: int, at: int = 320) -> None:
        self.model, self.at = model, at
        self.streaming, self.tokens = model.streaming(), model.heldout[:windows]
        self.scores: dict[tuple[str, int], list[Array]] = {}

        def hook(c: Captured) -> None:
            if c.layer not in model.mass:
                return
            heads = heads_of(c)
            weights = next(w for start, w, _ in blocks(c, WINDOW) if start == at)
            chosen = {
                "oracle": weights[..., :at].mean(axis=(1, 2)),
                "qfilter": model.by_filter(heads, at)[:, :at],
                "moving": model.by_moving(heads, at)[:, :at],
            }
            for name, score in chosen.items():
                self.scores.setdefault((name, c.layer), []).append(score[:, SINKS:])

        exact = self.streaming.run(self.tokens, hook)
        self.wanted = [self._log(exact[b : b + 1], b) for b in range(windows)]

    def kl(self, budgets: tuple[Budgets, ...], ratio: float, selector: str) -> float:
        rivals = self.at - SINKS
        shares = {i: (b.at(ratio), n) for b in budgets for n, i in enumerate(b.layers)}
        length = self.tokens.shape[1]
        count: dict[int, int] = {}

        def replace(layer: int, call: AttentionCall) -> Any:
            if layer not in shares:
                return None
            sequence = count.get(layer, 0)
            count[layer] = sequence + 1
            scores = self.scores[selector, layer][sequence]
            share, n = shares[layer]
            keep = np.rint(np.broadcast_to(share[n], len(scores)) * ratio * rivals)
            rank = np.argsort(np.argsort(-scores, axis=-1, kind="stable"), axis=-1)
            mask = np.broadcast_to(
                np.tril(np.ones((length, length), bool)), (len(scores), length, length)
            ).copy()
            dropped = np.zeros((len(scores), length), bool)
            dropped[:, SINKS : self.at] = rank >= keep[:, None]
            mask[:, self.at :] &= ~dropped[:, None]
            group = call.queries.shape[1] // len(scores)
            return call.keys, call.values, mx.array(np.repeat(mask, group, axis=0))[None]

        other = self.streaming.run(self.tokens, replace=replace)
        total = 0.0
        for b, p in enumerate(self.wanted):
            q = self._log(other[b : b + 1], b)
            total += mx.sum(mx.exp(p) * (p - q)).item()
        return total / (len(self.tokens) * (length - self.at))

    def _log(self, hidden: mx.array, b: int) -> mx.array:
        """Log probabilities of the positions that are judged."""
        late = self.tokens[b : b + 1, self.at :]
        logits = head(self.streaming, late, hidden[:, self.at :])
        return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def budget_losses(
    model: Calibrated, methods: Mapping[str, tuple[Budgets, ...]], ratios: tuple[float, ...]
) -> dict[tuple[str, str, float], tuple[float, float]]:
    """(method, selector, ratio) -> mean lost mass and relative output error on held-out text."""
    sums: dict[tuple[str, str, float], list[Array]] = {}
    shares = {
        name: {i: (b, n) for b in budgets for n, i in enumerate(b.layers)}
        for name, budgets in methods.items()
    }

    def hook(c: Captured) -> None:
        if c.layer not in model.mass:
            return
        heads = heads_of(c)
        for start, weights, _ in blocks(c, WINDOW):
            if start not in (320, 448):
                continue
            out = weights @ heads.values[:, None, : weights.shape[-1]]
            size = np.square(out).sum(axis=-1).mean(axis=(1, 2))
            some, values = weights[..., SINKS:start], heads.values[:, SINKS:start]
            selectors = {
                "oracle": some.mean(axis=(1, 2)),
                "qfilter": model.by_filter(heads, start)[:, SINKS:start],
                "moving": model.by_moving(heads, start)[:, SINKS:start],
            }
            kept = {
                name: np.rint(
                    np.stack([np.broadcast_to(b.at(r)[n], len(size)) * r for r in ratios])
                    * some.shape[-1]
                ).astype(np.int64)
                for name, (b, n) in ((m, by_layer[c.layer]) for m, by_layer in shares.items())
            }
            for selector, score in selectors.items():
                for h in range(len(score)):
                    one = slice(h, h + 1)
                    wanted = np.unique([k[:, h] for k in kept.values()])[::-1]
                    found = losses(some[one], values[one], out[one], score[one], wanted)
                    curve = {
                        b: (x, y) for b, x, y in zip(wanted, *np.array(found)[:, 0], strict=True)
                    }
                    for name, keep in kept.items():
                        for r, budget in zip(ratios, keep[:, h], strict=True):
                            lost, error = curve[budget]
                            sums.setdefault((name, selector, r), []).append(
                                np.array([lost, error / size[h]])
                            )

    model.streaming().run(model.heldout, hook)
    return {key: tuple(np.mean(x, axis=0).tolist()) for key, x in sums.items()}
