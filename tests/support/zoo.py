"""Tiny models of many of mlx-lm's architectures, built from a config in milliseconds.

    model = build("qwen3_next")
    weights = draw(model)

Their weights are random: they are good for shapes, for what is called in which order, and for exact
comparisons, and say nothing of quality.
"""

import zlib
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.utils import _get_classes

VOCABULARY = 128
WINDOW = 16

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
}
MOE = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
}
LATENT = MOE | {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
LONG = {
    "type": "longrope",
    "original_max_position_embeddings": 256,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
}
GRANITE = dict.fromkeys(
    ("logits_scaling", "attention_multiplier", "embedding_multiplier", "residual_multiplier"), 1.0
)
SCALES = dict.fromkeys(
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
)
GPT2 = {
    "n_ctx": 256,
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": 256,
    "layer_norm_epsilon": 1e-5,
    "num_key_value_heads": None,
    "n_inner": 96,
}
KINDS = ["sliding_attention", "full_attention"]

# Architecture -> what its config has on top of (or instead of) the base.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "ministral3": {
        "num_hidden_layers": 2,
        "rope_parameters": {
            "rope_theta": 10000.0,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 512,
        },
        "layer_types": KINDS,
        "sliding_window": WINDOW,
    },
    "qwen2": {},
    "qwen3": {},
    "phi": {"partial_rotary_factor": 0.5, "num_key_value_heads": 4},
    "phi3": {"original_max_position_embeddings": 512},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3_text": {
        "num_hidden_layers": 3,
        "query_pre_attn_scalar": 16,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 3,
        "rope_local_base_freq": 100.0,
    },
    "gemma3n": {
        "text_config": BASE
        | {
            "model_type": "gemma3n_text",
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCABULARY,
            "sliding_window": WINDOW,
            "layer_types": KINDS * 3,
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
    },
    "gemma4_text": {
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "global_head_dim": 32,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
        "sliding_window": WINDOW,
        "layer_types": KINDS * 3,
    },
    "olmo2": {},
    "olmo3": {"sliding_window": WINDOW, "layer_types": KINDS},
    "starcoder2": {},
    "stablelm": {"partial_rotary_factor": 0.25, "use_qkv_bias": False},
    "granite": GRANITE,
    "glm4": {"partial_rotary_factor": 0.5},
    "nemotron": {"norm_eps": 1e-5, "hidden_act": "relu2"},
    "seed_oss": {},
    "cohere2": {
        "num_hidden_layers": 3,
        "sliding_window": WINDOW,
        "sliding_window_pattern": 3,
    },
    "exaone4": {
        "num_hidden_layers": 3,
        "sliding_window": WINDOW,
        "sliding_window_pattern": "LLG",
    },
    "smollm3": {"no_rope_layer_interval": 2},
    "nanochat": {"num_key_value_heads": 2},
    "gpt2": GPT2,
    "gpt_bigcode": GPT2,
    "gpt_neox": {"rotary_pct": 0.25, "rotary_emb_base": 10000, "num_key_value_heads": None},
    "gptj": GPT2 | {"rotary_dim": 8},
    "minicpm3": LATENT
    | {"dim_model_base": 64, "scale_depth": 1.0, "scale_emb": 1.0, "rope_scaling": LONG},
    "hunyuan_v1_dense": {"rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}},
    "mixtral": MOE,
    "qwen3_moe": MOE,
    "olmoe": MOE,
    "gpt_oss": MOE | {"sliding_window": WINDOW, "layer_types": KINDS},
    "afmoe": MOE
    | {
        "sliding_window": WINDOW,
        "layer_types": KINDS,
        "num_dense_layers": 1,
        "num_shared_experts": 1,
    },
    "llama4": {
        "text_config": BASE
        | MOE
        | {
            "model_type": "llama4_text",
            "num_experts_per_tok": 1,
            "num_hidden_layers": 4,
            "attention_chunk_size": WINDOW,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 96,
            "use_qk_norm": True,
        }
    },
    "llama4_text": {
        "num_hidden_layers": 4,
        "intermediate_size_mlp": 96,
        "no_rope_layers": [1, 1, 1, 0],
        "use_qk_norm": True,
    },
    "mimo_v2_flash": MOE
    | {
        "hybrid_layer_pattern": [1, 0],
        "moe_layer_freq": [0, 1],
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "sliding_window_size": WINDOW,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "layernorm_epsilon": 1e-5,
        "swa_rope_theta": 1000.0,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "v_head_dim": 8,
        "swa_head_dim": 16,
        "swa_v_head_dim": 8,
        "partial_rotary_factor": 0.5,
    },
    "hunyuan": MOE
    | {
        "moe_topk": 2,
        "num_experts": 4,
        "num_shared_expert": 1,
        "use_mixed_mlp_moe": False,
        "use_qk_norm": True,
        "use_cla": True,
        "cla_share_factor": 2,
        "num_hidden_layers": 4,
        "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
    },
    "deepseek_v2": LATENT
    | {
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 256,
        }
    },
    "deepseek_v3": LATENT,
    "glm4_moe_lite": LATENT,
    "longcat_flash": LATENT
    | {
        "attention_method": "MLA",
        "zero_expert_type": "identity",
        "ffn_hidden_size": 96,
        "moe_topk": 2,
        "expert_ffn_hidden_size": 32,
        "zero_expert_num": 1,
        "num_layers": 2,
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
    },
    "kimi_linear": LATENT
    | {
        "q_lora_rank": None,
        "linear_attn_config": {
            "kda_layers": [1],
            "full_attn_layers": [2],
            "num_heads": 2,
            "head_dim": 32,
            "short_conv_kernel_size": 4,
        },
        "model_max_length": 512,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
    },
    "iquestloopcoder": {"loop_window_size": WINDOW},
    "afm7": {
        "hidden_dim": 64,
        "num_layers": 4,
        "num_kv_reuse_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
    },
    "baichuan_m1": {
        "tie_word_embeddings": False,
        "sliding_window": WINDOW,
        "sliding_window_layers": [0],
        "conv_window": 2,
    },
    "falcon_h1": SCALES
    | {
        "mamba_d_ssm": 64,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_d_head": 16,
        "mamba_n_heads": 4,
        "mamba_n_groups": 1,
        "mamba_expand": 2,
        "mlp_multipliers": [1.0, 1.0],
        "ssm_multipliers": [1.0] * 5,
    },
    "jamba": MOE
    | {
        "num_hidden_layers": 4,
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "expert_layer_offset": 1,
        "expert_layer_period": 2,
        "mamba_d_conv": 4,
        "mamba_d_state": 8,
        "mamba_expand": 2,
    },
    "nemotron_h": {
        "num_hidden_layers": 4,
        "hybrid_override_pattern": "M-*-",
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "mamba_proj_bias": False,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "n_groups": 1,
        "layer_norm_epsilon": 1e-5,
        "use_bias": False,
        "use_conv_bias": True,
    },
    "granitemoehybrid": GRANITE
    | {
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "attention"],
        "shared_intermediate_size": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_proj_bias": False,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_n_groups": 1,
        "mamba_conv_bias": True,
    },
    "qwen3_next": MOE
    | {
        "num_hidden_layers": 4,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "partial_rotary_factor": 0.5,
    },
    "lfm2": {
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 64,
        "block_ff_dim": 96,
        "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1],
    },
    "recurrent_gemma": {
        "num_hidden_layers": 3,
        "conv1d_width": 4,
        "logits_soft_cap": 30.0,
        "attention_window_size": WINDOW,
        "block_types": ["recurrent", "recurrent", "attention"],
        "num_key_value_heads": 1,
    },
    "plamo": {"n_shared_head": 2},
    "plamo2": {
        "num_hidden_layers": 4,
        "hidden_size_per_head": 16,
        "attention_window_size": 512,
        "mamba_d_state": 16,
        "mamba_num_heads": 4,
        "mamba_step": 2,
    },
    "mamba": {
        "state_size": 16,
        "conv_kernel": 4,
        "intermediate_size": 128,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 4,
    },
    "rwkv7": {
        "norm_eps": 1e-5,
        "a_low_rank_dim": 8,
        "v_low_rank_dim": 8,
        "gate_low_rank_dim": 8,
        "decay_low_rank_dim": 8,
        "head_dim": 32,
    },
    "phi3small": {
        "dense_attention_every_n_layers": 2,
        "ff_intermediate_size": 96,
        "gegelu_limit": 20.0,
        "layer_norm_epsilon": 1e-5,
        "blocksparse_block_size": 64,
    },
    "internlm2": {"bias": False, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
}


def build(architecture: str, **config: Any) -> nn.Module:
    """mlx-lm's model of a tiny config, its parameters not yet evaluated."""
    full = BASE | {"model_type": architecture} | CONFIGS.get(architecture, {}) | config
    model_class, args_class = _get_classes(full)
    model: nn.Module = model_class(args_class.from_dict(full))
    return model


def draw(model: nn.Module, seed: int = 0) -> dict[str, mx.array]:
    """Random float32 parameters by name, from name, shape and seed alone."""
    drawn: dict[str, mx.array] = {}
    flat: list[Any] = list(tree_flatten(model.parameters()))
    for name, parameter in flat:
        shape = parameter.shape
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        noise = rng.standard_normal(shape, np.float32)
        if len(shape) > 1:
            noise /= np.float32(np.sqrt(shape[-1]))
        else:
            noise = 0.2 * noise + (0 if "bias" in name else 1)
        drawn[name] = mx.array(noise.astype(np.float32))
    return drawn
