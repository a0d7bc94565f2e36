"""The one list of calibrations: what each need of a recipe is made from, and how."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from velox_pack import allocate
from velox_pack.caches.needs import Need
from velox_pack.calibrators import (
    attention_filter,
    budgets,
    center,
    codebooks,
    commvq,
    expected_attention,
    filter_report,
    gear,
    kitty,
    lowrank,
    minicache,
    nuq,
    outliers,
    prediction,
    qfilters,
    rabitq,
    scalar_codebooks,
    sinks,
    spectral,
    spectral_metric,
    squeeze,
    vecinfer,
    xquant,
)
from velox_pack.calibrators.budget_shares import shapes_of
from velox_pack.calibrators.vector_tools import query_power
from velox_pack.kernels.rotation import make_rotation
from velox_pack.manifests.artifacts import Artifact, QFilters, Rope, Rotation
from velox_pack.ropes import rope_groups
from velox_pack.seen import (
    FILTERS,
    HIDDEN,
    JOINT,
    MASS,
    NEIGHBOURS,
    QUERIES,
    SINKS,
    STATISTICS,
    Seen,
)  # fmt: skip

Options = Mapping[str, Any]
Make = Callable[[Seen, Options], Iterable[Artifact]]


@dataclass(frozen=True)
class Fit:
    """`reads` are the collectors that the forward pass has to run; () is free of data."""

    make: Make
    reads: tuple[str, ...] = (STATISTICS,)


def _ropes(seen: Seen, options: Options) -> Iterable[Artifact]:
    for group in rope_groups(seen.traces).values():
        specs = [t.rope for t in group if t.rope is not None]
        yield Rope(
            dims=specs[0].dims,
            traditional=specs[0].traditional,
            inv_freq=np.array([s.inv_freq for s in specs], dtype=np.float32),
            layers=tuple(t.index for t in group),
        )


def _rotations(seen: Seen, options: Options) -> Iterable[Artifact]:
    for width in _widths(seen):
        made = make_rotation(width, seen.job.seed)
        mix = np.ones((1, 1), np.float32) if made.mix is None else np.array(made.mix)
        signs = np.array(made.signs).astype(np.int8)
        yield Rotation(width=width, block=made.block, signs=signs, mix=mix)


def _widths(seen: Seen) -> list[int]:
    return sorted({d for layer in seen.covered for d in (layer.k_dim, layer.v_dim)})


def _codebook(seen: Seen, options: Options) -> Iterable[Artifact]:
    source = str(options["distribution"])
    if source == "gaussian":
        yield codebooks.fit()
    elif source == "rotated-unit":
        for width in _widths(seen):
            yield scalar_codebooks.fit(f"{source}-{width}")
    else:
        yield scalar_codebooks.fit(source)


def _commvq(seen: Seen, options: Options) -> Iterable[Artifact]:
    return commvq.fit(seen.statistics, seen.traces, seed=seen.job.seed, **options)


def _nuq(seen: Seen, options: Options) -> Iterable[Artifact]:
    seen.report("measuring gradients")
    return nuq.calibrate(seen.streaming(), seen.few, seen.traces, seed=seen.job.seed, **options)


def _vecinfer(part: str) -> Fit:
    return Fit(lambda s, o: vecinfer.fit(s.statistics, s.traces, part, seed=s.job.seed, **o))


def _rabitq(part: str) -> Fit:
    return Fit(lambda s, o: rabitq.fit(s.statistics, part, seed=s.job.seed, **o))


def _lowrank(part: str) -> Fit:
    return Fit(lambda s, o: lowrank.fit(s.joint(part), part, **o), (STATISTICS, JOINT))


def _joint_spectral(part: str) -> Fit:
    def make(seen: Seen, options: Options) -> Iterable[Artifact]:
        steep = getattr(seen.sensitivity(options["window"]), part)
        traces = {t.index: t for t in seen.traces}
        metrics = {
            i: spectral_metric.query_metric(own, traces[i], steep[i])
            if part == "keys"
            else spectral_metric.head_metric(own, steep[i])
            for i, own in seen.statistics.items()
        }
        name = {"keys": "queries", "values": "heads"}[part]
        return spectral_metric.fit(seen.joint(part), metrics, part, metric=name)

    return Fit(make, (STATISTICS, JOINT))


def _palu(part: str) -> Fit:
    def make(seen: Seen, options: Options) -> Iterable[Artifact]:
        sensitivity = getattr(seen.sensitivity(options["window"]), part)
        found = seen.joint(part)
        units = [(i, g) for i in sorted(found) for g in range(len(found[i].directions))]
        fisher = [sensitivity[i].reshape(-1, found[i].group)[g].sum() for i, g in units]
        sizes = [found[i].moments.total.shape[1] for i, _ in units]
        ranks: dict[int, list[int]] = {}
        chosen = lowrank.palu_ranks(fisher, sizes, options["ratio"])
        for (i, _), rank in zip(units, chosen, strict=True):
            ranks.setdefault(i, []).append(rank)
        return lowrank.fit(found, part, options["bits"], ranks=ranks)

    return Fit(make, (STATISTICS, JOINT))


def _filter_report(seen: Seen, options: Options) -> Iterable[Artifact]:
    filters = [a for a in seen.made(Need("qfilters")) if isinstance(a, QFilters)]
    return filter_report.fit(filters, seen.statistics, seen.mass)


def _expected(seen: Seen, options: Options) -> Iterable[Artifact]:
    return expected_attention.fit(seen.collected(QUERIES), **options)


def _kitty(part: str) -> Fit:
    def make(seen: Seen, options: Options) -> Iterable[Artifact]:
        power = None
        if part == "keys":
            traces = {t.index: t for t in seen.traces}
            power = {i: query_power(s, traces[i]) for i, s in seen.statistics.items()}
        return kitty.fit(seen.neighbours, part, power=power, **options)

    return Fit(make, (STATISTICS, NEIGHBOURS))


def _of_tokens(fit: Callable[..., Iterable[Artifact]], *leading: str) -> Fit:
    """A fit of the same tokens in all layers."""
    return Fit(lambda s, o: fit(s.neighbours, *leading, **o), (STATISTICS, NEIGHBOURS))


def _budgets(fit: Callable[..., Iterable[Artifact]]) -> Fit:
    return Fit(lambda s, o: fit(shapes_of(s.traces), s.mass, **o), (STATISTICS, MASS))


def _squeeze(seen: Seen, options: Options) -> Iterable[Artifact]:
    return squeeze.fit(seen.collected(HIDDEN).done(), shapes_of(seen.traces), **options)


FITS: dict[str, Fit] = {
    "widths": Fit(allocate.fit, ()),
    "rope": Fit(_ropes, ()),
    "rotation": Fit(_rotations, ()),
    "codebook": Fit(_codebook, ()),
    "qfilters": Fit(lambda s, o: qfilters.fit(s.statistics)),
    "spectral-keys": Fit(lambda s, o: spectral.fit(s.statistics, "keys")),
    "center-values": Fit(lambda s, o: center.fit(s.statistics, "values")),
    "joint-spectral-keys": _joint_spectral("keys"),
    "joint-spectral-values": _joint_spectral("values"),
    "vecinfer-keys": _vecinfer("keys"),
    "vecinfer-values": _vecinfer("values"),
    "commvq": Fit(_commvq),
    "rabitq-keys": _rabitq("keys"),
    "rabitq-values": _rabitq("values"),
    "nuq": Fit(_nuq),
    "lowrank-keys": _lowrank("keys"),
    "lowrank-values": _lowrank("values"),
    "palu-keys": _palu("keys"),
    "palu-values": _palu("values"),
    "xquant-keys": _of_tokens(xquant.fit, "keys"),
    "xquant-values": _of_tokens(xquant.fit, "values"),
    "prediction": _of_tokens(prediction.fit),
    "minicache-keys": _of_tokens(minicache.fit, "keys"),
    "minicache-values": _of_tokens(minicache.fit, "values"),
    "kitty-keys": _kitty("keys"),
    "kitty-values": _kitty("values"),
    "gear-keys": _of_tokens(gear.fit, "keys"),
    "gear-values": _of_tokens(gear.fit, "values"),
    "correction-keys": _of_tokens(gear.correct, "keys"),
    "correction-values": _of_tokens(gear.correct, "values"),
    "outliers-keys": _of_tokens(outliers.fit, "keys"),
    "outliers-values": _of_tokens(outliers.fit, "values"),
    "sinks": Fit(lambda s, o: sinks.fit(s.collected(SINKS).done(), **o), (STATISTICS, SINKS)),
    "filter-report": Fit(_filter_report, (STATISTICS, MASS)),
    "expected-attention": Fit(_expected, (STATISTICS, QUERIES)),
    "attention-filter": Fit(
        lambda s, o: attention_filter.fit(s.collected(FILTERS), **o), (STATISTICS, FILTERS)
    ),
    "budgets-pyramid": _budgets(budgets.pyramid),
    "budgets-ada": _budgets(budgets.ada),
    "budgets-measured": _budgets(budgets.measured),
    "budgets-squeeze": Fit(_squeeze, (STATISTICS, HIDDEN)),
}
