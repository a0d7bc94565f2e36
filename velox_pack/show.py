"""Tables for people: data on stdout, progress on stderr."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Self

import rich.console
from rich.status import Status
from rich.table import Table
from rich.text import Text


class Console:
    """One line of progress on stderr: a spinner on a terminal, plain lines in a log."""

    def __init__(self) -> None:
        self._console = rich.console.Console(
            stderr=True, highlight=False, markup=False, emoji=False
        )
        self._status: Status | None = None
        self._last = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def say(self, line: str) -> None:
        """Show what is going on now."""
        if line == self._last:
            return
        self._last = line
        if not self._console.is_terminal:
            self._console.print(line, soft_wrap=True)
        elif self._status is None:
            self._status = self._console.status(Text(line))
            self._status.start()
        else:
            self._status.update(Text(line))

    def stop(self) -> None:
        """Clear the line."""
        if self._status is not None:
            self._status.stop()
            self._status = None


def _out() -> rich.console.Console:
    """A console that prints text as it is: names may hold [ ] and : :."""
    plain: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False}
    console = rich.console.Console(**plain)
    # A pipe has no width: let no table be cut there.
    return console if console.is_terminal else rich.console.Console(**plain, width=1000)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        right = column.startswith(">")
        table.add_column(column.removeprefix(">"), justify="right" if right else "left")
    return table


def size(count: float) -> str:
    """Bytes for people: decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError


_LATER = ": prepared; cannot be loaded yet"


def show_job(summary: Mapping[str, Any], *, done: bool) -> None:
    """What a conversion did or would do."""
    out = _out()
    revision = f" at {summary['revision'][:12]}" if summary["revision"] else ""
    verb = "wrote" if done else "would write"
    packed = summary["coverage"]["weights"]
    lines = [
        f"{verb} {summary['out']} from {summary['source']}{revision}",
        f"weights {summary['weights']}: {packed}",
        *_reasons([k for k in summary["kept"] if k["reason"] not in packed]),
        f"parameters take {size(summary['weight_bytes'])}, "
        f"the source's {size(summary['source_weight_bytes'])}",
        f"caches: {summary['coverage']['caches']}",
        *(
            f"  {name}{'' if n else ' (default)'}{_LATER if name in summary['later'] else ''}"
            for n, name in enumerate(summary["caches"])
        ),
    ]
    if c := summary["calibration"]:
        text = f"the {c['text']} text" if c["text"] == "built-in" else c["text"]
        lines.append(f"calibration: {c['tokens']} tokens of {text}, {c['length']} in a sequence")
    else:
        lines.append("calibration: none, these caches need no data")
    for line in lines:
        out.print(line, soft_wrap=True)


def _reasons(kept: Sequence[Mapping[str, str]]) -> list[str]:
    """Lines that say how many modules are kept as they are, and why."""
    reasons = Counter(item["reason"] for item in kept)
    return [f"  kept {count}: {reason}" for reason, count in reasons.items()]


def show_inspection(found: Mapping[str, Any]) -> None:
    """Contents of a bundle."""
    out = _out()
    source = found["source"]
    name = source["repo"] or source["name"]
    revision = f" at {source['revision'][:12]}" if source["revision"] else ""
    out.print(
        f"{name}{revision}, bundle format {'.'.join(map(str, found['format']))}, "
        f"{size(found['total_bytes'])}, fingerprint {found['fingerprint']}",
        soft_wrap=True,
    )
    weights = found["weights"]
    options = ",".join(f"{k}={v}" for k, v in weights["parameters"].items())
    total, packed = weights["parameters_total"], weights["parameters_packed"]
    out.print(
        f"weights: {weights['encoding']}{':' + options if options else ''}, "
        f"{size(weights['memory_bytes'])}; {weights['packed_layers']} layers packed, "
        f"{100 * packed / max(1, total):.0f} % of {total:,} parameters",
        soft_wrap=True,
    )
    for line in _reasons(weights["kept"]):
        out.print(line, soft_wrap=True)
    _show_caches(out, found)
    _show_artifacts(out, found["artifacts"])
    table = _table("what for", ">bytes")
    for use, count in found["bytes_by_use"].items():
        table.add_row(use, size(count))
    out.print(table)
    table = _table("file", ">bytes")
    for file, count in found["file_bytes"].items():
        table.add_row(file, size(count))
    out.print(table)
    _show_layers(out, found["layers"])
    if found["measured"]:
        try:
            show_measured(found["measured"])
        except (KeyError, TypeError, ValueError, AttributeError):  # its form is free
            out.print("measured by another version of velox-pack: see --json")


def _show_caches(out: rich.console.Console, found: Mapping[str, Any]) -> None:
    context = found.get("memory", {}).get("context", {})
    columns = ["cache", ">bits/element", ">of plain", ">bytes/token"]
    table = _table(*columns, *([">context that fits"] if context else []))
    if context:
        table.add_row("none (mlx-lm's own)", "16.00", "100.0 %", "", f"{context['none']:,}")
    for name, cache in found["caches"].items():
        default = " (default)" if name == found["default_cache"] else ""
        if not cache["ready"]:
            table.add_row(f"{name}{default}{_LATER}")
            continue
        row = [
            f"{name}{default}",
            f"{cache['bits_per_element']:.2f}",
            f"{100 * cache['share_of_plain']:.1f} %",
            f"{cache['bytes_per_token']:,.0f}",
        ]
        table.add_row(*row, *([f"{context[name]:,}"] if context else []))
    out.print(table)
    if context:
        out.print(
            f"context: one sequence, all of {size(found['memory']['bytes'])} given to weights and "
            f"cache; the system and activations need some too{_known(found['memory'])}",
            soft_wrap=True,
        )


def _show_artifacts(out: rich.console.Console, artifacts: Sequence[Mapping[str, Any]]) -> None:
    if not artifacts:
        return
    table = _table("artifact", "kind", ">layers", ">bytes", "remark")
    for one in artifacts:
        layers = str(one["layers"] or "all")
        table.add_row(one["id"], one["kind"], layers, size(one["bytes"]), _remark(one))
    out.print(table)


def _remark(artifact: Mapping[str, Any]) -> str:
    """What RateQuant found, in a few words; other kinds have pictures (`--plots`)."""
    details = artifact["parameters"].get("details")
    if artifact["kind"] != "allocation" or not isinstance(details, dict):
        return ""
    try:
        predicted = details["predicted_kl"] / details["predicted_kl_uniform"]
        return (
            f"most sensitive head / median: keys {details['ratio_keys']:.1f}, "
            f"values {details['ratio_values']:.1f}; predicted KL {predicted:.2f} of uniform bits"
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError):  # their form is free
        return ""


def _known(memory: Mapping[str, Any]) -> str:
    """A reminder that memory is not all."""
    known = memory["positions"]
    return f"; the model itself takes {known:,} tokens" if known else ""


def _show_layers(out: rich.console.Console, layers: Sequence[Mapping[str, Any]]) -> None:
    table = _table(">layer", "attention", ">KV heads", ">head dim", ">weights", "cache")
    for layer in layers:
        dims = sorted(set(layer["head_dim"]))
        table.add_row(
            str(layer["index"]),
            layer["attention"],
            str(layer["kv_heads"]),
            "/".join(map(str, dims)),
            size(layer["weight_bytes"]),
            "ours" if layer["covered"] else f"mlx-lm's: {layer['reason']}",
        )
    out.print(table)


def show_measured(result: Mapping[str, Any]) -> None:
    """Quality and bytes of a bundle."""
    out = _out()
    table = _table(
        "against the source", ">bits/element", ">KL", ">KL of cache alone", ">top-1", ">perplexity"
    )
    table.add_row("source", "16.00", "0", "", "100.0 %", f"{result['source']['perplexity']:.2f}")
    rows = {"packed weights, exact cache": result["weights"], **result["caches"]}
    for name, row in rows.items():
        table.add_row(
            name,
            f"{row['bits_per_element']:.2f}" if "bits_per_element" in row else "16.00",
            f"{row['kl']:.4f}",
            f"{row['kl_cache']:.4f}" if "kl_cache" in row else "",
            f"{100 * row['top1_agreement']:.1f} %",
            f"{row['perplexity']:.2f}",
        )
    for name in result.get("not_measured", ()):
        table.add_row(f"{name}: not measured; cannot be loaded yet")
    out.print(table)
    environment = result["environment"]
    out.print(
        f"{result['tokens']} tokens of {result['text']} text in windows of {result['window']}, "
        f"generation semantics; loaded in {result['load_seconds']:.2f} s; "
        f"{environment['device']}, {environment['dtype']}",
        soft_wrap=True,
    )


def show_recipes(rows: Sequence[Mapping[str, Any]]) -> None:
    """Recipes and their options."""
    out = _out()
    table = _table("recipe", "options and defaults", "what it does")
    for row in rows:
        options = ", ".join(f"{k}={v}" for k, v in row["options"].items())
        about = row["about"] if row["ready"] else f"{row['about']}; prepared only, so far"
        table.add_row(row["name"], options or "-", about)
    out.print(table)
    out.print("combine with +, as in ratequant+spectral:bits=3", soft_wrap=True)
