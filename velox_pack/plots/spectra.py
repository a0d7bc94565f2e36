"""Spectra: how few directions carry keys or values, by layer and head."""

import numpy as np

from velox_pack.calibrators.spectral import participation_ratio
from velox_pack.manifests.artifacts import Spectral
from velox_pack.manifests.artifacts_scalar import JointSpectral, LowRank
from velox_pack.plots.canvas import Array, Page

_FLOOR = 1e-8  # of the largest: what is 0 has no logarithm


def spectral(page: Page, artifact: Spectral) -> None:
    """Variances of a basis for each head."""
    _panels(page, artifact.layers, artifact.variance, artifact.part, "variance", "KV head")


def joint_spectral(page: Page, artifact: JointSpectral) -> None:
    """What errors in the coordinates of a basis for each group of heads cost."""
    _panels(page, artifact.layers, artifact.cost, artifact.part, "cost of an error", "head group")


def lowrank(page: Page, artifact: LowRank) -> None:
    """Variances of the latents, and how many of them are kept."""
    _panels(page, artifact.layers, artifact.variance, artifact.part, "variance", "head group")
    kept = (np.array(artifact.widths) > 0).sum(axis=-1)
    page.heat(kept.T, artifact.layers, "Latents kept", "latents", rows="head group")


def _panels(
    page: Page, layers: tuple[int, ...], spectrum: Array, part: str, what: str, unit: str
) -> None:
    """`spectrum` [L, U, D] of the units (heads or groups), descending along D."""
    found = np.array(spectrum).astype(np.float64)
    top = np.maximum(found.max(axis=-1, keepdims=True), np.finfo(np.float64).tiny)
    relative = np.maximum(found / top, _FLOOR)
    label = f"{what} / largest"
    by_layer = np.exp(np.log(relative).mean(axis=1))  # the geometric mean of the heads
    page.spectra(by_layer, layers, f"Spectrum of {part}, mean of heads", label)
    page.band(relative.reshape(-1, relative.shape[-1]), f"Spectrum of {part}, all heads", label)
    ratio = participation_ratio(found)
    title = f"Participation ratio, of {found.shape[-1]} coordinates"
    page.heat(ratio.T, layers, title, "coordinates", rows=unit)
