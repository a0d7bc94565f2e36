"""Allocations: the closed form, the optimum among all steps, and a planted gain."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from velox_pack.calibrators import ratequant
from velox_pack.calibrators.ratequant import Distortion
from velox_pack.calibrators.sensitivity import Sensitivity


def test_curves_are_recovered() -> None:
    bits = np.array([2.0, 2.5, 3.0, 4.0])
    fitted = ratequant.fit_distortion(bits, 1.3 * 4.4**-bits)
    assert (fitted.alpha, fitted.beta) == (pytest.approx(1.3), pytest.approx(4.4))
    plain = ratequant.lloyd_distortion(np.ones((2, 64)))
    assert plain.at(3) == pytest.approx(0.0345, rel=0.15)
    assert 3 < plain.beta < 4.5
    for bad in ([0.1], [0.1, 0.0], [0.1, np.nan]):
        with pytest.raises(ValueError, match="two points"):
            ratequant.fit_distortion(bits[: len(bad)], np.array(bad))
    with pytest.raises(ValueError, match="alpha"):
        Distortion(1.0, 0.9)


def test_real_bits_follow_the_closed_form() -> None:
    """One beta, equal sizes: b = target + log_beta(s / geometric mean of s)."""
    s = np.exp(np.random.default_rng(0).standard_normal(12))
    curves = [Distortion(1.0, 4.0)] * 12
    bits = ratequant.reverse_waterfill(s, 0 * s, curves, 3.0, np.ones(12), 0.0, 20.0)
    expected = 3 + np.log(s / np.exp(np.log(s).mean())) / np.log(4.0)
    np.testing.assert_allclose(bits, expected, atol=1e-9)


def test_steps_are_the_optimum() -> None:
    rng = np.random.default_rng(1)
    for _ in range(10):
        s = np.exp(1.5 * rng.standard_normal(4))
        c = np.exp(3 * rng.standard_normal(4)) * rng.integers(0, 2, 4)
        curves = [
            Distortion(*x) for x in zip(rng.uniform(0.5, 2, 4), rng.uniform(3, 6, 4), strict=True)
        ]
        ones = np.ones(4)
        found = ratequant.spread(s, curves, 2.0, ones, ones / 2, shrink=c, lowest=1, highest=4)
        grid = np.arange(1, 4.5, 0.5)
        losses = [
            a * f.at(grid) + b * f.at(grid) ** 2 for a, b, f in zip(s, c, curves, strict=True)
        ]
        choices = [p for p in product(range(len(grid)), repeat=4) if grid[list(p)].sum() <= 8]
        best = min(sum(loss[n] for loss, n in zip(losses, p, strict=True)) for p in choices)
        mine = sum(loss[int(2 * b - 2)] for loss, b in zip(losses, found, strict=True))
        assert mine == pytest.approx(best)


@given(st.lists(st.floats(1e-6, 1e3), min_size=4, max_size=40), st.floats(1.0, 6.0))
def test_the_average_is_met_within_a_step(values: list[float], target: float) -> None:
    n = len(values)
    curves = [Distortion(1.0, 4.0)] * n
    bits = ratequant.spread(np.array(values), curves, target, np.ones(n), np.full(n, 0.5))
    assert target - 0.5 / n - 1e-6 < bits.mean() <= target + 1e-9
    assert bits.min() >= 1
    assert bits.max() <= 8
    more = np.array(values)[:, None] > np.array(values)[None]
    assert np.all((bits[:, None] >= bits[None])[more])  # more sensitive, never fewer bits


def test_different_sizes_and_steps_share_one_budget() -> None:
    elements = np.array([128.0, 128.0, 96.0, 96.0])
    steps = 32 / np.array([64.0, 64.0, 96.0, 96.0])
    curves = [Distortion(1.0, 4.0)] * 4
    bits = ratequant.spread(np.array([4.0, 1.0, 4.0, 1.0]), curves, 3.0, elements, steps)
    assert bits @ elements <= 3.0 * elements.sum() + 1e-6
    assert bits @ elements > 3.0 * elements.sum() - (elements * steps).max()
    np.testing.assert_allclose(bits / steps, np.round(bits / steps), atol=1e-9)


@pytest.mark.parametrize("target", [0.5, 9.0])
def test_impossible_targets(target: float) -> None:
    with pytest.raises(ValueError, match="on average"):
        ratequant.spread(np.ones(2), [Distortion(1, 4)] * 2, target, np.ones(2), np.ones(2))


def test_planted_sensitivities_beat_uniform_bits_and_a_borrowed_curve_does_worse() -> None:
    heads = np.ones(2)
    keys = {i: heads * (100.0 if i == 2 else 1.0) for i in range(6)}
    found = Sensitivity(keys, dict.fromkeys(range(6), heads * 0.1), 1000)
    dims = dict.fromkeys(range(6), (64, 64))
    steep, flat = Distortion(2.0, 5.3), Distortion(1.0, 3.6)
    true = (dict.fromkeys(range(6), steep), dict.fromkeys(range(6), flat))
    (right,) = ratequant.allocate(found, *true, 3.0, dims)
    (wrong,) = ratequant.allocate(found, *true[::-1], 3.0, dims)

    def cost(k: np.ndarray, v: np.ndarray) -> float:
        terms = [keys[i].sum() * steep.at(k[i]) + 0.2 * flat.at(v[i]) for i in range(6)]
        return float(sum(terms))

    uniform = cost(np.full(6, 3.0), np.full(6, 3.0))
    assert cost(right.keys, right.values) < 0.5 * uniform
    assert cost(right.keys, right.values) < cost(wrong.keys, wrong.values)
    assert right.details["predicted_kl"] == pytest.approx(cost(right.keys, right.values))
    assert right.details["predicted_kl_uniform"] == pytest.approx(uniform)
    assert right.keys[2] == right.keys.max()
    assert abs(right.achieved - 3.0) <= 1 / 12
    right.to_tensors()


def test_what_shrinking_costs_earns_bits() -> None:
    """Values that are attended broadly: noise averages out, a coherent error does not."""
    heads = dict.fromkeys(range(4), np.full(2, 0.1))
    dims, curves = dict.fromkeys(range(4), (64, 64)), dict.fromkeys(range(4), Distortion(1.2, 3.7))
    broad = Sensitivity(heads, heads, 1000, shrink_values={0: 5.0})
    (plain,) = ratequant.allocate(Sensitivity(heads, heads, 1000), curves, curves, 2.5, dims)
    (given_,) = ratequant.allocate(broad, curves, curves, 2.5, dims)
    assert set(plain.keys.tolist()) | set(plain.values.tolist()) == {2.5}
    assert given_.values[0] == given_.values.max() > 2.5
    assert given_.details["shrink_values"] == [5.0, 0.0, 0.0, 0.0]
    (low,) = ratequant.allocate(broad, curves, curves, 1.5, dims)
    assert low.keys.min() == 1.5  # nobody gets less than the average where it is below LOWEST


def test_layers_of_other_head_counts_compete_for_the_same_bits() -> None:
    keys = {0: np.ones(2), 1: np.ones(4), 2: np.ones(2)}
    found = Sensitivity(keys, keys, 10)
    curves = dict.fromkeys(keys, Distortion(1.0, 4.0))
    artifacts = ratequant.allocate(found, curves, curves, 3.0, dict.fromkeys(keys, (64, 64)))
    assert [a.layers for a in artifacts] == [(0, 2), (1,)]
    assert {a.achieved for a in artifacts} == {artifacts[0].achieved}


def test_a_gain_on_the_demo_model(demo: Any) -> None:
    """Predicted by sensitivities that another test holds against the truth."""
    from velox_pack.calibrators import sensitivity, spectral

    (bases,) = spectral.fit(demo.statistics, "keys")
    found = sensitivity.measure(demo.streaming(), demo.tokens[:1], demo.traces, demo.statistics)
    keys = {
        i: ratequant.lloyd_distortion(bases.variance[n], found.keys[i])
        for n, i in enumerate(bases.layers)
    }
    values = dict.fromkeys(keys, ratequant.lloyd_distortion(np.ones((1, 64))))
    (given_,) = ratequant.allocate(found, keys, values, 3.0, dict.fromkeys(keys, (64, 64)))
    assert given_.achieved == 3.0
    assert given_.details["predicted_kl"] < 0.95 * given_.details["predicted_kl_uniform"]
