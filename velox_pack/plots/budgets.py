"""Budgets: what share of the keys that may be kept each layer, or each head, gets."""

import numpy as np

from velox_pack.manifests.artifacts_attention import Budgets
from velox_pack.plots.canvas import Page

_SHOWN = 1 / 8  # the budget whose shares are mapped by head
_MOST = 4  # budgets with a line of their own


def budgets(page: Page, artifact: Budgets) -> None:
    """Shares by layer for some budgets, and by head for one of them; 1 is the same for all."""
    shares, ratios = np.array(artifact.shares), np.array(artifact.ratios)
    some = np.unique(np.linspace(0, len(ratios) - 1, min(_MOST, len(ratios))).round().astype(int))
    curves = {f"{100 * ratios[k]:.3g} %": shares[:, :, k].mean(axis=1) for k in some}
    title = f"Shares by layer when so many keys are kept ({artifact.method})"
    page.by_layer(curves, artifact.layers, title, "share / mean")
    if shares.shape[1] > 1:
        k = int(np.abs(np.log(ratios / _SHOWN)).argmin())
        title = f"Shares by head when {100 * ratios[k]:.3g} % of the keys are kept"
        page.heat(shares[:, :, k].T, artifact.layers, title, "share / mean")
