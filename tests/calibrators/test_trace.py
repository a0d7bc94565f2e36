"""What tracing says of each architecture, and that it costs and leaves nothing behind."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import base as mlx_lm_base
from mlx_lm.utils import _get_classes

from velox_pack.calibrators.hooks import watch_attention
from velox_pack.calibrators.trace import LayerTrace, RopeSpec, refuse_if_uncovered, trace
from velox_pack.kernels import apply_rope, rope_angles
from velox_pack.manifests.errors import CalibrationError

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
}
NORM = {"layer_norm_eps": 1e-5}
MLA = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
LONG = {
    "type": "longrope",
    "original_max_position_embeddings": 256,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
}


def build(model_type: str, **config: Any) -> nn.Module:
    full = BASE | {"model_type": model_type} | config
    model_class, args_class = _get_classes(full)
    return model_class(args_class.from_dict(full))


# Covered in full, with RoPE undone in every layer.
PLAIN: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "phi3": {"rope_scaling": None, "original_max_position_embeddings": 512},
    "mistral": {},
    "olmo2": {},
    "starcoder2": {"norm_epsilon": 1e-5},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
}


@pytest.mark.parametrize("architecture", PLAIN)
def test_plain_architectures_are_covered(architecture: str) -> None:
    traces = trace(build(architecture, **PLAIN[architecture]))
    assert [t.index for t in traces] == [0, 1, 2]
    for t in traces:
        assert (t.covered, t.routed, t.reason, t.attention) == (True, True, None, "full")
        assert (t.heads, t.kv_heads, t.k_dim, t.v_dim) == (4, 2, 16, 16)
        assert (t.scale, t.window, t.cache_index) == (0.25, None, t.index)
        assert t.rope is not None
        assert t.rope.dims == 16


def test_sliding_layers() -> None:
    traces = trace(
        build(
            "gemma3_text",
            query_pre_attn_scalar=16,
            sliding_window=16,
            sliding_window_pattern=3,
            rope_local_base_freq=100.0,
        )
    )
    assert [(t.attention, t.window) for t in traces] == [
        ("sliding", 16),
        ("sliding", 16),
        ("full", None),
    ]
    second = [t.rope.inv_freq[1] for t in traces if t.rope]
    assert second == pytest.approx([100 ** (-1 / 8)] * 2 + [1e4 ** (-1 / 8)])


def test_layers_without_rope_and_partial_and_concatenated_rope() -> None:
    traces = trace(build("cohere2", **NORM, sliding_window=16, sliding_window_pattern=3))
    assert [t.rope is not None for t in traces] == [True, True, False]
    assert traces[0].rope is not None
    assert traces[0].rope.traditional
    assert all(t.covered for t in traces)

    partial = build("gpt_neox", **NORM, rotary_pct=0.25, rotary_emb_base=10000)
    assert [t.rope.dims for t in trace(partial) if t.rope] == [4, 4, 4]

    gptj = build(
        "gptj",
        n_embd=64,
        n_head=4,
        n_layer=3,
        n_positions=128,
        rotary_dim=8,
        n_inner=None,
        layer_norm_epsilon=1e-5,
    )
    assert [t.rope.dims for t in trace(gptj) if t.rope] == [8, 8, 8]  # a slice, put back

    # Keys and values are cached in full, of different sizes: a latent only inside the layer.
    minicpm3 = build(
        "minicpm3",
        **MLA | {"qk_nope_head_dim": 16},
        dim_model_base=64,
        scale_depth=1.0,
        scale_emb=1.0,
        rope_scaling=LONG | {"short_factor": [1.0] * 4, "long_factor": [1.0] * 4},
    )
    assert [(t.covered, t.k_dim, t.v_dim) for t in trace(minicpm3)] == [(True, 24, 16)] * 3


def test_hybrids_have_their_attention_layers_covered() -> None:
    model = build(
        "lfm2",
        norm_eps=1e-5,
        conv_bias=False,
        conv_L_cache=3,
        block_dim=64,
        block_ff_dim=96,
        block_multiple_of=8,
        block_ffn_dim_multiplier=1.0,
        block_auto_adjust_ff_dim=False,
        full_attn_idxs=[1],
    )
    traces = trace(model)
    assert [t.covered for t in traces] == [False, True, False]
    assert [t.attention for t in traces] == ["none", "full", "none"]
    refuse_if_uncovered(traces)


MAMBA = {
    "state_size": 16,
    "conv_kernel": 4,
    "intermediate_size": 128,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_rank": 4,
}
STABLELM = NORM | {"partial_rotary_factor": 0.25, "use_qkv_bias": False}
GEMMA2 = {
    "query_pre_attn_scalar": 16,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}
DEEPSEEK = MLA | {
    "n_routed_experts": None,
    "moe_intermediate_size": 32,
    "n_shared_experts": None,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 3,
    "rope_scaling": None,
}
FALCON_H1 = dict.fromkeys(
    (
        "attention_in_multiplier",
        "attention_out_multiplier",
        "embedding_multiplier",
        "key_multiplier",
        "lm_head_multiplier",
        "ssm_in_multiplier",
        "ssm_out_multiplier",
    ),
    1.0,
) | {
    "mamba_d_ssm": 64,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_d_head": 16,
    "mamba_n_heads": 4,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mlp_multipliers": [1.0, 1.0],
    "ssm_multipliers": [1.0] * 5,
}


@pytest.mark.parametrize(
    ("architecture", "config", "reason", "routed", "attention"),
    [
        ("mamba", MAMBA, "no attention", False, "none"),
        ("gemma2", GEMMA2, "computes attention by itself", False, "full"),
        ("deepseek_v3", DEEPSEEK, "latent attention", True, "other"),
        ("stablelm", STABLELM, "between the cache", True, "other"),
        ("falcon_h1", FALCON_H1, "one part of a CacheList", True, "full"),
    ],
)
def test_what_cannot_be_handled_is_refused_in_one_line(
    architecture: str, config: dict[str, Any], reason: str, routed: bool, attention: str
) -> None:
    traces = trace(build(architecture, **config))
    for t in traces:
        assert (t.covered, t.rope, t.routed) == (False, None, routed)
        assert t.attention == attention
        assert t.reason is not None
        assert reason in t.reason
    with pytest.raises(CalibrationError, match="layers 0-2: ") as caught:
        refuse_if_uncovered(traces)
    assert "\n" not in str(caught.value)


def test_shared_keys_and_values_leave_out_borrower_and_lender() -> None:
    text = BASE | {
        "model_type": "gemma3n_text",
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": 128,
        "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "activation_sparsity_pattern": [0.0] * 6,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
        "altup_num_inputs": 2,
        "altup_correct_scale": True,
        "altup_active_idx": 0,
        "altup_coef_clip": 120.0,
        "query_pre_attn_scalar": 16,
        "rope_local_base_freq": 1e4,
        "final_logit_softcapping": 30.0,
    }
    traces = trace(build("gemma3n", text_config=text))
    assert [t.covered for t in traces] == [True, True, False, False, False, False]
    assert [t.reason for t in traces[2:]] == [
        "lends its keys and values to layer 4",
        "lends its keys and values to layer 5",
        "attends to keys and values of layer 2",
        "attends to keys and values of layer 3",
    ]


SCALINGS: list[tuple[dict[str, Any], bool]] = [
    ({"rope_scaling": {"type": "linear", "factor": 4.0}}, True),
    (
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 256,
            }
        },
        True,
    ),
    (
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 256,
            }
        },
        True,
    ),
    ({"rope_scaling": LONG}, True),
    ({"rope_traditional": True}, True),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, False),  # its base grows
]


@pytest.mark.parametrize(("config", "can_be_undone"), SCALINGS)
def test_rope_tables_turn_keys_as_the_model_does(
    config: dict[str, Any], can_be_undone: bool
) -> None:
    model = build("llama", **config)
    spec = trace(model)[0].rope
    assert (spec is not None) == can_be_undone
    if spec is None:
        return
    keys = mx.array(np.random.default_rng(0).standard_normal((1, 2, 8, 16)).astype(np.float32))
    rope = model.layers[0].self_attn.rope
    with watch_attention(model) as watch:
        after = rope(keys, offset=700)
    tables = rope_angles(mx.array(spec.inv_freq), mx.arange(700, 708))
    ours = apply_rope(watch.ropes[0].before, *tables, spec.traditional)
    assert mx.abs(ours - after).max().item() < 2e-4


def test_normalizing_after_rope_stays_after_rope() -> None:
    model = build(
        "hunyuan_v1_dense",
        use_qk_norm=True,
        rope_scaling={"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
    )
    assert [(t.covered, t.rope) for t in trace(model)] == [(True, None)] * 3


def test_a_trace_evaluates_nothing_and_puts_everything_back() -> None:
    mx.clear_cache()
    before = mx.get_active_memory()
    model = build("llama", hidden_size=8192, intermediate_size=28672, vocab_size=128256)
    rope, attend, layer = mx.fast.rope, mlx_lm_base.scaled_dot_product_attention, model.layers[0]
    kind = type(layer)
    assert all(t.covered for t in trace(model))
    assert mx.get_active_memory() - before < 1e6  # 10 GB of weights were never drawn
    assert mx.fast.rope is rope
    assert mlx_lm_base.scaled_dot_product_attention is attend
    assert sys.modules["mlx_lm.models.llama"].scaled_dot_product_attention is attend
    assert type(layer) is kind


def test_a_model_file_of_its_own_is_seen(tmp_path: Path) -> None:
    """As mlx-lm loads `model_file`: the module is not in sys.modules."""
    (tmp_path / "own.py").write_text("from mlx_lm.models.llama import *\n" + OWN_ATTENTION)
    spec = importlib.util.spec_from_file_location("own_model", tmp_path / "own.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model = module.Model(module.ModelArgs.from_dict(BASE | {"model_type": "llama"}))
    assert all(t.covered and t.rope for t in trace(model))
    assert module.attend is mlx_lm_base.scaled_dot_product_attention


OWN_ATTENTION = """
from mlx_lm.models import llama
from mlx_lm.models.base import scaled_dot_product_attention as attend

class Own(llama.Attention):
    def __call__(self, x, mask=None, cache=None):
        B, L, _ = x.shape
        q, k, v = (
            p(x).reshape(B, L, n, -1).transpose(0, 2, 1, 3)
            for p, n in ((self.q_proj, self.n_heads), (self.k_proj, self.n_kv_heads),
                         (self.v_proj, self.n_kv_heads))
        )
        q, k = (self.rope(a, offset=cache.offset if cache else 0) for a in (q, k))
        if cache is not None:
            k, v = cache.update_and_fetch(k, v)
        out = attend(q, k, v, cache=cache, scale=self.scale, mask=mask)
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(B, L, -1))

class Model(llama.Model):
    def __init__(self, args):
        super().__init__(args)
        for layer in self.layers:
            layer.self_attn = Own(args)
"""


def test_errors_are_one_line() -> None:
    class NoLayers(nn.Module):
        pass

    with pytest.raises(CalibrationError, match="no list of layers"):
        trace(NoLayers())
    broken = build("llama")
    broken.layers[1].self_attn.n_heads = 3
    with pytest.raises(CalibrationError, match="cannot trace llama: ") as caught:
        trace(broken)
    assert "\n" not in str(caught.value)
    with pytest.raises(CalibrationError, match=r"layers 0, 2: b; layer 1: a"):
        refuse_if_uncovered(
            [LayerTrace(i, "other", reason=r) for i, r in enumerate(("b", "a", "b"))]
        )


def test_specs_compare_by_value() -> None:
    assert RopeSpec(4, False, (1.0, 0.5)) == RopeSpec(4, False, (1.0, 0.5))
