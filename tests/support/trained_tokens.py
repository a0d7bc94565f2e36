"""Keys and values of the demo model, once for all tests that code them."""

from functools import cache

import mlx.core as mx
import numpy as np

from velox_pack.calibrators.neighbours import LayerTokens, Neighbours
from velox_pack.calibrators.stream import StreamingForward
from velox_pack.calibrators.text import load_text, sequences
from velox_pack.calibrators.trace import trace
from velox_pack.source import data_folder, resolve

Tokens = dict[int, LayerTokens]


@cache
def trained() -> tuple[Tokens, Tokens]:
    """Samples of 1,024 tokens of the calibration text and of 512 held-out ones, by layer."""
    source = resolve("demo")
    traces = trace(source.skeleton())
    found = []
    for text, count in (
        (load_text(), 1024),
        (load_text(data_folder() / "text" / "heldout.txt"), 512),
    ):
        tokens = sequences(source.tokenizer(), text, count, 256, seed=0)
        taken = Neighbours(traces, tokens.shape)
        mx.eval(StreamingForward(source.skeleton(), source.weights).run(tokens, taken))
        found.append(taken.done())
    return found[0], found[1]


def relative(x: np.ndarray, y: np.ndarray) -> float:
    """Squared error of y relative to x about its mean by channel, [H, N, D]."""
    return float(np.square(x - y).sum() / np.square(x - x.mean(axis=1, keepdims=True)).sum())


def rounded(x: np.ndarray, bits: int) -> np.ndarray:
    """mlx's rounding of rows [H, N, D] in groups of 32: bits + 1 bits a number."""
    packed = mx.quantize(mx.array(x.astype(np.float32)), group_size=32, bits=bits)
    return np.array(mx.dequantize(*packed, group_size=32, bits=bits))


def through(codec, x: np.ndarray, start: int = 4) -> np.ndarray:
    """Vectors [H, N, D] through a codec, float32."""
    y = mx.array(x.astype(np.float32))[None]
    return np.array(codec.decode(codec.encode(y, start), start, mx.float32))[0]
