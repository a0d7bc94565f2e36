"""Rows of the parts of the benchmark of calibrations, brought to the same few columns."""

from collections.abc import Callable, Mapping
from typing import Any

Row = dict[str, Any]
COLUMNS = (
    *("model", "benchmark", "calibration", "part", "bits", "bits_with_constants", "budget"),
    *("seconds", "peak_mb", "passes", "bytes_stored", "measure", "value", "standard_error"),
    *("at_equal_bits", "gain", "gain_with_constants"),
)
AT = 1 / 8  # the budget whose losses are taken over
# Score of keys -> what its calibration's time and artifacts are called.
COSTS = {
    "q-filter": ("qfilters", "q-filters"),
    "fitted filter, moving (moves)": ("filter moving", "fitted filter"),
    "fitted filter, fixed": ("filter fixed", "fitted filter"),
    "expected attention (moves)": ("expected", "expected attention"),
    "expected attention, weighted (moves)": ("expected", "expected attention"),
}
NAIVE = ("minus key norm", "svd of keys", "mean query")


def attention(rows: list[Row]) -> list[Row]:
    """Scores of keys against naive ones, budgets against the uniform one."""
    found = []
    for model in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in rows if row["model"] == model]
        costs = next(row for row in own if row["table"] == "costs")
        found += _scores(costs, [row for row in own if row["table"] == "scores"])
        found += _budgets(costs, [row for row in own if row["table"] == "budgets"])
    return found


def _cost(costs: Row, seconds: str, stored: str) -> Row:
    return {
        "seconds": costs["seconds"].get(seconds, 0.0),
        "peak_mb": costs["peak_memory_mb"],
        "bytes_stored": costs["bytes_stored"].get(stored, 0),
    }


def _scores(costs: Row, rows: list[Row]) -> list[Row]:
    """Correlations, whose gain is the difference, and the mass that is kept, whose is the ratio."""
    found = []
    naive = {row["score"]: row for row in rows if row["score"] in NAIVE}
    for row in rows:
        name = row["score"]
        if name not in COSTS:
            continue
        for measure in ("spearman", "spearman_next"):
            others = {n: other[measure] for n, other in naive.items()}
            gain = {n: round(row[measure] - v, 4) for n, v in others.items()}
            own = {"model": row["model"], "calibration": name, "part": "scores of keys"}
            own |= _cost(costs, *COSTS[name]) | {"measure": measure, "value": row[measure]}
            found.append(own | {"at_equal_bits": others, "gain": gain})
    return found


def _budgets(costs: Row, rows: list[Row]) -> list[Row]:
    found = []
    rows = [row for row in rows if row["budget"] == AT]
    uniform = {row["selector"]: row for row in rows if row["method"] == "uniform"}
    for row in rows:
        if row["method"] == "uniform":
            continue
        for measure in ("lost_mass", "output_error", "kl"):
            if measure not in row:
                continue
            base = uniform[row["selector"]][measure]
            own = {"model": row["model"], "calibration": row["method"]}
            own |= {"part": f"budgets, keys chosen by {row['selector']}", "budget": AT}
            own |= _cost(costs, "budgets", "budgets")
            own |= {"measure": measure, "value": row[measure], "at_equal_bits": {"uniform": base}}
            found.append(own | {"gain": {"uniform": round(base / max(row[measure], 1e-12), 3)}})
    return found


def few(row: Row) -> Row:
    """The common columns of a row, in their order."""
    return {name: row[name] for name in COLUMNS if name in row}


def as_they_are(rows: list[Row]) -> list[Row]:
    """Rows that have the columns already."""
    return rows


OTHERS: Mapping[str, Callable[[list[Row]], list[Row]]] = {
    "attention": attention,
    "support": as_they_are,
}
