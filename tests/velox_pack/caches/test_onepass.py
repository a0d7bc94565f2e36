"""One pass over a text against decoding it token by token with the real cache."""

from dataclasses import dataclass

import mlx.core as mx
import pytest
from cache_support import random_tokens, uniform
from mlx_lm.models.cache import QuantizedKVCache

from velox_pack.caches.codecs.affine import Affine
from velox_pack.caches.plan import LayerPlan
from velox_pack.onepass import OnePassCache

# Recipe -> (tokens, largest difference). Both ways round differently by 1e-6, which may tip a code
# or, in affine rounding, the last bit of a group's float16 scale; so nearly all agree to 1e-4.
RECIPES = {
    "spectral:bits=3,sinks=4,window=24,flush=8": (72, 1e-4),
    "joint-spectral:bits=2,sinks=4,window=24,flush=8": (72, 1e-4),
    "turboquant-mse:bits=2,sinks=0,window=0,flush=1": (40, 1e-4),
    "affine:bits=3,group=32,window=8,flush=8": (40, 1e-2),
    "affine:bits=3,group=32,axis=channel,window=8,flush=32": (80, 1e-2),
}


@dataclass(frozen=True)
class WideScales(Affine):
    """Scales in the rows' own float32, as mlx-lm's QuantizedKVCache has them in such a model."""

    def encode(self, x, start):
        return mx.quantize(x, group_size=self.group, bits=self.bits)


def log_probabilities(logits):
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def compare(ready, tokens, one_pass, one_by_one):
    """Both in log-probabilities [L, V]."""
    ones = [1] * tokens.shape[0]
    return [
        log_probabilities(ready.logits(tokens, *how)) for how in ((one_pass,), (one_by_one, ones))
    ]


@pytest.mark.parametrize("recipe", RECIPES)
def test_equals_decoding_on_the_demo_model(demo, heldout, recipe):
    length, most = RECIPES[recipe]
    tokens = heldout[:length]
    plan = demo.plan(recipe)
    layer = next(iter(plan.layers.values()))
    assert layer.boundary(tokens.shape[0] - 1) > layer.sinks + 16  # codes are seen
    found, expected = compare(demo, tokens, demo.caches(plan, OnePassCache), demo.caches(plan))
    assert mx.abs(found - expected).mean().item() < 1e-4
    assert mx.abs(found - expected).max().item() < most
    exact = log_probabilities(demo.logits(tokens, demo.caches(None)))
    assert mx.abs(exact - expected).max().item() > 1e-2  # and they do matter
    first = layer.boundary(0) + layer.window + layer.flush
    assert mx.abs(exact[:first] - found[:first]).max().item() < 1e-4


@pytest.mark.parametrize("length", [1, 3, 5, 20])
def test_texts_shorter_than_the_window(demo, heldout, length):
    plan = demo.plan("spectral:bits=3")
    tokens = heldout[:length]
    found = demo.logits(tokens, demo.caches(plan, OnePassCache))
    assert mx.abs(found - demo.logits(tokens, demo.caches(None))).max().item() < 1e-4


@pytest.mark.parametrize("architecture", ["gemma3_text", "cohere2", "qwen3"])
@pytest.mark.parametrize(
    "recipe", ["spectral:bits=2", "joint-spectral:bits=3", "affine:bits=2,group=32,flush=8"]
)
def test_equals_decoding_on_other_models(tiny, architecture, recipe):
    ready = tiny(architecture)
    tokens = mx.array(random_tokens(1, 60, seed=7)[0])
    plan = ready.plan(recipe)
    found, expected = compare(ready, tokens, ready.caches(plan, OnePassCache), ready.caches(plan))
    assert mx.abs(found - expected).mean().item() < 1e-4
    assert mx.abs(found - expected).max().item() < 1e-2
    exact = log_probabilities(ready.logits(tokens, ready.caches(None)))
    assert mx.abs(exact - expected).max().item() > 1e-2


def test_longer_than_one_block_of_queries(demo, heldout):
    """Blocks of queries are scored apart; the last tokens of a long text check their seams."""
    plan = demo.plan("spectral:bits=3")
    found = demo.logits(heldout[:300], demo.caches(plan, OnePassCache))
    shorter = demo.logits(heldout[:270], demo.caches(plan, OnePassCache))
    assert mx.abs(found[:270] - shorter).max().item() < 1e-3


def test_itself_is_mlx_lm_quantized_cache(demo, heldout):
    """The baseline: everything coded, the token being decoded included."""
    tokens = heldout[:48]
    like = demo.plan("exact")
    codec = WideScales(4, 64, 64)
    plan = uniform(LayerPlan(codec, codec, 0, 0, 1), like)
    one_pass = demo.caches(plan, lambda own: OnePassCache(own, itself=True))
    found, expected = compare(
        demo, tokens, one_pass, [QuantizedKVCache(64, 4) for _ in demo.layers]
    )
    assert mx.abs(found - expected).mean().item() < 1e-3
    assert mx.abs(found - expected).max().item() < 0.1  # everything is coded, so tips add up
    plain = log_probabilities(demo.logits(tokens, demo.caches(None)))
    assert mx.abs(plain - expected).max().item() > 1e-1


def test_attention_sinks_and_masks():
    """Against the plain formula, with a mask of the model's own and sinks for each query head."""
    mx.random.seed(0)
    q, k, v = (mx.random.normal((2, heads, 30, 32)) for heads in (4, 2, 2))
    codec = Affine(8, 32, 32)
    plan = LayerPlan(codec, codec, 2, 4, 4)
    sinks = mx.array([1.0, -1.0, 0.5, 2.0])
    allowed = mx.random.uniform(shape=(2, 1, 30, 30)) < 0.7
    allowed = (allowed | mx.eye(30, dtype=mx.bool_)) & mx.tril(mx.ones((30, 30), mx.bool_))
    for mask in (allowed, mx.where(allowed, 0.0, -mx.inf), "causal"):
        cache = OnePassCache(plan)
        keys, _ = cache.update_and_fetch(k, v)
        found = keys.cache.attend(q, 0.2, mask, sinks)
        expected = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.2, mask=mask, sinks=sinks)
        assert mx.abs(found - expected).max().item() < 0.02
    with pytest.raises(RuntimeError, match="one text once"):
        cache.update_and_fetch(k, v)
