"""What the codecs promise, on really trained weights and text that no calibration has seen.

Generation semantics on all sides: see velox_pack.onepass.
"""

import mlx.core as mx
import pytest
from cache_support import uniform

from velox_pack.caches.codecs.affine import Affine
from velox_pack.caches.plan import LayerPlan
from velox_pack.onepass import OnePassCache


@pytest.fixture(scope="module")
def kl(demo, heldout):
    """`kl(plan or recipe)`: mean KL divergence from the exact model over 512 tokens, nats."""
    exact = demo.logits(heldout, demo.caches(None))
    exact = exact - mx.logsumexp(exact, axis=-1, keepdims=True)
    found = {}

    def measure(plan, itself=False):
        if plan not in found:
            caches = demo.caches(plan, lambda own: OnePassCache(own, itself=itself))
            q = demo.logits(heldout, caches)
            q = q - mx.logsumexp(q, axis=-1, keepdims=True)
            found[plan] = mx.sum(mx.exp(exact) * (exact - q), axis=-1).mean().item()
        return found[plan]

    return measure


def mlx_lm_affine(demo, bits):
    """mlx-lm's QuantizedKVCache in a 16-bit model: no window, no sinks, bits + 0.5 an element."""
    codec = Affine(bits, 64, 64)
    return uniform(LayerPlan(codec, codec, 0, 0, 1), demo.plan("exact"))


def test_calibrated_beats_random_rotation_beats_affine_at_3_bits(kl):
    spectral, rotated, affine = (
        kl(f"{r}:bits=3") for r in ("spectral", "turboquant-mse", "affine")
    )
    assert 0 < spectral < 0.7 * rotated
    assert rotated < 0.8 * affine


def test_heads_together_beat_a_basis_for_each(kl):
    """At fewer bytes too: one scale for both heads. Few tokens here; benchmarks have more."""
    assert kl("joint-spectral:bits=3") < 0.9 * kl("spectral:bits=3")
    assert kl("joint-spectral:bits=2") < 0.9 * kl("spectral:bits=2")


def test_each_bit_counts(kl):
    values = [kl(f"spectral:bits={bits}") for bits in (2, 3, 4)]
    assert values[0] > 2 * values[1]
    assert values[1] > 2 * values[2]


def test_3_bits_beat_mlx_lm_4_bits(demo, kl):
    assert kl("spectral:bits=3") < 0.3 * kl(mlx_lm_affine(demo, 4), itself=True)


def test_window_and_sinks_are_worth_their_bytes(kl):
    with_both, neither = (kl(f"turboquant-mse:bits=3{o}") for o in ("", ",window=0,sinks=0"))
    assert with_both < 0.5 * neither


def test_at_equal_bits_and_with_the_same_window_and_sinks_it_beats_affine(kl):
    """4 bits plus one norm against 4 bits plus scale and bias in groups of 64 (4.5)."""
    assert kl("spectral:bits=4") < 0.6 * kl("affine:bits=4")
