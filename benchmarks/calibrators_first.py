"""What the first calibrations cost and gain: `python benchmarks/calibrators_first.py NAME=PATH ...`

Each model is calibrated on the built-in calibration text in a process of its own (so that the peak
of memory is its own) and judged on the built-in held-out text. Writes calibrators_first.json.

mse        error of held-out keys before RoPE and of values, relative to |x - mean|^2, at equal bits
           per coordinate (means off, norm per token, the first 4 tokens left out)
kl         nats per token between exact and reconstructed keys and values, all tokens but the first
           4 of each sequence replaced in one pass: for comparing codes with one another only
qfilters   Spearman correlation of scores with the true mean attention a key receives from later
           queries, averaged over KV heads
"""

import json
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from scipy.stats import spearmanr

from velox_pack.calibrators import qfilters, ratequant, sensitivity, spectral, waterfill
from velox_pack.calibrators.capture import LayerStatistics, capture
from velox_pack.calibrators.codebooks import lloyd_max
from velox_pack.calibrators.hooks import AttentionCall
from velox_pack.calibrators.stream import Captured, StreamingForward
from velox_pack.calibrators.text import load_text, sequences
from velox_pack.calibrators.trace import LayerTrace, trace
from velox_pack.kernels import apply_rope, make_rotation, rope_angles, rotate
from velox_pack.manifests.artifacts import Spectral
from velox_pack.source import data_folder, resolve

Array = np.ndarray
SKIP, CALIBRATION, HELDOUT, LENGTH = 4, 4096, 1024, 512
RESULTS = Path(__file__).with_suffix(".json")


class Code:
    """Mean off, norm per token, rotation, Lloyd-Max levels by coordinate: encode and decode."""

    def __init__(self, mean: Array, basis: Array, variance: Array) -> None:
        self.mean, self.basis = mean[:, None, :].astype(np.float32), basis.astype(np.float32)
        self.variance = variance / variance.sum(axis=-1, keepdims=True)

    def __call__(self, x: Array, bits: float) -> Array:
        widths, _ = waterfill.widths(self.variance, bits)
        centred = x - self.mean
        norm = np.linalg.norm(centred, axis=-1, keepdims=True)
        scale = np.sqrt(self.variance)[:, None, :] + 1e-12
        y = (centred / norm) @ self.basis / scale
        decoded = np.zeros_like(y)
        for width in set(widths.tolist()) - {0}:
            at = widths == width
            levels = lloyd_max(width)[0]
            codes = np.searchsorted((levels[1:] + levels[:-1]) / 2, y[..., at])
            decoded[..., at] = levels[codes]
        back = (decoded * scale) @ np.swapaxes(self.basis, -1, -2)
        return (back * norm + self.mean).astype(np.float32)


def hadamard_code(layer: LayerStatistics, part: str) -> Code:
    moments, _ = layer.part(part)
    heads, d = moments.total.shape
    matrix = np.array(rotate(mx.eye(d), make_rotation(d, 0)))
    return Code(moments.mean, np.broadcast_to(matrix, (heads, d, d)), np.ones((heads, d)))


def spectral_codes(fitted: tuple[Spectral, ...]) -> dict[int, Code]:
    return {
        i: Code(a.mean[n], a.basis[n], a.variance[n])
        for a in fitted
        for n, i in enumerate(a.layers)
    }


class Judge:
    """Next-token log probabilities of the held-out text with keys and values replaced."""

    def __init__(self, streaming: StreamingForward, tokens: Array, traces: list[LayerTrace]):
        self.streaming, self.tokens = streaming, tokens
        self.traces = {t.index: t for t in traces}
        self.exact = self._hidden(None)

    def _hidden(self, change: Callable[[int, str, Array], Array] | None) -> mx.array:
        def replace(layer: int, call: AttentionCall) -> tuple[mx.array, mx.array] | None:
            t = self.traces[layer]
            if change is None or not t.covered:
                return None
            before = call.keys if t.rope is None or call.rope is None else call.rope.before
            keys, values = np.array(before[0]), np.array(call.values[0])
            keys[:, SKIP:] = change(layer, "keys", keys)[:, SKIP:]
            values[:, SKIP:] = change(layer, "values", values)[:, SKIP:]
            new = mx.array(keys)[None]
            if t.rope is not None:
                inv = mx.array(t.rope.inv_freq)
                tables = rope_angles(inv, mx.arange(keys.shape[1]))
                new = apply_rope(new, *tables, t.rope.traditional)
            return new, mx.array(values)[None]

        return self.streaming.run(self.tokens, replace=replace)

    def kl(self, change: Callable[[int, str, Array], Array]) -> float:
        other = self._hidden(change)
        total = 0.0
        for b in range(len(self.tokens)):
            p, q = (self._log_probabilities(h[b : b + 1], b) for h in (self.exact, other))
            total += mx.sum(mx.exp(p) * (p - q)).item()
        return total / self.tokens.size

    def _log_probabilities(self, hidden: mx.array, b: int) -> mx.array:
        logits = sensitivity.head(self.streaming, self.tokens[b : b + 1], hidden)
        return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def relative_error(x: Array, decoded: Array, mean: Array) -> float:
    x, decoded = x[:, SKIP:], decoded[:, SKIP:]
    size = np.square(x - mean[:, None, :]).sum(axis=(1, 2))
    return float(np.mean(np.square(x - decoded).sum(axis=(1, 2)) / size))


def mean_attention(c: Captured) -> Array:
    """[Hkv, N]: what key j gets from queries after it, averaged over them and over the group."""
    queries, keys = np.array(c.queries), np.array(c.keys)
    n, d = queries.shape[1:]
    grouped = queries.reshape(keys.shape[0], -1, n, d)
    scores = grouped @ np.swapaxes(keys, 1, 2)[:, None] * c.scale
    allowed = np.tril(np.ones((n, n), bool))
    if isinstance(c.mask, mx.array) and c.mask.dtype == mx.bool_:
        allowed = np.array(c.mask)
    scores = np.where(allowed, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    later = np.tril(allowed, -1)
    seen = np.maximum(later.sum(axis=0), 1)
    return np.where(later, weights, 0).sum(axis=2).mean(axis=1) / seen


def measure(name: str, path: str) -> dict[str, Any]:
    """All figures of one model."""
    seconds: dict[str, float] = {}

    def timed(what: str, call: Callable[[], Any]) -> Any:
        start = time.perf_counter()
        result = call()
        seconds[what] = round(time.perf_counter() - start, 3)
        return result

    source = resolve(path)
    traces = timed("trace", lambda: trace(source.skeleton()))
    tokenizer = source.tokenizer()
    tokens = sequences(tokenizer, load_text(), CALIBRATION, LENGTH, 0)
    streaming = StreamingForward(source.skeleton(), source.weights)
    statistics = timed("capture", lambda: capture(streaming, tokens, traces))
    bases = timed("spectral", lambda: {p: spectral.fit(statistics, p) for p in ("keys", "values")})
    filters = timed("qfilters", lambda: qfilters.fit(statistics))
    found = timed("sensitivity", lambda: sensitivity.measure(streaming, tokens, traces, statistics))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    heldout = load_text(data_folder() / "text" / "heldout.txt")
    held = sequences(tokenizer, heldout, HELDOUT, LENGTH, 0)
    spectra = {part: spectral_codes(fitted) for part, fitted in bases.items()}
    plain = {p: {i: hadamard_code(s, p) for i, s in statistics.items()} for p in spectra}
    directions = {i: f.filters[n] for f in filters for n, i in enumerate(f.layers)}
    correlations: dict[str, list[float]] = {}
    errors: dict[str, list[float]] = {}

    def hook(c: Captured) -> None:
        if c.layer not in statistics:
            return
        layer = statistics[c.layer]
        parts = {"keys": np.array(c.keys if c.keys_before is None else c.keys_before)}
        parts["values"] = np.array(c.values)
        for part, x in parts.items():
            for bits in (2.0, 3.0, 4.0):
                for kind, codes in (("hadamard", plain), ("spectral", spectra)):
                    decoded = codes[part][c.layer](x, bits)
                    key = f"{part} {kind} {bits:g}"
                    mean = layer.part(part)[0].mean
                    errors.setdefault(key, []).append(relative_error(x, decoded, mean))
        truth, keys = mean_attention(c)[:, SKIP:-32], np.array(c.keys)[:, SKIP:-32]
        mean_query = layer.queries.mean.reshape(len(keys), -1, keys.shape[-1]).mean(axis=1)
        key_axis = np.linalg.eigh(layer.keys.second)[1][:, :, -1]
        key_axis *= np.sign(np.einsum("hd,hd->h", layer.keys.total, key_axis))[:, None]
        scores = {
            "qfilter": np.einsum("hnd,hd->hn", keys, directions[c.layer]),
            "mean query": np.einsum("hnd,hd->hn", keys, mean_query),
            "minus key norm": -np.linalg.norm(keys, axis=-1),
            "svd of keys": np.einsum("hnd,hd->hn", keys, key_axis),
        }
        for kind, score in scores.items():
            for h in range(len(keys)):
                rho = spearmanr(score[h], truth[h]).statistic
                correlations.setdefault(kind, []).append(float(rho))

    streaming.run(held, hook)
    judge = Judge(streaming, held, traces)
    dims = {t.index: (t.k_dim, t.v_dim) for t in traces if t.covered}
    kls: dict[str, float] = {}
    gains: dict[str, Any] = {}
    for bits in (2.5, 3.0, 4.0):
        kls[f"hadamard {bits:g}"] = judge.kl(lambda i, p, x: plain[p][i](x, bits))  # noqa: B023
        mixed = {"keys": spectra["keys"], "values": plain["values"]}
        kls[f"spectral keys {bits:g}"] = judge.kl(lambda i, p, x: mixed[p][i](x, bits))  # noqa: B023
        curves = {
            p: {
                i: ratequant.lloyd_distortion(mixed[p][i].variance, getattr(found, p)[i])
                for i in statistics
            }
            for p in mixed
        }
        (given,) = ratequant.allocate(found, curves["keys"], curves["values"], bits, dims)
        place = {i: n for n, i in enumerate(given.layers)}
        kls[f"spectral keys, ratequant {bits:g}"] = judge.kl(
            lambda i, p, x: mixed[p][i](x, float(getattr(given, p)[place[i]]))  # noqa: B023
        )
        gains[f"{bits:g}"] = {
            "achieved": given.achieved,
            "keys": given.keys.tolist(),
            "values": given.values.tolist(),
            "predicted_kl": given.details["predicted_kl"],
            "predicted_kl_uniform": given.details["predicted_kl_uniform"],
        }
    per_layer = np.array([[found.keys[i].sum(), found.values[i].sum()] for i in found.keys])
    return {
        "covered": f"{sum(t.covered for t in traces)} of {len(traces)} layers",
        "seconds": seconds,
        "calibration_peak_rss_mb": round(peak / 1e6),
        "mse": {k: round(float(np.mean(v)), 5) for k, v in errors.items()},
        "kl": {k: round(v, 5) for k, v in kls.items()},
        "ratequant": gains,
        "sensitivity_ratio": round(float(per_layer.max() / per_layer.min()), 1),
        "sensitivity_keys_to_values": round(float(np.divide(*per_layer.sum(axis=0))), 2),
        "qfilters": {k: round(float(np.mean(v)), 3) for k, v in correlations.items()},
        "qfilters_positive": round(float(np.mean(np.array(correlations["qfilter"]) > 0)), 3),
    }


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1] == "--one":
        name, path = sys.argv[2].split("=")
        print(json.dumps(measure(name, path)))
        return
    models = [a.split("=") for a in sys.argv[1:]] or [["demo", "demo"]]
    results: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results["setting"] = {
        "tokens": f"{CALIBRATION} for calibration, {HELDOUT} held out, sequences of {LENGTH}",
        "device": f"{platform.machine()} CPU, float32",
        "versions": {p: version(p) for p in ("mlx", "mlx-lm", "numpy", "scipy")},
    }
    for name, path in models:
        command = [sys.executable, __file__, "--one", f"{name}={path}"]
        out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        results[name] = json.loads(out.splitlines()[-1])
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
