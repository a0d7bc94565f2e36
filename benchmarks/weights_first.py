"""Packed weights against plain `mx.quantize`: bits per weight, output error, KL and perplexity.

    python benchmarks/weights_first.py NAME=MODEL_FOLDER ... --texts austen.txt jargon.txt

Every linear layer that velox-pack packs is replaced by its reconstruction, by each method in turn;
embeddings, norms and the output head stay exact. KL (nats, mean over positions, against the exact
model) and perplexity are over 1,024 tokens of each held-out text, from character 20,000 on (past
any front matter), in windows of 512.
"output error" is the mean over layers of |x (W - W')^T|^2 / |x W^T|^2 for x of the first text.
Writes weights_first.json beside this file.
"""

import argparse
import gc
import hashlib
import json
import platform
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.utils import load_model, load_tokenizer

from velox_pack.calibrators.codebooks import lloyd_max
from velox_pack.kernels import midpoints, quantize_levels, rotate, rotate_transpose
from velox_pack.reservoir.linear import ReservoirLinear
from velox_pack.reservoir.pack import pack_linear
from velox_pack.reservoir.rotations import make_rotations
from velox_pack.reservoir.select import Selection, select
from velox_pack.reservoir.spec import LinearSpec, packed_specs, specs_nbytes

WINDOW, WINDOWS, SEED = 512, 2, 0
SAMPLE_TOKENS = 256
SKIP_CHARACTERS = 20_000

# weight [out, in] float32 -> its reconstruction and the bytes that it is stored in
Method = Callable[[mx.array], tuple[mx.array, int]]


def plain(bits: int, group: int) -> Method:
    def method(weight: mx.array) -> tuple[mx.array, int]:
        packed = mx.quantize(weight.astype(mx.bfloat16), group_size=group, bits=bits)
        size = sum(a.nbytes for a in packed)
        codes, scales, biases = packed
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
        return mx.dequantize(codes, scales, biases, group_size=group, bits=bits), size

    return method


def packed(encoding: str, bits: int, group: int | None, selection: Selection, turn: bool) -> Method:
    rotations = make_rotations(selection.widths, SEED)
    levels = mx.array(lloyd_max(bits)[0].astype(np.float32))

    def method(weight: mx.array) -> tuple[mx.array, int]:
        out, width = weight.shape
        name = f"w{width}" if turn else None
        spec = LinearSpec(encoding, bits, group, name, width, out, False)  # type: ignore[arg-type]
        arrays = pack_linear("x", weight.astype(mx.bfloat16), None, spec, rotations, levels)
        layer = ReservoirLinear(spec, rotations[name] if name else None)
        layer.load_weights([(key[2:], a) for key, a in arrays.items()])
        size = sum(a.nbytes for a in arrays.values())
        assert size == specs_nbytes(packed_specs("x", out, width, None, encoding, bits, group))
        return layer.decode(), size

    return method


def row_rms(bits: int, selection: Selection) -> Method:
    """Ablation: Lloyd codes whose scale is the row's root mean square, not a fitted one."""
    rotations = make_rotations(selection.widths, SEED)
    levels = mx.array(lloyd_max(bits)[0].astype(np.float32))

    def method(weight: mx.array) -> tuple[mx.array, int]:
        rotation = rotations[f"w{weight.shape[1]}"]
        rows = rotate(weight, rotation)
        scale = mx.sqrt(mx.mean(mx.square(rows), axis=-1, keepdims=True))
        values = levels[quantize_levels(rows / scale, midpoints(levels))] * scale
        return rotate_transpose(values, rotation), weight.size * bits // 8 + 2 * len(weight)

    return method


def methods(selection: Selection) -> dict[str, Method]:
    table: dict[str, Method] = {}
    for bits in (4, 3, 2):
        table[f"lloyd {bits}"] = packed("lloyd", bits, None, selection, True)
    for bits in (4, 3):
        for group in (64, 32):
            table[f"affine {bits}/{group}"] = packed("affine", bits, group, selection, True)
            table[f"mx.quantize {bits}/{group}"] = plain(bits, group)
    for bits in (4, 3):
        table[f"ablation: lloyd {bits}, row RMS as scale"] = row_rms(bits, selection)
        table[f"ablation: affine {bits}/64, no rotation"] = packed(
            "affine", bits, 64, selection, False
        )
    return table


class Spy(nn.Module):
    """Hands on to a linear layer and keeps what went in."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def __call__(self, x: mx.array) -> mx.array:
        self.seen = x.reshape(-1, x.shape[-1])[:SAMPLE_TOKENS]
        return self.inner(x)


def log_probabilities(model: nn.Module, windows: list[mx.array]) -> list[mx.array]:
    found = []
    for window in windows:
        logits = model(window[None])[0]
        found.append(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
        mx.eval(found[-1])
    return found


def score(model: nn.Module, windows: list[mx.array], exact: list[mx.array]) -> dict[str, float]:
    own = log_probabilities(model, windows)
    kl = [mx.sum(mx.exp(e) * (e - o), axis=-1) for e, o in zip(exact, own, strict=True)]
    agree = [mx.argmax(e, -1) == mx.argmax(o, -1) for e, o in zip(exact, own, strict=True)]
    return {
        "kl": round(float(mx.mean(mx.concatenate(kl)).item()), 5),
        "perplexity": round(perplexity(own, windows), 3),
        "top1": round(float(mx.mean(mx.concatenate(agree)).item()), 4),
    }


def perplexity(found: list[mx.array], windows: list[mx.array]) -> float:
    losses = [
        -mx.take_along_axis(f[:-1], w[1:, None], axis=-1)
        for f, w in zip(found, windows, strict=True)
    ]
    return float(mx.exp(mx.mean(mx.concatenate(losses))).item())


def module_at(model: nn.Module, path: str) -> tuple[nn.Module, str]:
    parent, _, name = path.rpartition(".")
    return dict(model.named_modules())[parent], name


def measure(folder: Path, texts: list[Path]) -> dict[str, object]:
    model, _ = load_model(folder, lazy=True)
    tokenizer = load_tokenizer(folder)
    selection = select(model, "lloyd", 4)
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    windows = {}
    for text in texts:
        tokens = tokenizer.encode(text.read_text()[SKIP_CHARACTERS:][: 12 * WINDOW * WINDOWS])
        windows[text.stem] = [
            mx.array(tokens[i * WINDOW : (i + 1) * WINDOW]) for i in range(WINDOWS)
        ]
    exact = {name: log_probabilities(model, w) for name, w in windows.items()}
    layers = {path: module_at(model, path) for path in selection.packed}
    linears = {path: getattr(parent, name) for path, (parent, name) in layers.items()}
    weights = {path: linear.weight for path, linear in linears.items()}

    for path, (parent, name) in layers.items():
        setattr(parent, name, Spy(linears[path]))
    mx.eval(model(windows[texts[0].stem][0][None, :SAMPLE_TOKENS]))
    inputs = {path: getattr(parent, name).seen for path, (parent, name) in layers.items()}
    mx.eval(inputs)
    for path, (parent, name) in layers.items():
        setattr(parent, name, linears[path])

    count = sum(w.size for w in weights.values())
    result: dict[str, object] = {
        "coverage": selection.coverage(),
        "weights": count,
        "exact": {n: {"perplexity": round(perplexity(exact[n], windows[n]), 3)} for n in exact},
    }
    rows: dict[str, object] = {}
    for label, method in methods(selection).items():
        started = time.perf_counter()
        stored, errors = 0, []
        for path, weight in weights.items():
            rebuilt, size = method(weight)
            x = inputs[path]
            error = mx.sum(mx.square(x @ (weight - rebuilt).T)) / mx.sum(mx.square(x @ weight.T))
            linears[path].weight = rebuilt
            mx.eval(rebuilt, error)
            errors.append(float(error.item()))
            stored += size
        seconds = time.perf_counter() - started
        row: dict[str, object] = {
            "bits": round(8 * stored / count, 4),
            "output_error": round(float(np.mean(errors)), 6),
            "pack_seconds": round(seconds, 1),
        }
        for name, parts in windows.items():
            row[name] = score(model, parts, exact[name])
        rows[label] = row
        print(f"{folder.name} {label}: {row}", flush=True)
        for path, weight in weights.items():
            linears[path].weight = weight
        gc.collect()
    result["methods"] = rows
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--texts", nargs="+", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    options = parser.parse_args()
    report: dict[str, object] = {
        "device": str(mx.default_device()),
        "machine": f"{platform.system()} {platform.machine()}",
        "versions": {name: version(name) for name in ("mlx", "mlx-lm", "numpy")},
        "tokens": WINDOW * WINDOWS,
        "window": WINDOW,
        "skipped_characters": SKIP_CHARACTERS,
        "seed": SEED,
        "texts": {t.stem: hashlib.sha256(t.read_bytes()).hexdigest() for t in options.texts},
        "models": {},
    }
    for model in options.models:
        name, _, folder = model.partition("=")
        report["models"][name] = measure(Path(folder), options.texts)  # type: ignore[index]
        options.out.write_text(json.dumps(report, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
