"""The attention router over mlx-lm's architectures, with tiny random models."""

import sys
from types import ModuleType

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models.base as mlx_lm_base
import pytest
from cache_support import random_tokens, rows_of, uniform
from mlx_lm.models import gpt_oss
from mlx_lm.models.cache import KVCache

from velox_pack.attention import install
from velox_pack.caches.cache import VeloxCache
from velox_pack.caches.codecs.exact import Exact
from velox_pack.caches.codecs.rope import BeforeRope
from velox_pack.caches.plan import LayerPlan, ModelPlan
from velox_pack.caches.shelf import Shelf
from velox_pack.caches.workshop import Workshop

CHUNKS = [40, 17] + [1] * 13
EXACT = LayerPlan(Exact(), Exact(), 2, 5, 4)
ARCHITECTURES = [
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "phi3",
    "olmo2",
    "starcoder2",
    "gemma3_text",
    "cohere2",
    "mixtral",
    "lfm2",
]


def tokens(length=70):
    return mx.array(random_tokens(1, length, seed=3)[0])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_exact_codes_are_a_plain_cache(tiny, architecture):
    ready = tiny(architecture)
    plain = ready.logits(tokens(), ready.caches(None), CHUNKS)
    shelf = Shelf(ready.layers, ready.artifacts)
    covered = shelf.covered()
    assert covered
    same = uniform(EXACT, ModelPlan("", "", "", {layer.index: EXACT for layer in covered}))
    caches = ready.caches(same)
    ours = sum(type(c) is VeloxCache for c in caches)
    assert ours == len(covered)
    assert mx.abs(ready.logits(tokens(), caches, CHUNKS) - plain).max().item() < 1e-4
    own = [c for c in caches if type(c) is VeloxCache]
    assert all(c.codes[0][0].shape[2] > 40 for c in own)  # it was the codes that were read

    # The same with keys held as they were before RoPE.
    workshop = Workshop(shelf, "")
    layers = {}
    for layer in covered:
        table = workshop.rope(layer)
        keys = Exact() if table is None else BeforeRope(Exact(), table)
        layers[layer.index] = LayerPlan(keys, Exact(), 2, 5, 4)
    before = ready.logits(tokens(), ready.caches(ModelPlan("", "", "", layers)), CHUNKS)
    assert mx.abs(before - plain).max().item() < 1e-4


@pytest.mark.parametrize(
    ("architecture", "full"), [("gemma3_text", [5]), ("cohere2", [3]), ("lfm2", [1, 3])]
)
def test_hybrid_models_keep_their_other_caches(tiny, architecture, full):
    ready = tiny(architecture)
    caches = ready.caches("spectral:bits=4")
    assert [i for i, c in enumerate(caches) if type(c) is VeloxCache] == full
    found = ready.logits(tokens(), caches, CHUNKS)
    plain = ready.logits(tokens(), ready.caches(None), CHUNKS)
    assert mx.isfinite(found).all()
    assert mx.abs(found - plain).mean().item() < 0.2 * mx.abs(plain).mean().item()


def test_rope_of_every_kind_is_known(tiny):
    for architecture in ARCHITECTURES:
        ready = tiny(architecture)
        with_rope = {layer.index for layer in ready.layers if layer.covered and layer.rope}
        if architecture == "cohere2":  # its full layer does not rotate
            assert not with_rope
        else:
            assert with_rope


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("llama", {"head_dim": 80}),
        ("llama", {"head_dim": 96, "num_key_value_heads": 1}),
        ("phi3", {"partial_rotary_factor": 0.5}),
    ],
)
def test_other_heads_and_partial_rope(tiny, architecture, options):
    ready = tiny(architecture, num_hidden_layers=1, **options)
    plain = ready.logits(tokens(), ready.caches(None), CHUNKS)
    found = ready.logits(tokens(), ready.caches("spectral:bits=8"), CHUNKS)
    assert mx.abs(found - plain).mean().item() < 0.01 * mx.abs(plain).mean().item()


def test_installed_once(tiny):
    model = tiny("llama").model
    module = sys.modules["mlx_lm.models.llama"]
    routed = module.scaled_dot_product_attention
    assert routed.velox
    assert install(model) == ["mlx_lm.models.llama"]
    assert module.scaled_dot_product_attention is routed
    assert mlx_lm_base.scaled_dot_product_attention is routed.__wrapped__


def own_module(attention):
    """A model file of somebody's own: a module with an attention function, classes, no file."""
    module = ModuleType("somebody.model")
    module.nn, module.scaled_dot_product_attention = nn, attention
    exec(
        "class Attention(nn.Module):\n"
        "    def __call__(self, *args, **kwargs):\n"
        "        return scaled_dot_product_attention(*args, **kwargs)\n",
        module.__dict__,
    )
    return module


def test_foreign_caches_pass_through_untouched():
    seen = []

    def attention(*args, **kwargs):
        seen.append((args, kwargs))
        return args[0]

    module = own_module(attention)
    layer = module.Attention()
    assert install(layer) == ["somebody.model"]  # though it is no entry of sys.modules
    assert install(layer) == ["somebody.model"]
    q, k, v, cache, mask, sinks = (
        rows_of(3),
        rows_of(3),
        rows_of(3),
        KVCache(),
        "causal",
        mx.ones(2),
    )
    assert layer(q, k, v, cache, 0.5, mask) is q
    assert layer(q, k, v, cache=cache, scale=0.5, mask=mask, sinks=sinks, extra=1) is q
    for args, kwargs in seen:
        assert len(args) == 3
        assert all(a is b for a, b in zip(args, (q, k, v), strict=True))
        assert kwargs["cache"] is cache
        assert (kwargs["scale"], kwargs["mask"]) == (0.5, "causal")
    assert "sinks" not in seen[0][1]  # for functions that take none
    assert seen[1][1]["sinks"] is sinks
    assert seen[1][1]["extra"] == 1


def test_inherited_attention_is_routed():
    module = own_module(mlx_lm_base.scaled_dot_product_attention)
    child = type("Child", (module.Attention,), {"__module__": "elsewhere"})()
    assert install(child) == ["somebody.model"]
    cache = VeloxCache(EXACT, "f", 0)
    keys, values = cache.update_and_fetch(rows_of(6), rows_of(6))
    assert (keys.shape, values.ndim, keys.dtype) == ((1, 2, 6, 64), 4, mx.float32)
    out = child(rows_of(6, heads=4), keys, values, cache=cache, scale=0.1, mask="causal")
    expected = mx.fast.scaled_dot_product_attention(
        rows_of(6, heads=4), rows_of(6), rows_of(6), scale=0.1, mask="causal"
    )
    assert mx.array_equal(out, expected)


def test_attention_sinks_pass():
    args = gpt_oss.ModelArgs(
        num_hidden_layers=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        vocab_size=260,
        hidden_size=64,
        intermediate_size=64,
        head_dim=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=16,
        rope_theta=10000,
    )
    mx.random.seed(0)
    model = gpt_oss.Model(args)
    for layer in model.layers:
        layer.self_attn.sinks = mx.array([3.0, 1.0, -1.0, 2.0])  # far from nothing
    install(model)

    def run(caches):
        parts, start = [], 0
        for size in CHUNKS:
            parts.append(model(tokens()[None, start : start + size], cache=caches)[0])
            start += size
        return mx.concatenate(parts)

    plain = run(model.make_cache())
    caches = model.make_cache()
    caches[1] = VeloxCache(EXACT, "f", 1)
    assert mx.abs(run(caches) - plain).max().item() < 1e-4
    assert caches[1].codes[0][0].shape[2] > 40
    for layer in model.layers:
        layer.self_attn.sinks = mx.full((4,), -mx.inf)
    assert mx.abs(run(model.make_cache()) - plain).max().item() > 1e-3  # sinks do matter


def test_a_model_that_is_not_routed_gets_decoded_arrays():
    plan = LayerPlan(Exact(), Exact(), 2, 5, 4, routed=False)
    cache = VeloxCache(plan, "f", 0)
    keys, values = rows_of(60), rows_of(60, seed=1)
    for start, stop in ((0, 40), (40, 41), (41, 60)):
        found = cache.update_and_fetch(keys[:, :, start:stop], values[:, :, start:stop])
        assert mx.array_equal(found[0], keys[:, :, :stop])
        assert mx.array_equal(found[1], values[:, :, :stop])
    assert cache.offset == 60
    assert cache.codes[0][0].shape[2] == 52
