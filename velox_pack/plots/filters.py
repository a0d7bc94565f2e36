"""Filters of keys: where their directions lie, and the statistics that a report has."""

import numpy as np

from velox_pack.calibrators.spectral import participation_ratio
from velox_pack.manifests.artifacts import QFilters
from velox_pack.manifests.artifacts_attention import AttentionFilter, FilterReport
from velox_pack.plots.canvas import Page


def directions(page: Page, artifact: QFilters | AttentionFilter) -> None:
    """Energy of the filters by channel, and over how many channels it is spread."""
    energy = np.square(np.array(artifact.filters).astype(np.float64))
    energy /= np.maximum(energy.sum(axis=-1, keepdims=True), 1e-30)
    page.heat(
        energy.mean(axis=1).T,
        artifact.layers,
        "Energy of the filters, mean of heads",
        "share of energy",
        rows="channel",
        log=True,
    )
    title = f"Channels that carry a filter, of {energy.shape[-1]}"
    page.heat(participation_ratio(energy).T, artifact.layers, title, "channels")


# Tensors of a report -> title and unit; one that is not listed has its own name.
_TITLES = {
    "projection": ("Mean projection of queries on the filter", "q . filter"),
    "positive": ("Queries on the filter's side", "share"),
    "anisotropy": ("First singular value over the mean of the others", "ratio"),
    "second": ("First singular value over the second", "ratio"),
    "correlation": ("Attention and the filter's scores", "rank corr."),
    "correlation_norm": ("Attention and minus the norm of keys", "rank corr."),
    "correlation_keys": ("Attention and the first direction of keys", "rank corr."),
}


def report(page: Page, artifact: FilterReport) -> None:
    """A map of each tensor [L, H] of a report, whatever it is called."""
    for role in artifact.forms:
        values = np.array(getattr(artifact, role))
        if values.ndim == 2 and np.issubdtype(values.dtype, np.floating):
            title, unit = _TITLES.get(role, (role, "value"))
            limits = (-1.0, 1.0) if role.startswith("correlation") else None
            page.heat(values.T, artifact.layers, title, unit, limits=limits)
