"""Seconds to have a bundle's weights and artifacts in memory, against mx.load of the same files.

    python benchmarks/load_time.py BUNDLE [BUNDLE ...]

Each run is a fresh process; the page cache is warm; imports and the tokenizer are timed apart.
The two ways alternate, `RUNS` times each; the first of each is dropped.
"""

import json
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from common import save

RUNS = 8

OURS = """
import sys, time, json
start = time.perf_counter()
import mlx.core as mx
from velox_pack.loader import load_model
from velox_pack.manifests.bundle import open_bundle
imported = time.perf_counter()
bundle = open_bundle(sys.argv[1])
model, config = load_model(bundle)
done = time.perf_counter()
from mlx_lm.utils import load_tokenizer
load_tokenizer(bundle.path)
print(json.dumps([imported - start, done - imported, time.perf_counter() - done]))
"""
PLAIN = """
import sys, time, json
from pathlib import Path
start = time.perf_counter()
import mlx.core as mx
import mlx_lm.utils
imported = time.perf_counter()
arrays = {}
for file in sorted(Path(sys.argv[1]).glob("model*.safetensors")):
    arrays.update(mx.load(str(file)))
mx.eval(arrays)
done = time.perf_counter()
print(json.dumps([imported - start, done - imported, 0.0]))
"""


def run(program: str, bundle: Path) -> list[float]:
    done = subprocess.run(
        [sys.executable, "-c", program, str(bundle)], capture_output=True, text=True, check=True
    )
    found: list[float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def measure(bundle: Path) -> dict[str, Any]:
    times: dict[str, list[list[float]]] = {"velox": [], "mx.load": []}
    for _ in range(RUNS + 1):
        times["velox"].append(run(OURS, bundle))
        times["mx.load"].append(run(PLAIN, bundle))
    loads = {k: [t[1] for t in v[1:]] for k, v in times.items()}
    files = sorted(bundle.glob("model*.safetensors"))
    row: dict[str, Any] = {
        "bundle": bundle.name,
        "file_bytes": sum(f.stat().st_size for f in files),
        "import_seconds": median(t[0] for t in times["velox"][1:]),
        "tokenizer_seconds": median(t[2] for t in times["velox"][1:]),
        "ratio": median(loads["velox"]) / median(loads["mx.load"]),
    }
    for name, seconds in loads.items():
        row[name] = {
            "median_seconds": median(seconds),
            "least": min(seconds),
            "most": max(seconds),
        }
    print(json.dumps(row))
    return row


if __name__ == "__main__":
    print(save("load_time", [measure(Path(b)) for b in sys.argv[1:]], runs=RUNS))
