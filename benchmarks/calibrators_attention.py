"""Scores of keys and budgets from true attention: what predicts it, and what budgets save.

    python benchmarks/calibrators_attention.py NAME=PATH[=WINDOWS FOR KL] ...

Each model is calibrated on 4,096 tokens of the built-in text (in a process of its own, for its peak
of memory) and judged on windows of 512 tokens of the built-in held-out text, keys after the first 4
only. Sliding layers are left out: they have a window of their own. Writes
calibrators_attention.json.

scores   `spearman`: rank correlation, by head, with the mean attention a key gets from all later
         queries (scores that move with the position stand in the middle); `spearman_next`: with the
         attention that keys older than 32 tokens get from the next 64 queries, seen from there;
         `kept_*` the share of that mass in the best quarter, eighth, sixteenth of the keys;
         `error_*` the squared error of a head's output, relative to its size, with only those kept.
budgets  at an equal total of a quarter, an eighth, a sixteenth of the keys: mean attention lost,
         mean relative error of a head's output, for three ways to choose keys: an oracle that knows
         the coming mass, Q-Filters, and the moving fitted filter; at an eighth also the KL of the
         model's predictions after one eviction at position 320 of each window (192 positions
         judged).
"""

import json
import resource
import subprocess
import sys
from typing import Any

import numpy as np
from attention_bench import CALIBRATION, LENGTH, Calibrated, Evicted, HeldOut, budget_losses
from common import HERE, save

from velox_pack.calibrators import budgets, filter_report, squeeze
from velox_pack.calibrators.budget_shares import shapes_of
from velox_pack.manifests.artifacts_attention import Budgets

WINDOWS = 2
RATIOS = (1 / 4, 1 / 8, 1 / 16)
KL_AT = 1 / 8
SELECTORS = ("oracle", "qfilter", "moving")


def measure(name: str, path: str, windows: int) -> list[dict[str, Any]]:
    model = Calibrated(path, WINDOWS)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    reports = model.timed(
        "filter report", lambda: filter_report.fit(model.qfilters, model.statistics, model.mass)
    )
    shapes = shapes_of(model.traces)
    change = {i: 1 - x for i, x in model.change.items()}

    def made() -> dict[str, tuple[Budgets, ...]]:
        methods = {
            "uniform": budgets.uniform(shapes),
            "pyramid, beta 20": budgets.pyramid(shapes, slope=0.95),
            "pyramid, measured slope": budgets.pyramid(shapes, model.mass),
            "squeeze": squeeze.fit(model.change, shapes),
            "ada": budgets.ada(shapes, model.mass),
        }
        for s in SELECTORS:
            for loss in ("lost", "error"):
                found = budgets.measured(shapes, model.selected, selector=s, loss=loss)
                methods[f"measured {loss}, {s}"] = found
            weighted = budgets.measured(shapes, model.selected, selector=s, weights=change)
            methods[f"measured error weighted, {s}"] = weighted
        return methods

    methods = model.timed("budgets", made)
    stored = {
        "q-filters": model.qfilters,
        "filter report": reports,
        "fitted filter": model.fitted["moving"],
        "expected attention": model.weighted,
        "budgets": methods["ada"],
    }
    rows: list[dict[str, Any]] = [
        {
            "model": name,
            "table": "costs",
            "layers": f"{len(model.traces)} of {len(model.all_traces)}",
            "seconds": {k: round(v, 3) for k, v in model.seconds.items()},
            "peak_memory_mb": round(peak),
            "bytes_stored": {
                k: sum(t.nbytes for a in kind for t in a.to_tensors().values())
                for k, kind in stored.items()
            },
            "hidden_change": {i: round(x, 4) for i, x in model.change.items()},
        },
        {
            "model": name,
            "table": "filter report, calibration text",
            **{
                role: round(float(np.mean([np.mean(getattr(r, role)) for r in reports])), 4)
                for role in filter_report.FilterReport.forms
            },
        },
    ]
    rows += [{"model": name, "table": "scores", **row} for row in HeldOut(model).table()]
    losses = budget_losses(model, methods, RATIOS)
    evicted = Evicted(model, windows) if windows else None
    for method, given in methods.items():
        for selector in SELECTORS:
            if method.startswith("measured") and not method.endswith(selector):
                continue
            for ratio in RATIOS:
                lost, error = losses[method, selector, ratio]
                row = {"method": method, "selector": selector, "budget": ratio}
                row |= {"lost_mass": round(lost, 5), "output_error": round(error, 5)}
                if evicted and ratio == KL_AT and selector != "moving":
                    row["kl"] = round(evicted.kl(given, ratio, selector), 5)
                    row["kl_windows"] = windows
                rows.append({"model": name, "table": "budgets", **row})
                print(rows[-1], file=sys.stderr)
    return rows


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1] == "--one":
        name, path, *windows = sys.argv[2].split("=")
        print(json.dumps(measure(name, path, int(windows[0]) if windows else WINDOWS)))
        return
    written = HERE / "calibrators_attention.json"
    rows = json.loads(written.read_text())["rows"] if written.exists() else []
    for argument in sys.argv[1:] or ["demo=demo"]:
        command = [sys.executable, __file__, "--one", argument]
        out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        made = json.loads(out.splitlines()[-1])
        rows = [r for r in rows if r["model"] != argument.split("=")[0]] + made
        tokens = f"{CALIBRATION} for calibration, {WINDOWS} x {LENGTH} held out"
        print(save("calibrators_attention", rows, tokens=tokens))


if __name__ == "__main__":
    main()
