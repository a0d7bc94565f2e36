"""What each calibration costs and gains: `python benchmarks/calibrators.py NAME=PATH ...`

Every model is calibrated on 4,096 tokens of the built-in text (2,048 for gradients), each part of
the benchmark in a process of its own, and judged on two windows of 512 tokens of the built-in
held-out text. All rows are merged into calibrators.json; those of models that are not named stay.
`--merge` runs nothing and only takes in what the other parts wrote, `--only PART` runs one part.

Codes of keys and values have generation semantics: 4 sinks and 24 recent tokens exact, flush of 8.
A row has

calibration, part    what is coded: keys, values or both; the rest is exact
bits                 of a coded number, with norms, ranges and outliers
bits_with_constants  the same, with what is stored shared by 8 sequences of 2,048 tokens
seconds, peak_mb     of the fit alone; `passes` of the facts has what it reads besides
bytes_stored         of its artifacts
measure, value       kl: nats from the exact cache
at_equal_bits        what the baselines lose at the same bits: mlx's affine rounding in groups of
                     64, and rotated Lloyd-Max levels (keys before RoPE, mean off, 8-bit norm)
gain                 a baseline's value over this one: above 1 is better than it

Rows of the other parts (scores of keys, budgets, what sharing and merging want to know) are
explained in calibrators_attention.py and calibrators_support.py; here they have the same columns.
The gain of a correlation is a difference; budgets are compared at an eighth of the keys.
"""

import json
import platform
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from calibrators_merge import OTHERS, few
from common import HERE, save

CODES = "codes"


def measure(name: str, path: str) -> Iterator[dict[str, Any]]:
    """Facts and rows of the codes of one model, as far as they are known."""
    import calibrators_scalar as scalar
    import calibrators_vector as vector
    from calibrators_bench import Bench

    b = Bench(name, path)
    b.add_baselines()
    scalar.add(b)
    vector.add(b)
    facts = {"layers": len(b.traces), **scalar.facts(b)}
    facts["passes"] = {what: asdict(cost) for what, cost in b.passes.items()}
    for rows in b.rows():
        yield {"facts": facts | {"rows": f"{len(rows)} of {len(b.methods)}"}, "rows": rows}


def run(item: str) -> None:
    """Measure the codes of one model in a process of its own; what a stopped one found is kept."""
    command = [sys.executable, __file__, "--one", item]
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            last = line
    if last:
        merge(item.split("=")[0], json.loads(last))
    if child.returncode:
        raise SystemExit(f"{item}: stopped with code {child.returncode}")


def merge(name: str | None = None, found: dict[str, Any] | None = None) -> Path:
    """Write calibrators.json anew with rows of one model exchanged, and the other parts' rows."""
    import calibrators_scalar as scalar

    file = HERE / "calibrators.json"
    old = json.loads(file.read_text()) if file.exists() else {}
    rows = [r for r in old.get("rows", []) if r["benchmark"] == CODES and r["model"] != name]
    facts = old.get("models", {})
    if name is not None and found is not None:
        rows += [{"benchmark": CODES, **row} for row in found["rows"]]
        facts[name] = found["facts"]
    for part, taken_over in OTHERS.items():
        written = HERE / f"calibrators_{part}.json"
        if written.exists():
            own = taken_over(json.loads(written.read_text())["rows"])
            rows += [{"benchmark": part, **row} for row in own]
    rows.sort(key=lambda r: (r["model"], [CODES, *OTHERS].index(r["benchmark"])))  # stable
    return save(
        "calibrators",
        [few(row) for row in rows],
        processor=platform.processor() or platform.machine(),
        lloyd_max_errors=scalar.lloyd_max_table(),
        models=facts,
    )


def main() -> None:
    arguments = sys.argv[1:]
    if arguments[:1] == ["--one"]:
        for found in measure(*arguments[1].split("=")):
            print(json.dumps(found), flush=True)
        return
    if arguments == ["--merge"]:
        print(merge())
        return
    parts = [CODES, *OTHERS]
    if arguments[:1] == ["--only"]:
        parts, arguments = [arguments[1]], arguments[2:]
    for item in arguments or ["demo=demo"]:
        if CODES in parts:
            run(item)
        for part in parts:
            if part != CODES:
                subprocess.run([sys.executable, HERE / f"calibrators_{part}.py", item], check=True)
        print(merge())


if __name__ == "__main__":
    main()
