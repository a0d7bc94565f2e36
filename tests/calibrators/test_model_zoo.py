"""What is captured of each architecture, what is left alone and why, or how it is refused.

A row of the table stands for a run of layers that are alike: kind of attention and its window,
query heads : KV heads x size of a key / of a value, and what RoPE turns (its first coordinates),
or the reason why keys stay as they are after it, or why the layer is left alone.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from velox_pack.calibrators.capture import LayerStatistics, capture
from velox_pack.calibrators.hooks import LayerCall, replaced_calls
from velox_pack.calibrators.linear_inputs import LINEARS, InputMoment
from velox_pack.calibrators.stream import Captured, StreamingForward
from velox_pack.calibrators.trace import LayerTrace, trace
from velox_pack.kernels.rope import apply_rope, rope_angles
from velox_pack.manifests.errors import CalibrationError
from zoo import CONFIGS, VOCABULARY, build, draw

TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, (2, 64)).astype(np.int32)

PLAIN = "full 4:2 x 16, rope 16"
SLIDING = "sliding 16 4:2 x 16, rope 16"
NO_ROPE = "full 4:2 x 16, no rope"
TAIL = "after rope: RoPE turns the last coordinates of a key, not the first ones"
CHANGED = "after rope: keys are changed after RoPE in a way that does not commute with it"
GROWING = "after rope: RoPE's frequencies change with the length"
LATENT = "other 4:4 x 16: latent attention: its cache holds a compressed form, not keys and values"
OWN = "computes attention by itself, so its queries cannot be routed"
LENDS, BORROWS = "lends its keys and values to layer", "attends to keys and values of layer"
UNKNOWN = "may lend its keys and values: some layer attends to keys that it does not cache"

TABLE: dict[str, list[str]] = {
    "llama": [f"0-1: {PLAIN}"],
    "mistral": [f"0-1: {PLAIN}"],
    "ministral3": [f"0: {SLIDING}", f"1: {PLAIN}"],
    "qwen2": [f"0-1: {PLAIN}"],
    "qwen3": [f"0-1: {PLAIN}"],
    "phi": ["0-1: full 4:4 x 16, rope 8"],
    "phi3": [f"0-1: {PLAIN}"],
    "gemma": [f"0-1: {PLAIN}"],
    "gemma2": [f"0-1: full 0:2 x 16: {OWN}"],
    "gemma3_text": [f"0-1: {SLIDING}", f"2: {PLAIN}"],
    "gemma3n": [
        f"0: {SLIDING}",
        f"1: {PLAIN}",
        f"2: sliding 16 4:2 x 16: {LENDS} 4",
        f"3: full 4:2 x 16: {LENDS} 5",
        f"4: other 4:2 x 16: {BORROWS} 2",
        f"5: other 4:2 x 16: {BORROWS} 3",
    ],
    "gemma4_text": [
        f"0: {SLIDING}",
        "1: full 4:2 x 32, rope 32",
        f"2: sliding 16 4:2 x 16: {LENDS} 4",
        f"3: full 4:2 x 32: {LENDS} 5",
        f"4: other 4:2 x 16: {BORROWS} 2",
        f"5: other 4:2 x 32: {BORROWS} 3",
    ],
    "olmo2": [f"0-1: {PLAIN}"],
    "olmo3": [f"0: {SLIDING}", f"1: {PLAIN}"],
    "starcoder2": [f"0-1: {PLAIN}"],
    "stablelm": ["0-1: other 4:2 x 16: changes keys or values between the cache and attention"],
    "granite": [f"0-1: {PLAIN}"],
    "glm4": ["0-1: full 4:2 x 16, rope 8 traditional"],
    "nemotron": ["0-1: full 4:2 x 16, rope 8"],
    "seed_oss": [f"0-1: {PLAIN}"],
    "cohere2": [f"0-1: {SLIDING} traditional", f"2: {NO_ROPE}"],
    "exaone4": [f"0-1: {SLIDING}", f"2: {NO_ROPE}"],
    "smollm3": [f"0: {PLAIN}", f"1: {NO_ROPE}"],
    "nanochat": [f"0-1: {PLAIN}"],  # a norm without weights after RoPE
    "gpt2": ["0-1: full 4:4 x 16, no rope"],
    "gpt_bigcode": ["0-1: full 4:1 x 16, no rope"],
    "gpt_neox": ["0-1: full 4:4 x 16, rope 4"],
    "gptj": ["0-1: full 4:4 x 16, rope 8 traditional"],  # a slice, concatenated
    "minicpm3": [f"0-1: full 4:4 x 24/16, {TAIL}"],
    "hunyuan_v1_dense": [f"0-1: full 4:2 x 16, {CHANGED}"],
    "mixtral": [f"0-1: {PLAIN}"],
    "qwen3_moe": [f"0-1: {PLAIN}"],
    "olmoe": [f"0-1: {PLAIN}"],
    "gpt_oss": [f"0: {SLIDING}", f"1: {PLAIN}"],
    "afmoe": [f"0: {SLIDING}", f"1: {NO_ROPE}"],
    "llama4": ["0-2: other 4:2 x 16: keeps its keys in a ChunkedKVCache", f"3: {NO_ROPE}"],
    "llama4_text": [f"0-2: {PLAIN} traditional", f"3: {NO_ROPE}"],  # as in nanochat
    "mimo_v2_flash": ["0: sliding 16 4:2 x 16/8, rope 8", "1: full 4:2 x 16/8, rope 8"],
    "hunyuan": [f"0-3: full 4:2 x 16, {CHANGED}"],
    "deepseek_v2": [f"0-1: full 4:4 x 24/16, {TAIL}"],
    "deepseek_v3": [f"0-1: {LATENT}"],
    "glm4_moe_lite": [f"0-1: {LATENT}"],
    "longcat_flash": ["0-1: other 4:4 x 16: attends 2 times in one pass"],
    "kimi_linear": ["0: no attention", f"1: {LATENT}"],
    "iquestloopcoder": [
        "0-1: other 0:0 x 0: the model calls this layer 0 times as a whole in one pass"
    ],
    "afm7": [
        f"0-1: full 4:2 x 16: {UNKNOWN}",
        "2-3: other 4:2 x 16: attends to keys and values that it does not cache",
    ],
    "baichuan_m1": [
        "0: sliding 16 4:2 x 16: its cache is one part of a CacheList",
        "1: full 4:2 x 16: its cache is one part of a CacheList",
    ],
    "falcon_h1": ["0-1: full 4:2 x 16: its cache is one part of a CacheList"],
    "jamba": ["0: no attention", f"1: {NO_ROPE}", "2: no attention", f"3: {NO_ROPE}"],
    "nemotron_h": ["0-1: no attention", f"2: {NO_ROPE}", "3: no attention"],
    "granitemoehybrid": ["0: no attention", f"1-2: {PLAIN}"],
    "qwen3_next": ["0-2: no attention", "3: full 4:2 x 16, rope 8"],
    "lfm2": ["0: no attention", f"1: {PLAIN}"],
    "recurrent_gemma": ["0-1: no attention", "2: sliding 16 4:1 x 16, rope 8"],
    "plamo": ["0-1: other 4:4 x 16: repeats its KV heads between the cache and attention"],
    "plamo2": [
        "0: no attention",
        f"1: full 0:2 x 16: {OWN}",
        "2: no attention",
        f"3: full 0:2 x 16: {OWN}",
    ],
    "mamba": ["0-1: no attention"],
    "rwkv7": ["0-1: no attention"],
    "phi3small": [
        f"0: full 0:2 x 16: {OWN}",
        "1: full 4:2 x 16, after rope: its rotation at late positions cannot be traced",
    ],
    "internlm2": [f"0-1: full 4:2 x 16, {GROWING}"],
}

# Some layers could be held, but the model cannot be run a layer and a sequence at a time.
NOT_STREAMED = {"gemma3n": r"layer 0 takes activations of shape \[2, 2, 64, 64\]"}


def told(t: LayerTrace) -> str:
    if t.attention == "none":
        return str(t.reason)
    kind = t.attention if t.window is None else f"{t.attention} {t.window}"
    values = "" if t.v_dim == t.k_dim else f"/{t.v_dim}"
    layer = f"{kind} {t.heads}:{t.kv_heads} x {t.k_dim}{values}"
    if not t.covered:
        return f"{layer}: {t.reason}"
    if t.rope is None:
        return f"{layer}, after rope: {t.rope_reason}" if t.rope_reason else f"{layer}, no rope"
    return f"{layer}, rope {t.rope.dims}" + (" traditional" if t.rope.traditional else "")


def rows(traces: list[LayerTrace]) -> list[str]:
    runs: list[tuple[list[int], str]] = []
    for t in traces:
        if runs and runs[-1][1] == told(t):
            runs[-1][0].append(t.index)
        else:
            runs.append(([t.index], told(t)))
    return [f"{w[0]}{f'-{w[-1]}' if len(w) > 1 else ''}: {text}" for w, text in runs]


def test_the_table_is_of_the_whole_zoo() -> None:
    assert set(TABLE) == set(CONFIGS)
    assert len(TABLE) > 30


@pytest.mark.parametrize("architecture", TABLE)
def test_zoo(architecture: str) -> None:
    model = build(architecture)
    traces = trace(model)
    assert rows(traces) == TABLE[architecture]
    weights = draw(model)
    streaming = StreamingForward(model, lambda: dict(weights))
    if not any(t.covered for t in traces):
        with pytest.raises(CalibrationError, match="no layer of this model") as caught:
            capture(streaming, TOKENS, traces)
        assert "\n" not in str(caught.value)
        return
    if architecture in NOT_STREAMED:
        with pytest.raises(CalibrationError, match=NOT_STREAMED[architecture]) as caught:
            capture(streaming, TOKENS, traces)
        assert "\n" not in str(caught.value)
        return
    seen: list[Captured] = []
    moments: list[InputMoment] = []
    last: list[mx.array] = []

    def keep(index: int, x: mx.array, args: Any, kwargs: Any) -> None:
        last[:] = [x] if index == len(streaming.layers) - 1 else []

    statistics = capture(
        streaming, TOKENS, traces, sample=32, also=[seen.append], on_linear=moments.append
    )
    streaming.run(TOKENS, on_input=keep)
    covered = [t for t in traces if t.covered]
    assert list(statistics) == [t.index for t in covered]
    for t in covered:
        check_statistics(t, statistics[t.index])
        for captured in (c for c in seen if c.layer == t.index):
            check_rotation(t, captured)
    check_moments(build(architecture), moments)
    expected = plain_input_of_last_layer(architecture, weights)
    assert mx.abs(last[0] - expected).max().item() < 1e-4 * mx.abs(expected).max().item()


def check_statistics(t: LayerTrace, found: LayerStatistics) -> None:
    counts = {"queries": t.heads, "keys": t.kv_heads, "keys_before": t.kv_heads}
    for name, heads in counts.items():
        assert getattr(found, name).second.shape == (heads, t.k_dim, t.k_dim)
    assert found.values.second.shape == (t.kv_heads, t.v_dim, t.v_dim)
    assert found.sample_keys_before.shape == (t.kv_heads, 32, t.k_dim)
    assert found.rotated == (t.rope is not None)
    if t.rope is None:
        assert found.keys_before is found.keys


def check_rotation(t: LayerTrace, captured: Captured) -> None:
    """Keys before RoPE, turned by the layer's tables, are the keys that attention saw."""
    if t.rope is None:
        assert captured.keys_before is None
        return
    assert captured.keys_before is not None
    tables = rope_angles(mx.array(t.rope.inv_freq), mx.arange(captured.keys.shape[1]))
    turned = apply_rope(captured.keys_before[None], *tables, t.rope.traditional)[0]
    assert mx.abs(turned - captured.keys).max().item() < 1e-4
    assert mx.abs(captured.keys_before - captured.keys).max().item() > 0.1


def check_moments(model: nn.Module, moments: list[InputMoment]) -> None:
    """One for each linear inside the layers, of the right width, over all tokens."""
    names = {id(m): name for name, m in model.named_modules()}
    linears = {
        f"{names[id(layer)]}.{name}"
        for layer in model.layers
        for name, m in layer.named_modules()
        if isinstance(m, LINEARS)
    }
    assert sorted(path for m in moments for path in m.paths) == sorted(linears)
    assert all(m.count in (TOKENS.size, 2 * TOKENS.size) for m in moments)  # two experts a token
    assert all(np.all(np.isfinite(m.second)) for m in moments)


def plain_input_of_last_layer(architecture: str, weights: dict[str, mx.array]) -> mx.array:
    """From mlx-lm's own forward of all sequences at once."""
    model = build(architecture)
    model.load_weights(list(weights.items()))
    given: list[mx.array] = []

    def make(_index: int, _module: nn.Module, original: LayerCall) -> LayerCall:
        def call(*args: Any, **kwargs: Any) -> Any:
            given.append(args[0] if args else next(iter(kwargs.values())))
            return original(*args, **kwargs)

        return call

    with replaced_calls([model.layers[-1]], make):
        model(mx.array(TOKENS))
    mx.eval(given)
    return given[0]
