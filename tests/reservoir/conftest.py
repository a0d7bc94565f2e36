from collections.abc import Callable
from functools import cache

import mlx.core as mx
import numpy as np
import pytest

from velox_pack.calibrators.codebooks import lloyd_max


@pytest.fixture(scope="session")
def levels() -> Callable[[int], mx.array]:
    """`levels(bits)`: Lloyd-Max levels of a unit Gaussian, float32 [2^bits]."""

    @cache
    def of(bits: int) -> mx.array:
        return mx.array(lloyd_max(bits)[0].astype(np.float32))

    return of


@pytest.fixture(scope="session")
def trained(demo_path) -> dict[str, mx.array]:
    """Weights of the linear layers of the really trained demo model, float32, by name."""
    weights = mx.load(str(demo_path / "model.safetensors"))
    return {n: w.astype(mx.float32) for n, w in weights.items() if n.endswith("proj.weight")}
