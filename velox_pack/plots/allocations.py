"""Bits: how an allocation spreads them over layers, keys and values, and from what."""

import numpy as np

from velox_pack.manifests.artifacts import Allocation, Widths
from velox_pack.plots.canvas import Page


def allocation(page: Page, artifact: Allocation) -> None:
    """Bits per layer, and the sensitivities that they were chosen from."""
    curves = {"keys": np.array(artifact.keys), "values": np.array(artifact.values)}
    title = f"Bits by layer, {artifact.achieved:.3g} on average"
    page.by_layer(curves, artifact.layers, title, "bits per element")
    for part in ("keys", "values"):
        found = np.array(getattr(artifact, f"sensitivity_{part}"))
        page.heat(
            found.T,
            artifact.layers,
            f"Sensitivity of {part} to errors of relative size 1",
            "nats",
            log=bool(found.max() > 0),
        )


def widths(page: Page, artifact: Widths) -> None:
    """Mean bits per layer, and the bits of each rotated coordinate."""
    tables = {part: np.array(getattr(artifact, part)) for part in ("keys", "values")}
    means = {part: table.mean(axis=1) for part, table in tables.items()}
    page.by_layer(means, artifact.layers, "Mean bits by layer", "bits per element")
    for part, table in tables.items():
        page.heat(
            table.T,
            artifact.layers,
            f"Bits of coordinates, {part}",
            "bits",
            rows="coordinate",
            limits=(0, 8),
        )
