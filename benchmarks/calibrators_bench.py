"""One model in the benchmark of calibrations: what passes show, what fits cost, what codes lose."""

import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import calibrators_codecs as codecs
import mlx.core as mx
import numpy as np
from calibrators_codecs import Make
from mlx_lm.models.cache import make_prompt_cache

from velox_pack.attention import install
from velox_pack.caches.codecs.base import Codec
from velox_pack.caches.codecs.exact import Exact
from velox_pack.caches.codecs.rope import BeforeRope, RopeTable
from velox_pack.caches.plan import LayerPlan
from velox_pack.calibrators import joint, sensitivity
from velox_pack.calibrators.capture import capture
from velox_pack.calibrators.stream import StreamingForward
from velox_pack.calibrators.text import load_text, sequences
from velox_pack.calibrators.trace import LayerTrace, trace
from velox_pack.evaluation import Score
from velox_pack.manifests.artifact import Artifact
from velox_pack.onepass import OnePassCache
from velox_pack.source import data_folder, resolve

Array = np.ndarray
T = TypeVar("T")
PARTS = ("keys", "values")
SINKS, WINDOW, FLUSH = 4, 24, 8
CALIBRATION, GRADIENTS, HELDOUT, LENGTH = 4096, 2048, 1024, 512
SHARED_TOKENS = 8 * 2048  # what constants are counted against
SEEN = WINDOW + FLUSH // 2  # how far back a query sees exactly, on average


@dataclass(frozen=True)
class Cost:
    seconds: float
    peak_mb: int


def measured(call: Callable[[], T]) -> tuple[T, Cost]:
    """Time, and the largest resident set of the process meanwhile (or so far, not on Linux)."""
    reset, status = Path("/proc/self/clear_refs"), Path("/proc/self/status")
    if reset.exists():
        reset.write_text("5")
    start = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    if reset.exists():
        line = next(n for n in status.read_text().splitlines() if n.startswith("VmHWM"))
        peak = int(line.split()[1]) // 1024
    return result, Cost(round(seconds, 2), peak)


@dataclass
class Method:
    """One way to code keys, values or both, and what its calibration cost.

    `bits` are those of a coded number, norms, ranges and outliers included. `needs` are passes
    over the text besides the capture; `against` is another calibration to compare with.
    """

    calibration: str
    part: str
    bits: float | Callable[[], float]
    keys: Make | None
    values: Make | None
    artifacts: Sequence[Artifact] = ()
    cost: Cost | None = None
    needs: tuple[str, ...] = ()
    against: str | None = None
    after_rope: bool = False


@dataclass
class Bench:
    """A model, its statistics, and the methods to be judged once the whole model is in memory."""

    name: str
    path: str
    passes: dict[str, Cost] = field(default_factory=dict)
    methods: list[Method] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.source = resolve(self.path)
        self.traces: list[LayerTrace] = [t for t in trace(self.source.skeleton()) if t.covered]
        self.tokens = sequences(self.source.tokenizer(), load_text(), CALIBRATION, LENGTH, 0)
        self.few = self.tokens[: GRADIENTS // LENGTH]
        self.together = {
            "group": joint.Collector(self.traces),
            "head": joint.Collector(self.traces, 1),
        }
        self.statistics, self.passes["capture"] = measured(
            lambda: capture(
                self.streaming(), self.tokens, self.traces, also=list(self.together.values())
            )
        )

    def streaming(self) -> StreamingForward:
        return StreamingForward(self.source.skeleton(), self.source.weights)

    @cached_property
    def steep(self) -> sensitivity.Sensitivity:
        found, self.passes["sensitivity"] = measured(
            lambda: sensitivity.measure(
                self.streaming(), self.few, self.traces, self.statistics, window=SEEN
            )
        )
        return found

    def dim(self, part: str) -> int:
        return self.traces[0].k_dim if part == "keys" else self.traces[0].v_dim

    def elements(self, part: str) -> int:
        """Elements of one token's keys or values in all layers."""
        parts = PARTS if part == "both" else (part,)
        return sum(t.kv_heads * getattr(t, f"{p[0]}_dim") for t in self.traces for p in parts)

    def norm_bits(self, part: str, heads: int = 1) -> float:
        """Bits for each element that one byte for `heads` heads costs."""
        parts = PARTS if part == "both" else (part,)
        return float(np.mean([8 / (heads * self.dim(p)) for p in parts]))

    def add(self, *args: Any, **options: Any) -> None:
        """A method, to be judged."""
        self.methods.append(Method(*args, **options))

    def add_baselines(self) -> None:
        for part in (*PARTS, "both"):
            own = [p if part in (p, "both") else None for p in PARTS]
            most = 4 if part == "both" else 3  # single parts are coded at 1 and 2 bits only
            for bits in range(2, most + 1):
                pair = [p and codecs.affine(bits, self.dim(p)) for p in own]
                self.add("affine", part, bits + 0.5, *pair, after_rope=True)
            for bits in range(1, most + 1):
                pair = [p and codecs.rotated(self.statistics, p, bits) for p in own]
                self.add("rotated", part, bits + self.norm_bits(part), *pair)

    def rows(self) -> Iterator[list[dict[str, Any]]]:
        """Judge all methods on held-out text; after each one, all rows that there are."""
        model = self.source.skeleton()
        model.load_weights(list(self.source.weights().items()), strict=True)
        model.set_dtype(mx.float32)
        mx.eval(model.parameters())
        install(model)
        text = load_text(data_folder() / "text" / "heldout.txt")
        held = sequences(self.source.tokenizer(), text, HELDOUT, LENGTH, seed=0)
        windows = [mx.array(w) for w in held]
        exact = [self._logits(model, w, {}) for w in windows]
        rows = []
        for method in self.methods:
            score = Score()
            plans = self._plans(method)
            for ids, reference in zip(windows, exact, strict=True):
                score.add(reference, self._logits(model, ids, plans), ids)
            rows.append(self._row(method, score.result()))
            print(rows[-1], file=sys.stderr, flush=True)
            yield compared(rows, {m.calibration: m.against for m in self.methods if m.against})

    def _row(self, method: Method, found: dict[str, float]) -> dict[str, Any]:
        bits = method.bits() if callable(method.bits) else method.bits
        stored = codecs.size_of(method.artifacts)
        constants = 8 * stored / self.elements(method.part) / SHARED_TOKENS
        cost = method.cost or Cost(0.0, 0)
        return {
            "model": self.name,
            "calibration": method.calibration,
            "part": method.part,
            "bits": round(bits, 4),
            "bits_with_constants": round(bits + constants, 4),
            "seconds": cost.seconds,
            "peak_mb": cost.peak_mb,
            "passes": list(method.needs),
            "bytes_stored": stored,
            "measure": "kl",
            "value": float(f"{found['kl']:.4g}"),
            "standard_error": float(f"{found['kl_standard_error']:.2g}"),
        }

    def _plans(self, method: Method) -> dict[int, LayerPlan]:
        plans = {}
        for t in self.traces:
            keys: Codec = Exact() if method.keys is None else method.keys(t.index)
            values: Codec = Exact() if method.values is None else method.values(t.index)
            if t.rope is not None and method.keys is not None and not method.after_rope:
                table = RopeTable(mx.array(t.rope.inv_freq), t.rope.traditional)
                keys = BeforeRope(keys, table)
            plans[t.index] = LayerPlan(keys, values, SINKS, WINDOW, FLUSH)
        return plans

    def _logits(self, model: Any, ids: mx.array, plans: dict[int, LayerPlan]) -> mx.array:
        caches = make_prompt_cache(model)
        for t in self.traces:
            if t.index in plans:
                caches[t.cache_index] = OnePassCache(plans[t.index])
        out = model(ids[None], cache=caches)[0].astype(mx.float32)
        mx.eval(out)
        return out


def compared(rows: list[dict[str, Any]], against: dict[str, str]) -> list[dict[str, Any]]:
    """Add what the baselines lose at equal bits, and how many times that is what the row loses.

    Between a baseline's points the logarithm of KL is interpolated; below its fewest bits it
    counts as it is there, which flatters it.
    """
    known = {(row["calibration"], row["part"]) for row in rows}
    for row in rows:
        names = ["affine", "rotated", *filter(None, [against.get(row["calibration"])])]
        names = [n for n in names if (n, row["part"]) in known]
        if row["calibration"] in names:
            continue
        for key, gain, bits in (
            ("at_equal_bits", "gain", "bits"),
            ("at_equal_bits_with_constants", "gain_with_constants", "bits_with_constants"),
        ):
            row[key] = {n: _interpolated(rows, n, row, bits) for n in names}
            row[gain] = {n: round(v / row["value"], 2) for n, v in row[key].items()}
    return rows


def _interpolated(rows: list[dict[str, Any]], name: str, row: dict[str, Any], bits: str) -> float:
    own = [r for r in rows if (r["calibration"], r["part"]) == (name, row["part"])]
    points = sorted((r[bits], np.log(r["value"])) for r in own)
    x, y = zip(*points, strict=True)
    return float(f"{np.exp(np.interp(row[bits], x, y)):.4g}")
