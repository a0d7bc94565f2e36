"""The demo model, calibrated once for all tests of this room on a little of the built-in text."""

from dataclasses import dataclass

import numpy as np
import pytest

from velox_pack.calibrators.capture import LayerStatistics, capture
from velox_pack.calibrators.stream import StreamingForward
from velox_pack.calibrators.text import load_text, sequences
from velox_pack.calibrators.trace import LayerTrace, trace
from velox_pack.source import Source, data_folder, resolve


@dataclass(frozen=True)
class Demo:
    source: Source
    traces: list[LayerTrace]
    tokens: np.ndarray
    heldout: np.ndarray
    statistics: dict[int, LayerStatistics]

    def streaming(self) -> StreamingForward:
        return StreamingForward(self.source.skeleton(), self.source.weights)


@pytest.fixture(scope="session")
def demo() -> Demo:
    """The really trained demo model: 4 x 256 tokens for calibration, 512 held out."""
    source = resolve("demo")
    traces = trace(source.skeleton())
    tokenizer = source.tokenizer()
    tokens = sequences(tokenizer, load_text(), 1024, 256, seed=0)
    heldout = sequences(
        tokenizer, load_text(data_folder() / "text" / "heldout.txt"), 512, 512, seed=0
    )
    streaming = StreamingForward(source.skeleton(), source.weights)
    return Demo(source, traces, tokens, heldout, capture(streaming, tokens, traces, sample=512))
