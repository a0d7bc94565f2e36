"""Resident memory while a model is calibrated, phase by phase, in a process of its own.

    python benchmarks/calibration_memory.py MODEL [--sequences 4] [--length 512] [--layers N]

Runs what the default recipe needs (capture and sensitivities) over the built-in text, with the
second moments of all linears' inputs in the same pass, each dropped as soon as it is handed out.
MODEL is a folder in the Hub's layout; random weights of a real model's shapes will do. With
`--layers` only the first few are run and nothing is written down. What is measured is the resident
set (VmHWM, which Linux can set back between phases): Python, libraries and all.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import save

from velox_pack.calibrators import center, qfilters, sensitivity, spectral
from velox_pack.calibrators.capture import LayerStatistics, capture
from velox_pack.calibrators.linear_inputs import InputMoment
from velox_pack.calibrators.stream import StreamingForward, pairs
from velox_pack.calibrators.text import load_text, sequences
from velox_pack.calibrators.trace import trace
from velox_pack.source import resolve

GOAL = 2.5e9  # bytes, for 4 x 512 tokens of a model of Qwen3-4B's shapes
WINDOW = 48  # exact tokens that sensitivities leave out


def peak_since_reset() -> int:
    """Largest resident set in bytes since the last call. Linux only."""
    status = Path("/proc/self/status").read_text()
    line = next(x for x in status.splitlines() if x.startswith("VmHWM"))
    Path("/proc/self/clear_refs").write_text("5")
    return 1024 * int(line.split()[1])


def calibrate(model: str, count: int, length: int) -> dict[str, Any]:
    """Run all phases in this process."""
    rows: list[dict[str, Any]] = []
    facts = {"moments": 0, "linears": 0, "widest_moment": 0}

    def phase(name: str, work: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = work()
        seconds = round(time.perf_counter() - started, 1)
        rows.append({"phase": name, "seconds": seconds, "peak": peak_since_reset()})
        print(rows[-1], file=sys.stderr, flush=True)
        return result

    def streaming() -> StreamingForward:
        skeleton = source.skeleton()
        wanted = {name for name, _ in pairs(skeleton)}  # a model cut short has more in its files
        return StreamingForward(
            skeleton, lambda: {n: a for n, a in source.weights().items() if n in wanted}
        )

    def note(moment: InputMoment) -> None:
        facts["moments"] += 1
        facts["linears"] += len(moment.paths)
        facts["widest_moment"] = max(facts["widest_moment"], len(moment.second))

    def fit(found: dict[int, LayerStatistics]) -> None:
        qfilters.fit(found)
        spectral.fit(found, "keys")
        center.fit(found, "values")

    source = resolve(model)
    tokens = phase(
        "text", lambda: sequences(source.tokenizer(), load_text(), count * length, length, seed=0)
    )
    traces = phase("trace", lambda: trace(source.skeleton()))
    statistics = phase(
        "forward: capture and input moments",
        lambda: capture(streaming(), tokens, traces, on_linear=note),
    )
    phase(
        "backward: sensitivities",
        lambda: sensitivity.measure(streaming(), tokens, traces, statistics, window=WINDOW),
    )
    phase("fit: filters, spectral keys, means", lambda: fit(statistics))
    facts |= {"tokens": tokens.size, "layers": len(traces)}
    return {**facts, "rows": rows, "peak": max(row["peak"] for row in rows)}


def shortened(model: str, layers: int, folder: str) -> str:
    """The same model with its first few layers, as a folder of links."""
    for file in Path(model).resolve().iterdir():
        if file.name != "config.json":
            (Path(folder) / file.name).symlink_to(file)
    config = json.loads((Path(model) / "config.json").read_text())
    config["num_hidden_layers"] = layers
    (Path(folder) / "config.json").write_text(json.dumps(config))
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--sequences", type=int, default=4)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        with tempfile.TemporaryDirectory() as folder:
            model = options.model
            if options.layers is not None:
                model = shortened(model, options.layers, folder)
            print(json.dumps(calibrate(model, options.sequences, options.length)))
        return
    child = subprocess.run(
        [sys.executable, __file__, *sys.argv[1:], "--child"], stdout=subprocess.PIPE, check=True
    )
    found = json.loads(child.stdout)
    rows = found.pop("rows")
    print(f"peak {found['peak'] / 1e9:.2f} GB, goal {GOAL / 1e9} GB")
    if options.layers is None:
        config = json.loads((Path(options.model) / "config.json").read_text())
        names = ("model_type", "hidden_size", "intermediate_size", "num_hidden_layers")
        shapes = {name: config.get(name) for name in names}
        print(save("calibration_memory", rows, model=shapes, goal=GOAL, **found))


if __name__ == "__main__":
    main()
