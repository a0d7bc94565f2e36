"""What Q-Filters are worth, head by head, on the text that they were fitted to.

One pass gives all that is needed: moments and a sample of keys from `capture`, mean attention by
key and a sample of queries from `attention_mass`. Correlations are taken within each sequence, over
the sampled keys that enough queries follow, and averaged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import rankdata
from threadpoolctl import threadpool_limits

from velox_pack.calibrators.attention_mass import AttentionMass
from velox_pack.calibrators.capture import LayerStatistics
from velox_pack.manifests.artifacts import QFilters
from velox_pack.manifests.artifacts_attention import FilterReport
from velox_pack.manifests.errors import CalibrationError

Array = np.ndarray

FOLLOWED = 32  # queries that a key needs behind it, for its mean attention to mean something


@dataclass(frozen=True)
class HeadReport:
    """One KV head; see `FilterReport` for what each number is."""

    layer: int
    head: int
    projection: float
    positive: float
    anisotropy: float
    second: float
    correlation: float
    correlation_norm: float
    correlation_keys: float


def fit(
    filters: Sequence[QFilters],
    statistics: Mapping[int, LayerStatistics],
    mass: Mapping[int, AttentionMass],
) -> tuple[FilterReport, ...]:
    """One report for each artifact of filters, float32 [L, H] each, over the same layers."""
    reports = []
    for artifact in filters:
        heads = [
            layer_report(np.asarray(artifact.filters)[n], statistics[i], mass[i])
            for n, i in enumerate(artifact.layers)
        ]
        columns = {role: np.stack([h[role] for h in heads]) for role in FilterReport.forms}
        arrays = {role: column.astype(np.float32) for role, column in columns.items()}
        reports.append(FilterReport(**arrays, layers=artifact.layers))
    return tuple(reports)


def heads_of(report: FilterReport) -> list[HeadReport]:
    """The report as plain numbers, one entry a head (`dataclasses.asdict` makes it JSON)."""
    columns = {role: np.asarray(getattr(report, role)) for role in FilterReport.forms}
    shape = columns["projection"].shape
    return [
        HeadReport(
            layer=report.layers[n],
            head=h,
            **{role: round(float(column[n, h]), 6) for role, column in columns.items()},
        )
        for n, h in np.ndindex(*shape)
    ]


def layer_report(filters: Array, layer: LayerStatistics, mass: AttentionMass) -> dict[str, Array]:
    """Every column [H] of the report of one layer."""
    heads, dim = filters.shape
    with threadpool_limits(1):
        values, _ = np.linalg.eigh(layer.queries.second)
    singular = np.sqrt(np.maximum(values[:, ::-1], 0))
    others = np.maximum(np.sqrt(np.square(singular[:, 1:]).mean(axis=1)), 1e-30)
    along = layer.queries.mean.reshape(heads, -1, dim) @ filters[:, :, None]
    sample = mass.queries.reshape(heads, -1, dim) @ filters[:, :, None]
    axis = first_direction(layer)
    keys = layer.sample_keys.astype(np.float64)
    scores = {
        "correlation": np.einsum("hsd,hd->hs", keys, filters),
        "correlation_norm": -np.linalg.norm(keys, axis=-1),
        "correlation_keys": np.einsum("hsd,hd->hs", keys, axis),
    }
    return {
        "projection": along.mean(axis=(1, 2)),
        "positive": (sample > 0).mean(axis=(1, 2)),
        "anisotropy": (singular[:, 0] / others).reshape(heads, -1).mean(axis=1),
        "second": (singular[:, 0] / np.maximum(singular[:, 1], 1e-30))
        .reshape(heads, -1)
        .mean(axis=1),
        **{role: _correlations(score, layer, mass) for role, score in scores.items()},
    }


def first_direction(layer: LayerStatistics) -> Array:
    """First right singular vector of the keys after RoPE [H, D], along their mean: a baseline."""
    with threadpool_limits(1):
        _, vectors = np.linalg.eigh(layer.keys.second)
    axis = vectors[:, :, -1]
    along = np.einsum("hd,hd->h", layer.keys.total, axis)
    signed: Array = axis * np.where(along < 0, -1.0, 1.0)[:, None]
    return signed


def spearman(a: Array, b: Array) -> Array:
    """Rank correlation along the last axis; 0 where one side is constant."""
    a, b = rankdata(a, axis=-1), rankdata(b, axis=-1)
    a, b = a - a.mean(axis=-1, keepdims=True), b - b.mean(axis=-1, keepdims=True)
    size = np.sqrt(np.square(a).sum(axis=-1) * np.square(b).sum(axis=-1))
    result: Array = (a * b).sum(axis=-1) / np.maximum(size, 1e-30)
    return result


def _correlations(scores: Array, layer: LayerStatistics, mass: AttentionMass) -> Array:
    """Mean over sequences of the rank correlation with true mean attention, [H]."""
    length = mass.mean_mass.shape[-1]
    found = []
    for head, score in enumerate(scores):
        sequences, positions = layer.sample_sequences[head], layer.sample_positions[head]
        usable = positions < length - FOLLOWED
        each = []
        for s in range(len(mass.mean_mass)):
            at = usable & (sequences == s)
            if at.sum() > 4:
                truth = mass.mean_mass[s, head, positions[at]]
                each.append(spearman(score[at], truth) * at.sum())
        if not each:
            raise CalibrationError(
                f"layer {layer.index}: too few sampled keys are followed by {FOLLOWED} queries "
                "to judge filters: take longer sequences or a larger sample"
            )
        counted = sum(
            n for s in range(len(mass.mean_mass)) if (n := (usable & (sequences == s)).sum()) > 4
        )
        found.append(np.sum(each) / counted)
    return np.array(found)
