import mlx.core as mx
import pytest

from velox_pack.caches.cache import VeloxCache
from velox_pack.sizes import GENERATED, PROMPT, SEQUENCES, cache_bytes, held

TOKENS = PROMPT + GENERATED


@pytest.mark.parametrize(
    ("recipe", "bits", "more"),
    [
        ("exact", 16, 16),
        ("affine:bits=4", 4.5, 4.5),
        ("turboquant-mse:bits=3", 3.25, 3.25),
        ("spectral:bits=3", 3.125, 3.125),
        ("spectral:bits=3,window=0,sinks=0", 3.125, 3.125),
    ],
)
def test_bits_per_element(demo, recipe, bits, more):
    plan = demo.plan(recipe)
    found = cache_bytes(demo.layers, plan)
    own = plan.layers[0]
    exact = TOKENS - (own.boundary(TOKENS) - own.sinks)
    expected = bits + (16 - bits) * exact / TOKENS
    assert found.bits_per_element == pytest.approx(expected, abs=1e-6)
    assert found.elements == 6 * TOKENS * 2 * (64 + 64)
    assert found.plain == 2 * found.elements
    assert found.per_token == pytest.approx(6 * 2 * 128 * more / 8)
    with_constants = found.bits_per_element + 8 * found.constants / SEQUENCES / found.elements
    assert found.bits_with_constants == pytest.approx(with_constants)


def test_the_goal_of_23_percent(demo):
    found = cache_bytes(demo.layers, demo.plan("spectral:bits=3"))
    assert found.state < 0.23 * found.plain


def test_what_is_counted_is_what_a_model_leaves(demo, heldout):
    plan = demo.plan("spectral:bits=3")
    caches = demo.caches(plan)
    demo.logits(heldout[:303], caches, [300, 1, 1, 1])
    for layer, cache in zip(demo.layers, caches, strict=True):
        assert type(cache) is VeloxCache
        in_32_bits = sum(a.nbytes for a in (*cache.sinks, *cache.recent)) // 2
        counted = held(layer, plan.layers[layer.index], [300, 1, 1, 1])
        assert cache.nbytes - in_32_bits == counted


def test_constants_do_not_grow_by_counting(demo):
    """RoPE tables are as long as 2,048 tokens need, not as long as the count of further tokens."""
    plan = demo.plan("spectral:bits=2.5")
    table = plan.layers[0].keys.table
    found = cache_bytes(demo.layers, plan)
    own = sum(a.nbytes for a in plan.constants()) - sum(a.nbytes for a in table.constants())
    assert found.constants == own + table.inv_freq.nbytes + 2 * 2048 * 32 * 4
    assert mx.array_equal(table.at(0, 1)[0], mx.ones((1, 32)))
