"""Scalar codes in the benchmark of calibrations: levels, spectral bases, bits, NUQ, low rank."""

from collections.abc import Sequence
from typing import Any

import calibrators_codecs as codecs
import numpy as np
from calibrators_bench import PARTS, SEEN, Bench, measured
from calibrators_codecs import rows_of

from velox_pack.calibrators import (
    codebooks,
    lowrank,
    nuq,
    ratequant,
    scalar_codebooks,
    spectral,
    spectral_metric,
)
from velox_pack.manifests.artifacts import Allocation
from velox_pack.manifests.artifacts_scalar import JointSpectral

Array = np.ndarray
# Lloyd-Max errors as published: Max 1960 for a Gaussian; standard tables, from SNR in dB, for a
# Laplacian; TurboQuant (2504.19874) for a coordinate of a rotated unit vector of high dimension.
PUBLISHED = {
    "gaussian": [0.3634, 0.1175, 0.03454, 0.009497, 0.002499],
    "laplacian": [
        float(f"{10 ** (-d / 10):.4g}") for d in (3.01, 7.54, 12.64, 18.13, 23.87, 29.74, 35.69)
    ],
    "rotated-unit-256": [0.36, 0.117, 0.03, 0.009],
}
BITS = (2.0, 3.0)
ABLATED = 2.0


def add(b: Bench) -> None:
    """All methods of this part."""
    add_levels(b)
    add_bases(b)
    add_nuq(b)
    add_lowrank(b)


def add_levels(b: Bench) -> None:
    """Levels for other sources, on rotated values; the Gaussian's are the baseline "rotated"."""
    for source in ("laplacian", f"rotated-unit-{b.dim('values')}"):
        book, cost = measured(lambda: scalar_codebooks.fit(source))  # noqa: B023
        name = "levels, " + (source if source == "laplacian" else "rotated unit")
        own = codecs.rotated(b.statistics, "values", ABLATED, codecs.table_of(book))
        b.add(name, "values", ABLATED + b.norm_bits("values"), None, own, [book], cost)

    def empirical() -> Any:
        turn, samples = codecs.rotation(b.dim("values")), []
        for layer in b.statistics.values():
            moments, sample = layer.part("values")
            z = (sample - moments.mean[:, None]) @ turn
            size = np.sqrt(np.square(z).mean(axis=-1, keepdims=True))
            samples.append((z / np.maximum(size, 1e-30)).ravel()[::7])
        z = np.concatenate(samples)
        return scalar_codebooks.fit_samples({int(ABLATED): (z, np.ones_like(z))})

    book, cost = measured(empirical)
    own = codecs.rotated(b.statistics, "values", ABLATED, codecs.table_of(book))
    b.add("levels, empirical", "values", ABLATED + b.norm_bits("values"), None, own, [book], cost)


class Fits:
    """Joint bases of one model, with all that is done for them or less."""

    def __init__(self, b: Bench) -> None:
        self.b = b
        self.done = {(g, p): own.done(p) for g, own in b.together.items() for p in PARTS}

    def __call__(
        self, part: str, *, group: str = "group", steep: bool = True, **options: Any
    ) -> tuple[JointSpectral, ...]:
        metrics = {}
        for t in self.b.traces:
            own = getattr(self.b.steep, part)[t.index] if steep else None
            layer = self.b.statistics[t.index]
            if part == "values":
                metrics[t.index] = spectral_metric.head_metric(layer, own)
            else:
                metrics[t.index] = spectral_metric.query_metric(layer, t, own)
        name = {"keys": "queries", "values": "heads"}[part]
        return spectral_metric.fit(self.done[group, part], metrics, part, metric=name, **options)


def add_bases(b: Bench) -> None:
    """Bases for each head, joint ones, each also with RateQuant's bits; and what each step adds."""
    assert b.steep  # measured before anything is timed that reads it
    fits = Fits(b)
    heads = fits.done["group", "keys"][b.traces[0].index].group
    plain, plain_cost = measured(lambda: spectral.fit(b.statistics, "keys"))
    pairs, cost = measured(lambda: {p: fits(p) for p in PARTS})
    both = [a for p in PARTS for a in pairs[p]]
    needs = ("sensitivity",)
    curves = {
        "spectral": (plain_curves(b, plain), plain, plain_cost, 1),
        "joint-spectral": (joint_curves(pairs), both, cost, heads),
    }
    for bits in BITS:
        for name, (curve, artifacts, own_cost, group) in curves.items():
            total = bits + b.norm_bits("both", group)
            codes = coded(b, name, plain, pairs, bits, bits)
            own_needs = needs if name == "joint-spectral" else ()
            other = "spectral" if name == "joint-spectral" else None
            b.add(name, "both", total, *codes, artifacts, own_cost, own_needs, against=other)
            given, spent = measured(lambda: allocated(b, curve, bits))  # noqa: B023
            codes = coded(b, name, plain, pairs, *by_layer(given))
            achieved = given[0].achieved + b.norm_bits("both", group)
            with_bits = [*artifacts, *given]
            what = f"ratequant+{name}"
            b.add(what, "both", achieved, *codes, with_bits, spent, needs, against=name)
    add_steps(b, fits, plain, plain_cost, heads)


def coded(
    b: Bench, name: str, plain: Any, pairs: dict[str, Any], keys: codecs.Bits, values: codecs.Bits
) -> list[codecs.Make]:
    if name == "spectral":
        return [codecs.by_head(plain, keys), codecs.rotated(b.statistics, "values", values)]
    return [codecs.joint(pairs["keys"], keys), codecs.joint(pairs["values"], values)]


def add_steps(b: Bench, fits: Fits, plain: Any, plain_cost: Any, heads: int) -> None:
    """Keys or values alone: the basis of each head, and joint bases less one thing at a time."""
    total = {g: ABLATED + b.norm_bits("keys", g) for g in (1, heads)}
    keys = codecs.by_head(plain, ABLATED)
    b.add("spectral", "keys", total[1], keys, None, plain, plain_cost)
    less: dict[str, dict[str, Any]] = {
        "joint-spectral": {},
        "joint-spectral, not spread": {},
        "joint-spectral, one head": {"group": "head"},
        "joint-spectral, no sensitivities": {"steep": False},
        "joint-spectral, no metric": {"power": 0.0},
        "joint-spectral, no directions": {"directions": False},
    }
    if heads == 1:  # each head is a group of its own
        del less["joint-spectral, one head"]
    for name, options in less.items():
        found, cost = measured(lambda: fits("keys", **options))  # noqa: B023
        keys = codecs.joint(found, ABLATED, spread="not spread" not in name)
        bits = total[1 if "group" in options else heads]
        needs = ("sensitivity",) if options.get("steep", True) else ()
        b.add(name, "keys", bits, keys, None, found, cost, needs, against="spectral")
    found, cost = measured(lambda: fits("values"))
    bits = ABLATED + b.norm_bits("values", heads)
    values = codecs.joint(found, ABLATED)
    b.add("joint-spectral", "values", bits, None, values, found, cost, ("sensitivity",))


Curves = dict[str, dict[int, ratequant.Distortion]]


def plain_curves(b: Bench, plain: Any) -> Curves:
    """What the `spectral` recipe's codes lose by bits: spectral keys, rotated values."""
    curves: Curves = {"keys": {}, "values": {}}
    for layer, (a, n) in rows_of(plain).items():
        same = np.ones_like(b.statistics[layer].values.mean)
        curves["keys"][layer] = ratequant.lloyd_distortion(a.variance[n], b.steep.keys[layer])
        curves["values"][layer] = ratequant.lloyd_distortion(same, b.steep.values[layer])
    return curves


def joint_curves(pairs: dict[str, Any]) -> Curves:
    return {
        part: {i: spectral_metric.distortion(a, n) for i, (a, n) in rows_of(own).items()}
        for part, own in pairs.items()
    }


def allocated(b: Bench, curves: Curves, bits: float) -> tuple[Allocation, ...]:
    dims = {t.index: (t.k_dim, t.v_dim) for t in b.traces}
    return ratequant.allocate(b.steep, curves["keys"], curves["values"], bits, dims, lowest=1.0)


def by_layer(given: Sequence[Allocation]) -> tuple[dict[int, float], dict[int, float]]:
    keys, values = (
        {i: float(getattr(a, part)[n]) for i, (a, n) in rows_of(given).items()} for part in PARTS
    )
    return keys, values


def add_nuq(b: Bench) -> None:
    artifacts, cost = measured(
        lambda: nuq.calibrate(b.streaming(), b.few, b.traces, 3, window=SEEN)
    )
    counted: list[float] = []
    own = [codecs.nuq_codec(artifacts, part, counted) for part in PARTS]
    bits = lambda: float(np.mean(counted))  # noqa: E731
    b.add("nuq3-1%", "both", bits, *own, artifacts, cost)


def add_lowrank(b: Bench) -> None:
    """SVDq at 2 bits; PALU with half the latents, ranked by sensitivity, at 2 bits."""
    joint = {part: b.together["group"].done(part) for part in PARTS}

    def svdq(part: str) -> Any:
        return lowrank.fit(joint[part], part, 2.0)

    def palu(part: str) -> Any:
        steep, found = getattr(b.steep, part), joint[part]
        units = [(i, g) for i in sorted(found) for g in range(len(found[i].directions))]
        fisher = [steep[i].reshape(-1, found[i].group)[g].sum() for i, g in units]
        sizes = [found[i].moments.total.shape[1] for i, _ in units]
        ranks: dict[int, list[int]] = {}
        for (i, _), rank in zip(units, lowrank.palu_ranks(fisher, sizes, 0.5), strict=True):
            ranks.setdefault(i, []).append(rank)
        return lowrank.fit(found, part, 2.0, ranks=ranks)

    for name, fit, needs in (("svdq", svdq, ()), ("palu", palu, ("sensitivity",))):
        pairs, cost = measured(lambda: [fit(part) for part in PARTS])  # noqa: B023
        used = [lowrank.bits_per_element(a, n) for own in pairs for a, n in rows_of(own).values()]
        own = [codecs.lowrank_codec(p) for p in pairs]
        both = [a for p in pairs for a in p]
        b.add(name, "both", float(np.mean(used)), *own, both, cost, needs)


def facts(b: Bench) -> dict[str, Any]:
    """What one wants to know of a model besides the rows."""
    per_layer = np.array([[b.steep.keys[i].sum(), b.steep.values[i].sum()] for i in b.steep.keys])
    fits = Fits(b)
    ratios = {
        part: spectral.participation_ratio(fits(part, steep=False, power=0.0)[0].variance)
        for part in PARTS
    }
    return {
        "sensitivity_ratio": round(float(per_layer.max() / per_layer.min()), 1),
        "sensitivity_keys_to_values": round(float(np.divide(*per_layer.sum(axis=0))), 2),
        "participation_ratio": {p: round(float(r.mean()), 1) for p, r in ratios.items()},
    }


def lloyd_max_table() -> dict[str, dict[str, list[float]]]:
    """Mean squared errors at 1 to 8 bits for variance 1, beside published ones."""
    names = ["gaussian", "laplacian", *(f"rotated-unit-{d}" for d in (16, 64, 128, 256))]
    found = {n: [scalar_codebooks.levels_of(n, b)[1] for b in range(1, 9)] for n in names}
    found["gaussian"] = [codebooks.lloyd_max(b)[1] for b in range(1, 9)]
    table = {n: {"ours": [float(f"{e:.5g}") for e in errors]} for n, errors in found.items()}
    for name, published in PUBLISHED.items():
        table[name]["published"] = published
    return table
