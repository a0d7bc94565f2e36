from collections import Counter

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama, mixtral, qwen2_moe
from mlx_lm.utils import load_model

from velox_pack.manifests.errors import PackError
from velox_pack.reservoir.select import select

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 100,
}


def make_llama(**options):
    return llama.Model(llama.ModelArgs(**{**LLAMA, **options}))


def reasons(selection):
    return Counter(k.reason for k in selection.kept)


def test_linears_of_the_layers_are_packed_and_the_rest_has_reasons():
    selection = select(make_llama(tie_word_embeddings=False), "lloyd", 4)
    assert len(selection.packed) == 14
    assert list(selection.packed) == sorted(selection.packed)
    assert reasons(selection) == {"output head": 1, "embedding": 1, "norm": 5}
    assert selection.coverage() == "14 of 15 linears packed; kept 1: output head (1)"
    assert selection.widths == (64, 96)
    spec = selection.packed["model.layers.1.mlp.down_proj"]
    assert (spec.out_features, spec.in_features, spec.rotation, spec.bias) == (64, 96, "w96", False)


def test_every_parameter_is_counted_once():
    model = make_llama(attention_bias=True)
    total = sum(a.size for _, a in tree_flatten(model.parameters()))
    for arguments in (("lloyd", 3), ("affine", 4, 64)):
        selection = select(model, *arguments)
        kept = sum(k.parameters for k in selection.kept)
        assert selection.parameters_total == total
        assert selection.parameters_packed + kept == total
        assert all(k.path and k.reason for k in selection.kept)


def test_tied_models_have_no_head_and_biases_are_part():
    selection = select(make_llama(attention_bias=True, tie_word_embeddings=True), "lloyd", 4)
    assert selection.coverage() == "14 of 14 linears packed"
    assert selection.packed["model.layers.0.self_attn.q_proj"].bias


def test_affine_keeps_widths_that_are_no_multiple_of_the_group():
    selection = select(make_llama(), "affine", 4, 64)
    kept = [k.path for k in selection.kept if k.linear]
    assert kept == [f"model.layers.{i}.mlp.down_proj" for i in (0, 1)]
    assert "12 of 14 linears packed; kept 2: width is not a multiple of group 64 (2)" in (
        selection.coverage()
    )


def test_without_rotation():
    selection = select(make_llama(), "affine", 4, 32, rotated=False)
    assert selection.widths == ()
    assert all(spec.rotation is None for spec in selection.packed.values())


def test_quantized_sources_are_kept():
    model = make_llama(tie_word_embeddings=False)
    nn.quantize(model, group_size=32, bits=4)
    selection = select(model, "lloyd", 4)
    assert not selection.packed
    assert selection.coverage() == "0 of 15 linears packed; kept 15: already quantized (15)"


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe"])
def test_experts_and_their_routers_are_kept(kind):
    common = {**LLAMA, "model_type": kind, "num_experts_per_tok": 2, "num_hidden_layers": 1}
    if kind == "mixtral":
        model = mixtral.Model(mixtral.ModelArgs(**common, num_local_experts=4))
    else:
        model = qwen2_moe.Model(
            qwen2_moe.ModelArgs(
                **common,
                num_experts=4,
                moe_intermediate_size=32,
                shared_expert_intermediate_size=64,
            )
        )
    selection = select(model, "lloyd", 4)
    found = reasons(selection)
    assert found["stacked experts"] == 3
    assert found["router of experts"] == (1 if kind == "mixtral" else 2)
    attention = [p for p in selection.packed if "self_attn" in p]
    shared = [p for p in selection.packed if "shared_expert." in p]
    assert len(attention) == 4
    assert len(shared) == (0 if kind == "mixtral" else 3)


def test_other_modules_by_name():
    class Strange(nn.Linear):
        pass

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = [Layer()]
            self.project = nn.Linear(64, 64)
            self.table = mx.zeros((3,))

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.strange = Strange(64, 64)
            self.conv = nn.Conv1d(4, 4, 3)
            self.narrow = nn.Linear(4, 1, bias=False)
            self.good = nn.Linear(64, 64)

    selection = select(Model(), "lloyd", 4)
    assert list(selection.packed) == ["layers.0.good"]
    assert {k.path: k.reason for k in selection.kept} == {
        "(model)": "not a linear layer (Model)",
        "layers.0.conv": "not a linear layer (Conv1d)",
        "layers.0.narrow": "would not get smaller",
        "layers.0.strange": "a linear of a kind of its own (Strange)",
        "project": "outside the layers",
    }


def test_nothing_is_evaluated(demo_path):
    before = mx.get_active_memory()
    model, _ = load_model(demo_path, lazy=True)
    selection = select(model, "affine", 4, 64)
    assert selection.coverage() == "42 of 42 linears packed"
    assert mx.get_active_memory() - before < 1 << 16


def test_refusals():
    with pytest.raises(PackError, match="not 9"):
        select(make_llama(), "lloyd", 9)
