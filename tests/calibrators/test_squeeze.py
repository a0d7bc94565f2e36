"""Similarity before and after attention is measured where it is, whatever the layer's wiring."""

from itertools import product
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.base import create_attention_mask

from velox_pack.calibrators import squeeze
from velox_pack.calibrators.stream import StreamingForward
from velox_pack.manifests.errors import CalibrationError
from velox_pack.source import resolve


def after_attention(architecture: str, layer: Any, x: mx.array, mask: Any) -> mx.array:
    """As the architecture's own code has it."""
    if architecture == "olmo2":
        return x + layer.post_attention_layernorm(layer.self_attn(x, mask))
    out = layer.self_attn(layer.input_layernorm(x), mask)
    if architecture == "gemma3_text":
        out = layer.post_attention_layernorm(out)
    return x + out


@pytest.mark.parametrize("architecture", ["llama", "phi3", "qwen3", "olmo2", "gemma3_text"])
def test_the_state_after_attention_is_found(tiny_model: Any, architecture: str) -> None:
    source = resolve(str(tiny_model(architecture, dtype="float32")))
    model = source.skeleton()
    model.load_weights(list(source.weights().items()))
    seen: dict[int, float] = {}
    x = model.model.embed_tokens(mx.array(np.arange(1, 15)[None]))  # inside the window
    if architecture == "gemma3_text":
        x = x * mx.array(model.args.hidden_size**0.5, mx.bfloat16).astype(x.dtype)
    mask = create_attention_mask(x, None)
    for i, layer in enumerate(model.layers):
        seen[i] = squeeze.similarity(x, after_attention(architecture, layer, x, mask))
        x = layer(x, mask, None)
    change = squeeze.HiddenChange()
    attend = mx.fast.scaled_dot_product_attention
    streaming = StreamingForward(source.skeleton(), source.weights)
    with change.watching(streaming.layers):
        streaming.run(np.arange(1, 15, dtype=np.int32)[None])
    assert mx.fast.scaled_dot_product_attention is attend
    found = change.done()
    assert list(found) == list(seen)
    np.testing.assert_allclose(list(found.values()), list(seen.values()), atol=2e-4)
    assert max(found.values()) < 0.9999


def test_attention_beside_the_mlp(tiny_model: Any) -> None:
    source = resolve(str(tiny_model("cohere2", dtype="float32")))
    model = source.skeleton()
    model.load_weights(list(source.weights().items()))
    x = model.model.embed_tokens(mx.array(np.arange(1, 15)[None]))
    layer = model.layers[0]
    mask = create_attention_mask(x, None)
    wanted = squeeze.similarity(x, x + layer.self_attn(layer.input_layernorm(x), mask))
    change = squeeze.HiddenChange()
    streaming = StreamingForward(source.skeleton(), source.weights)
    with change.watching(streaming.layers):
        streaming.run(np.arange(1, 15, dtype=np.int32)[None])
    np.testing.assert_allclose(change.done()[0], wanted, atol=1e-5)


def test_layers_without_attention_are_missed(tiny_model: Any) -> None:
    source = resolve(str(tiny_model("lfm2", dtype="float32")))
    change = squeeze.HiddenChange()
    streaming = StreamingForward(source.skeleton(), source.weights)
    with change.watching(streaming.layers):
        streaming.run(np.arange(1, 15, dtype=np.int32)[None])
    assert list(change.done()) == [1, 3]
    with pytest.raises(CalibrationError, match="layer 0: attention was not seen"):
        squeeze.fit(change.done(), {0: (2, 8, 8)})


def test_clusters_are_the_best_there_are() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        values = rng.random(7)

        def cost(group: Any, values: np.ndarray = values) -> float:
            parts = [values[np.array(group) == g] for g in set(group)]
            return float(sum(np.square(p - p.mean()).sum() for p in parts))

        found = squeeze.clusters(values)
        best = min(product(range(3), repeat=7), key=cost)
        assert cost(tuple(found)) <= cost(best) + 1e-12
        means = [values[found == g].mean() for g in range(3)]
        assert means == sorted(means)


def test_budgets_of_layers() -> None:
    alike = squeeze.shares([0.9] * 5, 0.3)
    np.testing.assert_array_equal(alike, np.ones(5))
    found = squeeze.shares([0.5, 0.52, 0.7, 0.98, 0.99], 0.3)
    np.testing.assert_allclose(found, [1.4666667, 1.4666667, 1.4666667, 0.3, 0.3])
    shapes = {0: (2, 8, 8), 1: (2, 8, 8), 2: (4, 8, 8)}
    first, second = squeeze.fit({0: 0.5, 1: 0.99, 2: 0.7}, shapes)
    assert (first.layers, second.layers) == ((0, 1), (2,))
    np.testing.assert_allclose(first.at(1 / 8)[:, 0], [1.65, 0.35], rtol=1e-6)
    for artifact in (first, second):
        artifact.to_tensors()
    with pytest.raises(CalibrationError, match="p = 0"):
        squeeze.fit({}, shapes, 0)
