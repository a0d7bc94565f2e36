"""Tiny models with random weights, of many of mlx-lm's architectures, made in milliseconds.

    folder = make_model(tmp_path / "m", "qwen3", seed=1, dtype="float32")

Weights are drawn by name and seed with NumPy, so a model is the same bytes everywhere. They are
good for shapes, formats and exact comparisons. They are NOT trained: whatever is claimed of quality
has to be shown on really trained weights (the demo model).
"""

import json
import zlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map
from mlx_lm import utils as mlx_lm_utils

VOCABULARY = 260  # 256 bytes, then <s> </s> <a> <b>

_LLAMA = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "vocab_size": VOCABULARY,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 257,
}

# Architecture -> what its config.json has on top of (or instead of) the base above.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "attention_bias": False, "mlp_bias": False},
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "num_hidden_layers": 2,
        "num_key_value_heads": 1,
        "tie_word_embeddings": False,
        "sliding_window": None,
    },
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "rope_theta": 1e6},  # q, k, v have biases
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 64, "rope_theta": 1e6},  # q/k norm
    "phi3": {"architectures": ["Phi3ForCausalLM"], "rope_scaling": None},  # q, k, v in one linear
    "olmo2": {"architectures": ["Olmo2ForCausalLM"]},  # q/k norm over all heads
    "starcoder2": {"architectures": ["Starcoder2ForCausalLM"], "norm_epsilon": 1e-5},
    "gemma2": {  # attention of its own, soft-capped
        "architectures": ["Gemma2ForCausalLM"],
        "query_pre_attn_scalar": 32,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "gemma3_text": {  # five sliding layers, then a full one
        "architectures": ["Gemma3ForCausalLM"],
        "num_hidden_layers": 6,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "sliding_window": 16,
        "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 64,
        "rope_local_base_freq": 10000.0,
        "rope_theta": 1e6,
    },
    "cohere2": {  # every fourth layer has no RoPE
        "architectures": ["Cohere2ForCausalLM"],
        "num_hidden_layers": 4,
        "layer_norm_eps": 1e-5,
        "logit_scale": 1.0,
        "sliding_window": 16,
        "sliding_window_pattern": 4,
    },
    "gpt2": {  # no RoPE at all
        "architectures": ["GPT2LMHeadModel"],
        "n_ctx": 128,
        "n_embd": 128,
        "n_head": 4,
        "n_layer": 3,
        "n_positions": 128,
        "layer_norm_epsilon": 1e-5,
    },
    "mixtral": {  # experts
        "architectures": ["MixtralForCausalLM"],
        "num_hidden_layers": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    },
    "deepseek_v3": {  # latent attention
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 64,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "q_lora_rank": None,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "first_k_dense_replace": 2,  # all layers
        "tie_word_embeddings": False,
    },
    "lfm2": {  # convolutions and attention in turn
        "architectures": ["Lfm2ForCausalLM"],
        "num_hidden_layers": 4,
        "norm_eps": 1e-5,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_dim": 128,
        "block_ff_dim": 256,
        "block_multiple_of": 64,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "full_attn_idxs": [1, 3],
    },
    "mamba": {  # no attention
        "architectures": ["MambaForCausalLM"],
        "num_hidden_layers": 2,
        "state_size": 8,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 32,
    },
}


def make_model(
    folder: Path,
    architecture: str = "llama",
    *,
    seed: int = 0,
    dtype: str = "float16",
    anisotropic: bool = False,
    shards: int = 1,
    quantize: tuple[int, int] | None = None,
    **config: Any,
) -> Path:
    """Write a model in the Hub's layout and return its folder.

    Args:
        folder: made if it is not there.
        architecture: a key of `ARCHITECTURES`.
        seed: weights and seed go together, one to one.
        dtype: of the stored weights, and of the scales of quantized ones.
        anisotropic: give key channels gains (log-normal, two pairs of outliers a head) that the
            queries take back, so that keys look like those of trained models. Needs q_proj, k_proj.
        shards: number of safetensors files; more than one come with an index.
        quantize: (bits, group size) of mlx's affine format for all linears and the embedding.
        config: fields of config.json that differ.
    """
    full = _LLAMA | ARCHITECTURES[architecture] | {"model_type": architecture, "torch_dtype": dtype}
    full |= config
    model_class, args_class = mlx_lm_utils._get_classes(full)
    model = model_class(args_class.from_dict(full))
    weights = {n: _draw(n, p.shape, seed) for n, p in tree_flatten(model.parameters())}
    if anisotropic:
        _stretch_keys(weights, full, np.random.default_rng(seed))
    model.load_weights([(n, mx.array(a)) for n, a in weights.items()])
    kind = getattr(mx, dtype)
    model.update(tree_map(lambda a: a.astype(kind), model.parameters()))
    if quantize is not None:
        bits, group = quantize
        nn.quantize(model, group, bits)
        full["quantization"] = {"bits": bits, "group_size": group}
    folder.mkdir(parents=True, exist_ok=True)
    _save_shards(folder, dict(tree_flatten(model.parameters())), shards)
    _write_json(folder / "config.json", full)
    write_tokenizer(folder)
    return folder


def edit_config(folder: Path, **fields: object) -> Path:
    """Set fields of a model's config.json and return its folder."""
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level tokenizer without merges: token i < 256 is the byte i."""
    special = ["<s>", "</s>", "<a>", "<b>"]
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    added = [
        {"id": 256 + i, "content": text, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for i, text in enumerate(special)
    ]
    model = {"type": "BPE", "vocab": {c: i for i, c in enumerate(_byte_letters())}, "merges": []}
    _write_json(
        folder / "tokenizer.json",
        {
            "version": "1.0",
            "added_tokens": added,
            "pre_tokenizer": level,
            "decoder": level,
            "model": model,
        },
    )
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": 2048,
            "bos_token": "<s>",
            "eos_token": "</s>",
            "pad_token": "</s>",
        },
    )


def _byte_letters() -> list[str]:
    """Give the printable stand-in of each byte in byte-level vocabularies, in byte order."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    rest = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(rest)) for b in range(256)]


def _draw(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Draw one parameter, float32; depends on name, shape and seed, not on the order of drawing."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    noise = rng.standard_normal(shape, np.float32)
    if "embed" in name or name.endswith(("wte.weight", "wpe.weight")):
        return 0.15 * noise
    if len(shape) > 1:
        return noise / np.float32(np.sqrt(shape[-1]))
    return 0.1 * noise + (0 if name.endswith("bias") else 1)


def _stretch_keys(
    weights: dict[str, np.ndarray], config: dict[str, Any], rng: np.random.Generator
) -> None:
    kv_heads, dim = config["num_key_value_heads"], config["head_dim"]
    for name in [n for n in weights if n.endswith("k_proj.weight")]:
        # RoPE mixes channels j and j + dim / 2, so both get one gain.
        half = np.exp(rng.standard_normal((kv_heads, dim // 2))).astype(np.float32)
        half[:, rng.permutation(dim // 2)[:2]] *= 8
        gain = np.concatenate([half, half], axis=1)
        queries = name.replace("k_proj", "q_proj")
        if (norm := name.replace("k_proj", "k_norm")) in weights:  # undoes gains of the projection
            weights[norm] *= gain[0]
            weights[norm.replace("k_norm", "q_norm")] /= gain[0]
            continue
        weights[name] *= gain.reshape(-1, 1)
        repeats = weights[queries].shape[0] // (kv_heads * dim)
        weights[queries] /= np.repeat(gain, repeats, axis=0).reshape(-1, 1)


def _save_shards(folder: Path, weights: dict[str, mx.array], shards: int) -> None:
    names = sorted(weights)
    if shards == 1:
        _save(folder / "model.safetensors", weights, names)
        return
    placed = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        _save(folder / file, weights, names[i::shards])
        placed |= dict.fromkeys(names[i::shards], file)
    size = sum(a.nbytes for a in weights.values())
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(placed.items()))}
    _write_json(folder / "model.safetensors.index.json", index)


def _save(path: Path, weights: dict[str, mx.array], names: list[str]) -> None:
    mx.save_safetensors(str(path), {n: weights[n] for n in names}, metadata={"format": "mlx"})


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")
