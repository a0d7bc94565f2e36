"""The streaming forward computes what the plain forward does, with one layer in memory."""

import gc
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from velox_pack.calibrators.head import head
from velox_pack.calibrators.outside import product
from velox_pack.calibrators.stream import Captured, StreamingForward
from velox_pack.manifests.errors import CalibrationError
from velox_pack.source import resolve

TOKENS = np.random.default_rng(0).integers(0, 256, (2, 40)).astype(np.int32)

ARCHITECTURES = [
    ("llama", {}),
    ("qwen2", {}),
    ("qwen3", {}),
    ("phi3", {}),
    ("mistral", {}),
    ("olmo2", {}),
    ("starcoder2", {}),
    ("gemma3_text", {}),  # window of 16 in 40 tokens
    ("cohere2", {}),
    ("mixtral", {}),
    ("lfm2", {}),
    ("llama", {"quantize": (4, 64)}),
    ("llama", {"dtype": "bfloat16", "shards": 2}),
]


def plain_model(folder: Any) -> nn.Module:
    source = resolve(str(folder))
    model = source.skeleton()
    model.load_weights(list(source.weights().items()))
    model.set_dtype(mx.float32)
    return model


@pytest.mark.parametrize(("architecture", "options"), ARCHITECTURES)
def test_equals_the_plain_forward(
    tiny_model: Any, architecture: str, options: dict[str, Any]
) -> None:
    folder = tiny_model(architecture, **options)
    source = resolve(str(folder))
    model = source.skeleton()
    streaming = StreamingForward(model, source.weights)
    seen: list[Captured] = []
    hidden = streaming.run(TOKENS, seen.append)
    logits = head(streaming, TOKENS, hidden)
    expected = plain_model(folder)(mx.array(TOKENS))
    assert mx.abs(logits - expected).max().item() < 1e-3 * mx.abs(expected).max().item()
    assert {(c.layer, c.sequence) for c in seen} <= {
        (i, b) for i in range(len(model.layers)) for b in range(2)
    }
    assert all(a.size == 0 for _, a in tree_flatten(model.parameters()))
    assert type(model.layers[0]) is type(source.skeleton().layers[0])


def test_what_is_captured_is_what_attention_saw(tiny_model: Any) -> None:
    folder = tiny_model("qwen3")
    source = resolve(str(folder))
    seen: dict[tuple[int, int], Captured] = {}
    StreamingForward(source.skeleton(), source.weights).run(
        TOKENS, lambda c: seen.__setitem__((c.layer, c.sequence), c)
    )
    model = plain_model(folder)
    layer = model.layers[0]
    x = layer.input_layernorm(model.model.embed_tokens(mx.array(TOKENS)))
    attention = layer.self_attn
    keys = attention.k_norm(attention.k_proj(x).reshape(2, 40, 2, -1)).transpose(0, 2, 1, 3)
    values = attention.v_proj(x).reshape(2, 40, 2, -1).transpose(0, 2, 1, 3)
    for b in range(2):
        c = seen[0, b]
        assert c.keys_before is not None
        assert mx.allclose(c.keys_before, keys[b], atol=1e-4)
        assert mx.allclose(c.keys, attention.rope(keys)[b], atol=1e-4)
        assert mx.allclose(c.values, values[b], atol=1e-4)
        assert c.queries.shape == (4, 40, 64)


def test_one_layer_is_in_memory_at_a_time(tiny_model: Any) -> None:
    source = resolve(str(tiny_model("llama", num_hidden_layers=6)))
    model = source.skeleton()
    filled: list[list[int]] = []

    def look(captured: Captured) -> None:
        sizes = [sum(a.size for _, a in tree_flatten(layer.parameters())) for layer in model.layers]
        filled.append([i for i, size in enumerate(sizes) if size])
        assert model.model.embed_tokens.weight.size == 0

    StreamingForward(model, source.weights).run(TOKENS, look)
    assert filled == [[i] for i in range(6) for _ in range(2)]


def test_replaced_keys_and_values_reach_the_model(tiny_model: Any) -> None:
    source = resolve(str(tiny_model("llama")))
    streaming = StreamingForward(source.skeleton(), source.weights)
    exact = streaming.run(TOKENS)
    same = streaming.run(TOKENS, replace=lambda layer, call: (call.keys, call.values))
    other = streaming.run(TOKENS, replace=lambda layer, call: (call.keys, 2 * call.values))
    assert mx.array_equal(exact, same)
    assert mx.abs(exact - other).max().item() > 0.1


def test_missing_weights_are_named(tiny_model: Any) -> None:
    source = resolve(str(tiny_model("llama")))

    def without() -> dict[str, mx.array]:
        weights = source.weights()
        del weights["model.layers.1.mlp.up_proj.weight"]
        return weights

    with pytest.raises(CalibrationError, match=r"lack model.layers.1.mlp.up_proj.weight"):
        StreamingForward(source.skeleton(), without).run(TOKENS)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("model.layers.2.mlp.down_proj.weight", "layer 2"),
        ("model.embed_tokens.weight", "embedding"),
    ],
)
def test_non_finite_weights_are_named(tiny_model: Any, name: str, what: str) -> None:
    source = resolve(str(tiny_model("llama")))

    def spoiled() -> dict[str, mx.array]:
        weights = source.weights()
        weights[name] = mx.full(weights[name].shape, mx.nan)
        return weights

    model = source.skeleton()
    kind = type(model.layers[0])
    with pytest.raises(CalibrationError, match=f"{what}.*{name}"):
        StreamingForward(model, spoiled).run(TOKENS)
    assert type(model.layers[0]) is kind


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (["self_attn.q_proj"], "queries"),
        (["self_attn.k_proj"], "keys before RoPE"),
        (["self_attn.v_proj"], "values"),
        (["mlp.up_proj", "mlp.down_proj"], "output"),
    ],
)
@pytest.mark.parametrize("hooked", [False, True])
def test_overflowing_activations_name_layer_and_tensor(
    tiny_model: Any, names: list[str], what: str, hooked: bool
) -> None:
    source = resolve(str(tiny_model("llama")))

    def huge() -> dict[str, mx.array]:
        weights = {n: a.astype(mx.float32) for n, a in source.weights().items()}
        for name in names:
            weights[f"model.layers.1.{name}.weight"] *= 1e38 if len(names) == 1 else 1e25
        return weights

    streaming = StreamingForward(source.skeleton(), huge)
    with pytest.raises(CalibrationError) as caught:
        streaming.run(TOKENS, (lambda captured: None) if hooked else None)
    expected = f"layer 1: {what}: activations hold NaN or infinity (weights are finite)"
    assert str(caught.value) == expected


def test_what_layers_read_from_a_source_is_freed(tiny_model: Any) -> None:
    """Weights must not stay in memory until Python collects its cycles."""
    source = resolve(str(tiny_model("llama", hidden_size=256, intermediate_size=1024)))
    layer = sum(a.nbytes for a in source.weights().values()) / 3
    gc.collect()
    gc.disable()
    try:
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.eval(StreamingForward(source.skeleton(), source.weights).run(TOKENS))
        assert mx.get_active_memory() - before < layer / 2
    finally:
        gc.enable()


def test_products_with_large_tables_go_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("velox_pack.calibrators.outside._BLOCK", 100)
    rng = np.random.default_rng(1)
    x = mx.array(rng.standard_normal((2, 3, 16)).astype(np.float32))
    weight = mx.array(rng.standard_normal((50, 16)).astype(np.float32))
    other = mx.array(rng.standard_normal((2, 3, 50)).astype(np.float32))
    assert mx.allclose(product(x, weight.astype(mx.bfloat16)), x @ weight.T, atol=0.1)
    assert mx.allclose(product(x, weight), x @ weight.T, atol=1e-5)
    gradient = mx.grad(lambda a: (product(a, weight) * other).sum())(x)
    assert mx.allclose(gradient, other @ weight, atol=1e-5)
