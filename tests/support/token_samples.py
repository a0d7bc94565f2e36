"""Token samples for tests of calibrations: made from arrays, or taken from the demo model once."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from velox_pack.calibrators.neighbours import RUN, LayerTokens, Neighbours
from velox_pack.calibrators.sinks import LayerMass, Masses
from velox_pack.calibrators.trace import LayerTrace

_TAKEN: dict[int, Any] = {}


def made(
    keys: Sequence[np.ndarray], values: Sequence[np.ndarray] | None = None, rope: Any = None
) -> dict[int, LayerTokens]:
    """Layers 0, 1, ... with these keys and values [H, S, D]."""
    return {
        i: LayerTokens(
            LayerTrace(i, "full", kv_heads=k.shape[0], k_dim=k.shape[2], rope=rope, covered=True),
            k.astype(np.float32),
            v.astype(np.float32),
            np.arange(k.shape[1]),
            np.zeros(k.shape[1], np.int64),
            RUN,
        )
        for i, (k, v) in enumerate(zip(keys, values or keys, strict=True))
    }


def of_demo(
    demo: Any,
) -> tuple[dict[int, LayerTokens], dict[int, LayerTokens], dict[int, LayerMass]]:
    """Samples of the calibration and of the held-out tokens, and attention of the former."""
    if id(demo) not in _TAKEN:
        tokens, held = (Neighbours(demo.traces, t.shape) for t in (demo.tokens, demo.heldout))
        masses = Masses(demo.traces)
        mx.eval(demo.streaming().run(demo.tokens, lambda c: [tokens(c), masses(c)][-1]))
        mx.eval(demo.streaming().run(demo.heldout, held))
        _TAKEN[id(demo)] = tokens.done(), held.done(), masses.done()
    found: tuple[Any, Any, Any] = _TAKEN[id(demo)]
    return found


def rows_of(artifacts: Sequence[Any]) -> dict[int, tuple[Any, int]]:
    """Artifact and row of each layer."""
    return {layer: (a, n) for a in artifacts for n, layer in enumerate(a.layers)}


def same_bytes(first: Sequence[Any], second: Sequence[Any]) -> bool:
    """Whether two fits gave the very same tensors and parameters."""
    return all(
        a.parameters() == b.parameters()
        and all(x.tobytes() == b.to_tensors()[r].tobytes() for r, x in a.to_tensors().items())
        for a, b in zip(first, second, strict=True)
    )
