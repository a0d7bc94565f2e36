import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # cache_support.py

import mlx.core as mx
import pytest
from cache_support import Prepared, prepare, random_tokens, text_tokens

CALIBRATION, HELDOUT = "calibration.txt", "heldout.txt"


@pytest.fixture(scope="session")
def demo() -> Prepared:
    """The demo model, its artifacts fitted on 2,048 tokens of the calibration text."""
    return prepare("demo", text_tokens("demo", CALIBRATION, 4, 512))


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
