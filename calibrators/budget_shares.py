"""Shares of a common budget of keys, as all methods return them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from velox_pack.calibrators.attention_mass import RATIOS
from velox_pack.calibrators.trace import LayerTrace
from velox_pack.manifests.artifacts_attention import Budgets
from velox_pack.manifests.errors import CalibrationError

Array = np.ndarray
# (KV heads, key dimension, value dimension) of each layer that takes part.
Shapes = Mapping[int, tuple[int, ...]]


def shapes_of(traces: Sequence[LayerTrace]) -> dict[int, tuple[int, ...]]:
    """Shapes of the covered layers that see all keys: a window is a budget of its own."""
    wanted = [t for t in traces if t.covered and t.window is None]
    return {t.index: (t.kv_heads, t.k_dim, t.v_dim) for t in wanted}


def by_shape(
    shapes: Shapes,
    method: str,
    details: dict[str, Any],
    make: Callable[[list[int]], Array],
) -> tuple[Budgets, ...]:
    """One artifact for each shape, from `make(layers)` -> shares [L, H or 1, K].

    A token costs the same bytes in all of an artifact's layers, so an equal mean is equal memory.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for index in sorted(shapes):
        groups.setdefault(tuple(shapes[index]), []).append(index)
    if not groups:
        raise CalibrationError("budgets were asked for without a layer")
    return tuple(
        Budgets(
            method=method,
            details=details,
            ratios=np.array(RATIOS[::-1], np.float32),
            shares=np.ascontiguousarray(capped(make(layers))[..., ::-1]).astype(np.float32),
            layers=tuple(layers),
        )
        for layers in groups.values()
    )


def capped(shares: Array) -> Array:
    """Shares [L, G, K] of mean 1 at each of RATIOS, none of more keys than there are.

    What is above goes to the others, in proportion to the room that they have.
    """
    most = 1 / np.array(RATIOS)
    scaled = shares / shares.mean(axis=(0, 1))
    within = np.minimum(scaled, most)
    over = (scaled - within).sum(axis=(0, 1))
    room = (most - within).sum(axis=(0, 1))
    filled: Array = within + (most - within) * over / np.maximum(room, 1e-30)
    return filled
