"""Measuring for calibrators_support.py: samples of one model, errors and KL of NumPy codes."""

import json
import pickle
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from calibrators_bench import (
    CALIBRATION,
    FLUSH,
    HELDOUT,
    LENGTH,
    SHARED_TOKENS,
    SINKS,
    WINDOW,
    Cost,
    measured,
)
from calibrators_codecs import InNumpy, rows_of, size_of
from mlx_lm.models.cache import make_prompt_cache

from velox_pack.attention import install
from velox_pack.caches.codecs.base import Codec
from velox_pack.caches.codecs.rope import BeforeRope, RopeTable
from velox_pack.caches.plan import LayerPlan
from velox_pack.calibrators import prediction, sinks
from velox_pack.calibrators.affine_rounding import (
    bits_per_element,
    interpolated,
    join,
    relative_error,
    rounded,
    split,
)
from velox_pack.calibrators.neighbours import LayerTokens, Neighbours
from velox_pack.calibrators.rotated_code import RotatedCode, norm_bits, range_of
from velox_pack.calibrators.stream import StreamingForward
from velox_pack.calibrators.text import load_text, sequences
from velox_pack.calibrators.trace import trace
from velox_pack.evaluation import Score
from velox_pack.manifests.artifact import Artifact
from velox_pack.onepass import OnePassCache
from velox_pack.source import data_folder, resolve

Array = np.ndarray
Through = Callable[[int, Array], Array]  # vectors [H, N, D] of a layer through a code
PARTS = ("keys", "values")
AXES = {"keys": "channel", "values": "token"}
FREE = Cost(0.0, 0)
WITH_SINKS = (
    "kivi 2",
    "kivi 3",
    "rotated 3",
    "kitty water 2 keys, rotated values",
    "kitty water 3 keys, rotated values",
)


def plain(x: Array, bits: int, axis: str) -> Array:
    """MLX's affine rounding in groups of 64, along either axis."""
    groups = mx.array(split(np.asarray(x, np.float64), axis, 64).astype(np.float32))
    codes, scales, biases = mx.quantize(groups, group_size=64, bits=bits)
    halves = [a.astype(mx.float16).astype(mx.float32) for a in (scales, biases)]
    out = np.array(mx.dequantize(codes, *halves, group_size=64, bits=bits))
    return join(out.astype(np.float64), axis, x.shape)


class Support:
    """A model: samples of tokens of both texts, rows of errors, and codes to take the KL of."""

    def __init__(self, name: str, path: str) -> None:
        self.name, self.source = name, resolve(path)
        self.traces = [t for t in trace(self.source.skeleton()) if t.covered]
        tokenizer = self.source.tokenizer()
        held = load_text(data_folder() / "text" / "heldout.txt")
        self.windows = sequences(tokenizer, held, HELDOUT, LENGTH, seed=0)
        ids = sequences(tokenizer, load_text(), CALIBRATION, LENGTH, 0)
        # A run that was stopped goes on from what these files have.
        self.partial = Path(tempfile.gettempdir()) / f"calibrators_support.{name}.jsonl"
        passes = self.partial.with_suffix(".pickle")
        if not passes.exists():
            seen = measured(lambda: self.collect(ids)), self.collect(self.windows)
            passes.write_bytes(pickle.dumps(seen))
        seen = pickle.loads(passes.read_bytes())
        ((self.tokens, self.masses), self.passed), (self.held, self.held_masses) = seen
        self.rows: list[dict[str, Any]] = []
        self.codes: list[tuple[str, float, bool, dict[str, Through], int, Cost]] = []
        self.curves = {p: self._curves(p) for p in PARTS}

    def collect(self, ids: Array) -> tuple[dict[int, LayerTokens], dict[int, sinks.LayerMass]]:
        tokens, masses = Neighbours(self.traces, ids.shape), sinks.Masses(self.traces)
        streaming = StreamingForward(self.source.skeleton(), self.source.weights)
        mx.eval(streaming.run(ids, lambda c: [tokens(c), masses(c)][-1]))
        return tokens.done(), masses.done()

    def _curves(self, part: str) -> dict[str, dict[float, float]]:
        """Errors of affine rounding per token, as KIVI has it, and of the rotated code."""

        def error(through: Through, before: bool = False) -> float:
            return self.mean_error(through, part, before)

        dim = self.dim(part)
        return {
            "affine": {
                bits_per_element(b): error(lambda i, x, b=b: plain(x, b, "token"))
                for b in (1, 2, 3, 4)
            },
            "kivi": {
                bits_per_element(b): error(lambda i, x, b=b: plain(x, b, AXES[part]))
                for b in (1, 2, 3, 4)
            },
            "rotated": {
                b + norm_bits(dim): error(rotated(self.tokens, b, part), True) for b in (1, 2, 3, 4)
            },
        }

    def dim(self, part: str) -> int:
        return int(next(iter(self.held.values())).part(part).shape[2])

    def elements(self, part: str) -> int:
        return sum(t.part(part).shape[0] * t.part(part).shape[2] for t in self.held.values())

    def mean_error(self, through: Through, part: str, before: bool) -> float:
        xs = {i: t.part(part, before_rope=before) for i, t in self.held.items()}
        return float(np.mean([relative_error(x, through(i, x)) for i, x in xs.items()]))

    def note(
        self,
        calibration: str,
        part: str,
        bits: float,
        error: float,
        fitted: tuple[Artifact, ...] = (),
        cost: Cost = FREE,
        **facts: Any,
    ) -> None:
        """Write down an error on held-out text beside what the baselines have at equal bits."""
        stored = size_of([a for a in fitted if getattr(a, "part", part) == part])
        whole = bits + 8 * stored / self.elements(part) / SHARED_TOKENS
        row = self._row(calibration, part, bits, whole, stored, cost)
        row |= {"measure": "relative squared error", "value": float(f"{error:.4g}")}
        self.rows.append(compared(row, self.curves[part]) | facts)
        print(self.rows[-1], file=sys.stderr, flush=True)

    def _row(
        self, calibration: str, part: str, bits: float, whole: float, stored: int, cost: Cost
    ) -> dict[str, Any]:
        return {
            "model": self.name,
            "calibration": calibration,
            "part": part,
            "bits": round(bits, 4),
            "bits_with_constants": round(whole, 4),
            "seconds": cost.seconds,
            "peak_mb": cost.peak_mb,
            "bytes_stored": stored,
        }

    def method(
        self,
        calibration: str,
        bits: float,
        before: bool,
        by_part: dict[str, Through],
        fitted: tuple[Artifact, ...] = (),
        cost: Cost = FREE,
        **facts: Any,
    ) -> None:
        """Errors of both parts now, KL of both together later."""
        for part, through in by_part.items():
            error = self.mean_error(through, part, before)
            self.note(calibration, part, bits, error, fitted, cost, **facts)
        self.codes.append((calibration, bits, before, by_part, size_of(fitted), cost))

    def kl(self, found: tuple[Any, ...]) -> None:
        """KL of all codes, and of KIVI with sinks found by `found` kept exactly."""
        model = self.source.skeleton()
        model.load_weights(list(self.source.weights().items()), strict=True)
        model.set_dtype(mx.float32)
        mx.eval(model.parameters())
        install(model)
        windows = [mx.array(w) for w in self.windows]
        exact = [self._logits(model, w, {}) for w in windows]
        self.called: dict[int, Array] = {}
        share = float(np.mean([a.protected[n] for a, n in rows_of(found).values()]))

        def exact_for(through: Through) -> Through:
            def kept(layer: int, x: Array) -> Array:
                mask = self.called[layer][None, : x.shape[1], None]
                return np.where(mask, x, through(layer, x))

            return kept

        for name, bits, before, by_part, stored, cost in list(self.codes):
            if name in WITH_SINKS:
                kept = {p: exact_for(t) for p, t in by_part.items()}
                at = bits * (1 - share) + 16 * share
                row = (f"{name}, sinks exact", at, before, kept, stored + size_of(found), cost)
                self.codes.append(row)
        lines = self.partial.read_text().splitlines() if self.partial.exists() else []
        known = {row["calibration"]: row for row in map(json.loads, lines)}
        rows = []
        for calibration, bits, before, by_part, stored, cost in self.codes:
            if calibration in known:
                rows.append(known[calibration])
                continue
            plans, score = self._plans(by_part, before), Score()
            for ids, reference in zip(windows, exact, strict=True):
                score.add(reference, self._logits(model, ids, plans, rows_of(found)), ids)
            whole = bits + 8 * stored / sum(map(self.elements, PARTS)) / SHARED_TOKENS
            row = self._row(calibration, "both", bits, whole, stored, cost)
            result = score.result()
            row |= {"measure": "kl", "value": float(f"{result['kl']:.4g}")}
            row |= {"standard_error": float(f"{result['kl_standard_error']:.2g}")}
            rows.append(row)
            with self.partial.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(row, file=sys.stderr, flush=True)
        curves = {
            name: {r["bits"]: r["value"] for r in rows if r["calibration"] in points}
            for name, points in {
                "affine": [f"affine {b}" for b in (2, 3, 4)],
                "kivi": [f"kivi {b}" for b in (2, 3, 4)],
                "rotated": [f"rotated {b}" for b in (1, 2, 3)],
            }.items()
        }
        self.rows += [compared(row, curves) for row in rows]

    def forget(self) -> None:
        """Remove what a stopped run would go on from."""
        for file in (self.partial, self.partial.with_suffix(".pickle")):
            file.unlink(missing_ok=True)

    def _plans(self, by_part: dict[str, Through], before: bool) -> dict[int, LayerPlan]:
        plans = {}
        for t in self.traces:
            keys: Codec
            keys, values = (InNumpy(lambda x, _, p=p, i=t.index: by_part[p](i, x)) for p in PARTS)
            if before and t.rope is not None:
                table = RopeTable(mx.array(t.rope.inv_freq), t.rope.traditional)
                keys = BeforeRope(keys, table)
            plans[t.index] = LayerPlan(keys, values, SINKS, WINDOW, FLUSH)
        return plans

    def _logits(
        self,
        model: Any,
        ids: mx.array,
        plans: dict[int, LayerPlan],
        found: Mapping[int, tuple[Any, int]] | None = None,
    ) -> mx.array:
        caches = make_prompt_cache(model)
        for t in self.traces:
            if t.index in plans:
                caches[t.cache_index] = Watched(plans[t.index], self.called, t.index, found or {})
        out = model(ids[None], cache=caches)[0].astype(mx.float32)
        mx.eval(out)
        return out


class Watched(OnePassCache):
    """Notes which of the coded tokens are sinks before they are coded."""

    def __init__(
        self, plan: LayerPlan, called: dict[int, Array], layer: int, found: Mapping[int, Any]
    ) -> None:
        super().__init__(plan)
        self.called, self.layer, self.found = called, layer, found

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        pair = [np.array(x[0])[:, SINKS:] for x in (keys, values)]
        self.called[self.layer] = sinks.is_sink(*self.found[self.layer], *pair)
        return super().update_and_fetch(keys, values)


def compared(row: dict[str, Any], curves: Mapping[str, dict[float, float]]) -> dict[str, Any]:
    """Add what baselines have at the same bits, and how many times the row's value that is."""
    for key, gain, at in (
        ("at_equal_bits", "gain", "bits"),
        ("at_equal_bits_with_constants", "gain_with_constants", "bits_with_constants"),
    ):
        here = {n: interpolated(c, max(row[at], min(c))) for n, c in curves.items()}
        row[key] = {n: float(f"{v:.4g}") for n, v in here.items()}
        row[gain] = {n: round(v / row["value"], 2) for n, v in here.items()}
    return row


def of(artifacts: tuple[Any, ...], code: Callable[[Any, int, Array], Array]) -> Through:
    rows = rows_of(artifacts)
    return lambda i, x: code(*rows[i], x)


def rotated(tokens: Mapping[int, LayerTokens], bits: int, part: str) -> Through:
    """The rotated Lloyd-Max code with the mean off."""
    kept = {}
    for i, t in tokens.items():
        x = t.part(part).astype(np.float64)
        mean = x.mean(axis=1, keepdims=True)
        kept[i] = mean, RotatedCode(x.shape[2], bits, range_of(x - mean))

    def through(layer: int, x: Array) -> Array:
        mean, code = kept[layer]
        out: Array = mean + code.decode(*code.encode(x - mean))
        return out

    return through


def relaxed(x: Array, bits: int, part: str, share: float) -> Array:
    return rounded(x, bits, AXES[part], relax=share)


def chain(artifacts: tuple[Any, ...]) -> dict[str, Through]:
    """Both parts of a predicted model: layers in order, keys before values."""
    rows = {p: rows_of([a for a in artifacts if a.part == p]) for p in PARTS}
    decoded: dict[tuple[int, str], Array] = {}

    def through(part: str, layer: int, x: Array) -> Array:
        a, n = rows[part][layer]
        sources = [None if k is None else decoded[k] for k in prediction.needs(a, n)]
        out = prediction.decode(a, n, *prediction.encode(a, n, x, sources), sources)
        decoded[layer, part] = out
        return out

    return {p: (lambda i, x, p=p: through(p, i, x)) for p in PARTS}
