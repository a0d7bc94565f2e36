import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # cache_support.py

import mlx.core as mx
import numpy as np
import pytest
from cache_support import Prepared, prepare, text_tokens

CALIBRATION, HELDOUT = "calibration.txt", "heldout.txt"


@pytest.fixture(scope="session")
def demo() -> Prepared:
    """The demo model, its artifacts fitted on 4,096 tokens of the calibration text."""
    return prepare("demo", text_tokens("demo", CALIBRATION, 8, 512))


@pytest.fixture(scope="session")
def heldout() -> mx.array:
    """512 tokens, int32 [512], that no calibration has seen."""
    return mx.array(text_tokens("demo", HELDOUT, 1, 512)[0])


@pytest.fixture(scope="session")
def tiny(tiny_model):
    """`tiny("qwen3")`: a tiny random model, its artifacts fitted on random tokens."""
    made = {}

    def get(architecture: str, **options) -> Prepared:
        key = repr((architecture, sorted(options.items())))
        if key not in made:
            path = tiny_model(architecture, dtype="float32", **options)
            made[key] = prepare(str(path), random_tokens(2, 96))
        return made[key]

    return get


def random_tokens(rows: int, length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (rows, length)).astype(np.int32)
