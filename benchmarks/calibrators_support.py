"""What neighbours, channels and sinks are worth: XQuant, prediction, MiniCache, Kitty, GEAR, ...

    python benchmarks/calibrators_support.py NAME=PATH[:errors] ...

Calibrated on the built-in text, judged on two windows of 512 tokens of the built-in held-out text.
Rows have the columns of calibrators.py. `value` is the squared error over the squares (mean over
layers, of keys or values), or KL from the exact cache with both coded (generation semantics: 4
sinks and 24 recent tokens exact, flush of 8; `:errors` leaves it out). `bits` has scales, offsets,
places and retained tokens in it; below a baseline's fewest bits it counts as it is there. Baselines
in groups of 64: "affine" (mlx's, along channels), "kivi" (mlx's; keys along tokens, after RoPE,
values along channels) and "rotated" (Lloyd-Max levels, keys before RoPE, mean off, 8-bit norm).
`gain` is a baseline's value over this one: above 1 is better. Writes calibrators_support.json.
"""

import json
import subprocess
import sys
from typing import Any

import numpy as np
from calibrators_bench import CALIBRATION, LENGTH, measured
from calibrators_codecs import rows_of
from common import HERE, save
from support_bench import (
    AXES,
    PARTS,
    Array,
    Support,
    chain,
    of,
    plain,
    relaxed,
    rotated,
)

from velox_pack.calibrators import (
    affine_rounding,
    gear,
    kitty,
    minicache,
    outliers,
    prediction,
    sinks,
    xquant,
)
from velox_pack.calibrators.affine_rounding import bits_per_element, relative_error
from velox_pack.calibrators.rotated_code import RotatedCode, norm_bits, range_of


def baselines(b: Support) -> None:
    for bits in (2, 3, 4):
        kivi = {p: (lambda i, x, p=p, bits=bits: plain(x, bits, AXES[p])) for p in PARTS}
        token = {p: (lambda i, x, bits=bits: plain(x, bits, "token")) for p in PARTS}
        b.method(f"kivi {bits}", bits_per_element(bits), False, kivi)
        b.method(f"affine {bits}", bits_per_element(bits), False, token)
    for bits in (1, 2, 3):
        code = {p: rotated(b.tokens, bits, p) for p in PARTS}
        b.method(f"rotated {bits}", bits + norm_bits(b.dim("keys")), True, code)


def predicting(b: Support) -> None:
    """The whole chain, pairs of layers, and values from keys of their own layer alone."""
    for span in (0, 2, 1):
        for bits in (1, 2, 3) if span == 0 else (2,):
            fitted, cost = measured(lambda: prediction.fit(b.tokens, bits, span=span))  # noqa: B023
            at, both = prediction.bits_per_element(fitted[0]), chain(fitted)
            name = {0: "prediction", 2: "prediction in pairs", 1: "prediction, own keys"}[span]
            errors: dict[str, list[float]] = {p: [] for p in PARTS}
            for i, t in b.held.items():
                for p in PARTS:
                    errors[p].append(relative_error(t.part(p), both[p](i, t.part(p))))
            for p in PARTS:
                own = tuple(a for a in fitted if a.part == p)
                left = round(float(np.mean([a.left.mean() for a in own])), 3)
                error = float(np.mean(errors[p]))
                b.note(f"{name} {bits}", p, at, error, own, cost, left=left)
            stored = sum(t.nbytes for a in fitted for t in a.to_tensors().values())
            b.codes.append((f"{name} {bits}", at, True, chain(fitted), stored, cost))


def sharing(b: Support) -> None:
    """XQuant: every second layer with codes of the one before, and relaxed rounding alone."""
    for bits in (1, 2):
        share = {}
        for p in PARTS:
            fitted, cost = measured(lambda: xquant.fit(b.tokens, p, bits))  # noqa: B023
            share[p] = fitted[0].relax
            lent = [a.agreement[a.agreement > 0] for a in fitted]
            facts = {
                "pairs_worth_it": sum(int((a.partner >= 0).sum()) for a in fitted),
                "correlation": round(float(np.concatenate(lent).mean()), 3),
            }
            for what, least_squares, before, relax in (
                ("the authors' steps", False, False, xquant.RELAX[bits]),
                ("fitted steps", True, fitted[0].before_rope, share[p]),
            ):
                error = _shared(b, p, bits, before, least_squares, relax)
                name = f"xquant {bits}, all pairs, {what}"
                b.note(name, p, bits / 2 + 0.5, error, fitted, cost, **facts)
        code = {p: (lambda i, x, p=p, b=bits, s=share[p]: relaxed(x, b, p, s)) for p in PARTS}
        b.method(f"relaxed rounding {bits}", bits_per_element(bits), False, code)
        if bits == 1:  # hopeless for KL
            b.codes.pop()


def _shared(
    b: Support, part: str, bits: int, before: bool, least_squares: bool, relax: float
) -> float:
    indices, errors = sorted(b.held), []
    for first, second in zip(indices[::2], indices[1::2], strict=False):
        xs = [b.held[i].part(part, before_rope=before) for i in (first, second)]
        lent = affine_rounding.encode(xs[0], bits, AXES[part], relax=relax)
        taken = xquant.borrow(lent, xs[1], least_squares=least_squares, relax=relax)
        errors += [relative_error(x, r.decode()) for x, r in zip(xs, (lent, taken), strict=True)]
    return float(np.mean(errors))


def merging(b: Support) -> None:
    """MiniCache on the deeper half: as it is, and with layers turned into one basis."""
    for part in PARTS:
        for align, retained in ((False, 0.05), (True, 0.05), (True, 0.0)):
            options: dict[str, Any] = {"align": align, "retained": retained, "before_rope": align}
            fitted, cost = measured(
                lambda: minicache.fit(b.tokens, part, tolerated=1.0, **options)  # noqa: B023
            )
            cosine = round(float(np.mean([a.similarity[1:].mean() for a in fitted])), 3)
            for bits in (2, 3, 4):
                error, used = _merged(b, fitted, part, bits)
                name = f"minicache{' aligned' if align else ''}, {retained:.0%} retained, {bits}"
                b.note(name, part, used, error, fitted, cost, cosine=cosine)


def _merged(b: Support, fitted: tuple[Any, ...], part: str, bits: int) -> tuple[float, float]:
    """Error and bits of merged layers at coded directions; retained tokens have own codes."""
    before = any(a.before_rope for a in fitted)
    xs = {i: t.part(part, before_rope=before).astype(np.float64) for i, t in b.held.items()}
    errors, used = [], []
    for i, (a, n) in rows_of(fitted).items():
        if a.partner[n] < 0:
            continue
        pair = xs[i - 1], xs[i]
        merged, lengths, apart = minicache.encode(a, n, *pair)
        width = merged.shape[2]
        code = RotatedCode(width, bits, range_of(merged))
        out = minicache.decode(a, n, code.decode(*code.encode(merged)), lengths)
        for x, both in zip(pair, out, strict=True):
            own = plain(x, bits, "token")
            errors.append(relative_error(x, np.where(apart[:, None], own, both)))
        once = bits + 3 * 8 / width  # the scale of a direction, and two lengths of 8 bits
        used.append((once + float(apart.mean()) * 2 * bits_per_element(bits)) / 2)
    return float(np.mean(errors)), float(np.mean(used))


def channels(b: Support) -> None:
    """Kitty with fixed levels and as in the paper, outlier channels before and after RoPE."""
    t = b.tokens
    rules = (("boost", 2.25), ("boost", 2.5), ("water", 1.5), ("water", 2.0), ("water", 3.0))
    for rule, bits in rules:
        for p in PARTS:
            fitted, cost = measured(lambda: kitty.fit(t, p, bits, rule=rule))  # noqa: B023
            own = of(fitted, kitty.decoded)
            error = b.mean_error(own, p, True)
            b.note(f"kitty {rule} {bits:g}", p, bits, error, fitted, cost)
            if p == "keys" and bits in (2.0, 2.5, 3.0):
                values = rotated(t, int(bits), "values")
                at = (bits + int(bits) + norm_bits(b.dim("values"))) / 2
                name = f"kitty {rule} {bits:g} keys, rotated values"
                stored = sum(x.nbytes for a in fitted for x in a.to_tensors().values())
                b.codes.append((name, at, True, {"keys": own, "values": values}, stored, cost))
    for share in (0.125, 0.25):
        picked = rows_of(kitty.fit(t, "keys", 2 + 2 * share, rule="boost", before_rope=False))

        def boosted(i: int, x: Array, picked: Any = picked) -> Array:
            a, n = picked[i]
            two, four = (plain(x, bits, "channel") for bits in (2, 4))
            return np.where(a.widths[n][:, None] == 4, four, two)

        error = b.mean_error(boosted, "keys", False)
        b.note(f"kitty's paper, {share:.1%} at 4 bits", "keys", 2.5 + 2 * share, error)
    for bits in (2, 3):
        made = {p: measured(lambda: outliers.fit(t, p, bits)) for p in PARTS}  # noqa: B023
        code = {p: of(made[p][0], outliers.decoded) for p in PARTS}
        both = tuple(a for f, _ in made.values() for a in f)
        at = float(np.mean([outliers.bits_per_element(f[0]) for f, _ in made.values()]))
        b.method(f"outlier channels {bits}", at, True, code, both, made["keys"][1])
        after, cost = measured(lambda: outliers.fit(t, "keys", bits, before_rope=False))  # noqa: B023
        error = b.mean_error(of(after, outliers.decoded), "keys", False)
        name, at = f"outlier channels {bits}, pairs after RoPE", outliers.bits_per_element(after[0])
        b.note(name, "keys", at, error, after, cost, count=after[0].channels.shape[2])


def residuals(b: Support) -> None:
    """GEAR's low rank and outliers with a fixed basis, and the correction that costs no bits."""
    for bits in (2, 3):
        made = {p: measured(lambda: gear.correct(b.tokens, p, bits)) for p in PARTS}  # noqa: B023
        code = {p: of(made[p][0], gear.corrected) for p in PARTS}
        both = tuple(a for f, _ in made.values() for a in f)
        b.method(f"correction {bits}", bits_per_element(bits), True, code, both, made["keys"][1])
        for p in PARTS:
            for rank, share in ((2, 0.0), (4, 0.0), (8, 0.0), (2, 0.02)):
                low, cost = measured(
                    lambda: gear.fit(b.tokens, p, bits, rank=rank, outliers=share)  # noqa: B023
                )
                rows, errors, used = rows_of(low), [], []
                for i, h in b.held.items():
                    x = h.part(p, before_rope=False)
                    out, at = gear.decoded(*rows[i], x)
                    errors.append(relative_error(x, out))
                    used.append(at)
                held = round(float(np.mean([a.captured.mean() for a in low])), 3)
                name = f"gear {bits}, rank {rank}, {share:.0%} outliers"
                error, at = float(np.mean(errors)), float(np.mean(used))
                b.note(name, p, at, error, low, cost, captured=held)


def telling(b: Support) -> tuple[tuple[Any, ...], dict[int, dict[str, Any]]]:
    """Sinks of each layer that has some, as calibrated and on held-out text."""
    found = sinks.fit(b.masses)
    names = ("mass", "recall", "false_positives", "protected")
    judged = rows_of(sinks.fit(b.held_masses))
    layers = {}
    for i, (a, n) in rows_of(found).items():
        if a.statistic[n]:
            own = {r: round(float(getattr(a, r)[n]), 4) for r in names}
            held, row = b.held_masses[i], judged[i]
            lengths = (held.keys, held.values, a.keys[n], a.values[n])
            called = sinks.statistics_of(int(a.statistic[n]), *lengths) >= a.threshold[n]
            share = held.mass * held.seen
            layers[i] = {
                "statistic": sinks.STATISTICS[a.statistic[n]],
                **own,
                "held_out_mass": round(float(row[0].mass[row[1]]), 4),
                "held_out_mass_protected": round(
                    float(share[:, 4:][called[:, 4:]].sum() / share.sum()), 4
                ),
                "held_out_protected": round(float(called[:, 4:].mean()), 4),
            }
    return found, layers


def measure(name: str, path: str, with_kl: bool) -> dict[str, Any]:
    b = Support(name, path)
    baselines(b)
    predicting(b)
    sharing(b)
    merging(b)
    channels(b)
    residuals(b)
    found, layers = telling(b)
    if with_kl:
        b.kl(found)
    b.forget()
    passed = {"seconds": b.passed.seconds, "peak_mb": b.passed.peak_mb}
    return {"rows": b.rows, "sinks": layers, "passes": passed}


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1] == "--one":
        name, path = sys.argv[2].split("=")
        print(json.dumps(measure(name, path.removesuffix(":errors"), not path.endswith(":errors"))))
        return
    file = HERE / "calibrators_support.json"
    old = json.loads(file.read_text()) if file.exists() else {}
    rows = old.get("rows", [])
    facts = {k: old.get(k, {}) for k in ("sinks", "passes")}
    for item in sys.argv[1:] or ["demo=demo"]:
        name = item.split("=")[0]
        command = [sys.executable, __file__, "--one", item]
        out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        found = json.loads(out.splitlines()[-1])
        rows = [r for r in rows if r["model"] != name] + found["rows"]
        for fact in facts:
            facts[fact][name] = found[fact]
        held = f"{CALIBRATION} calibrate, 2 x {LENGTH} held out"
        save("calibrators_support", rows, tokens=held, **facts)


if __name__ == "__main__":
    main()
