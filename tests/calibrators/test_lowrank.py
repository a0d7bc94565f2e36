"""Heads that repeat each other are cheaper together; ranks and widths follow the variance."""

from itertools import product
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from velox_pack.calibrators import lowrank
from velox_pack.calibrators.capture import Moments
from velox_pack.calibrators.joint import Joint, collect, grouped, unit_moment
from velox_pack.manifests.errors import CalibrationError

Array = np.ndarray


def joint(x: Array, group: int) -> Joint:
    y = grouped(x.astype(np.float64), group)
    second = np.swapaxes(y, 1, 2) @ y
    moments = Moments(y.shape[1], y.sum(axis=1), second, np.abs(y).max(axis=1))
    directions = unit_moment(y - y.mean(axis=1, keepdims=True))
    return Joint(moments, directions, y[:, :500].astype(np.float32), group, True)


def error(x: Array, group: int, bits: float, **options: Any) -> tuple[float, float]:
    (found,) = lowrank.fit({3: joint(x, group)}, "keys", bits, **options)
    found.to_tensors()
    decoded = lowrank.decode(found, 0, *lowrank.encode(found, 0, x))
    assert decoded.shape == x.shape
    mean = x.mean(axis=1, keepdims=True)
    relative = float(np.square(decoded - x).sum() / np.square(x - mean).sum())
    return relative, lowrank.bits_per_element(found, 0)


def repeated() -> Array:
    """Four heads of 16: two pairs that share eight factors, and little of their own."""
    rng = np.random.default_rng(0)
    factors = rng.standard_normal((2, 4000, 8))
    mix = rng.standard_normal((2, 2, 8, 16))
    heads = np.einsum("pnf,phfd->phnd", factors, mix).reshape(4, 4000, 16)
    return (heads + 0.05 * rng.standard_normal(heads.shape) + 2.0).astype(np.float32)


def test_heads_that_repeat_each_other_are_cheaper_together() -> None:
    x = repeated()
    alone, alone_bits = error(x, 1, 2.0)
    pairs, pair_bits = error(x, 2, 2.0)
    assert pair_bits <= alone_bits
    assert pairs < 0.4 * alone
    plain = mx.quantize(mx.array(x.reshape(4, -1, 64)), group_size=64, bits=2)
    rounded = np.array(mx.dequantize(*plain, group_size=64, bits=2)).reshape(x.shape)
    mean = x.mean(axis=1, keepdims=True)
    assert pairs < 0.1 * np.square(rounded - x).sum() / np.square(x - mean).sum()


def test_mixed_widths_beat_a_schedule_and_a_flat_rank() -> None:
    x = repeated()
    mixed, bits = error(x, 2, 2.0)
    steps, step_bits = error(x, 2, 2.0, schedule=(4, 2, 1, 1))
    flat, flat_bits = error(x, 2, 2.0, schedule=(4, 4, 0, 0))
    assert bits == pytest.approx(step_bits)
    assert bits == pytest.approx(flat_bits)
    assert mixed < min(steps, flat)
    low, _ = error(x, 2, 2.0, energy=0.5)
    assert low > 0.3  # half of the variance is gone, whatever the bits


def test_ranks_by_energy() -> None:
    table = np.array([[6.0, 3, 1, 0], [1, 1, 1, 1]])
    np.testing.assert_array_equal(lowrank.ranks_by_energy(table, 0.9), [2, 4])
    np.testing.assert_array_equal(lowrank.ranks_by_energy(table, 0.5), [1, 2])
    np.testing.assert_array_equal(lowrank.ranks_by_energy(table, 1.0), [3, 4])
    with pytest.raises(ValueError, match="energy"):
        lowrank.ranks_by_energy(table, 0.0)


def test_ranks_by_budget_are_the_optimum() -> None:
    rng = np.random.default_rng(0)
    units = [np.sort(rng.exponential(size=6))[::-1] * s for s in (1.0, 5.0, 0.2)]
    for block, total in ((1, 9), (2, 10), (3, 12)):
        ranks = lowrank.ranks_by_budget(units, total, block=block)
        assert sum(ranks) <= total
        choices = product(range(block, 7, block), repeat=3)
        best = max(
            sum(u[:r].sum() for u, r in zip(units, c, strict=True))
            for c in choices
            if sum(c) <= total
        )
        found = sum(u[:r].sum() for u, r in zip(units, ranks, strict=True))
        assert found == pytest.approx(best)
    with pytest.raises(ValueError, match="budget"):
        lowrank.ranks_by_budget(units, 2)
    with pytest.raises(ValueError, match="block"):
        lowrank.ranks_by_budget(units, 30, block=7)


def test_palus_ranks_follow_fisher() -> None:
    ranks = lowrank.palu_ranks([1.0, 1.0, 2.0], [64, 64, 64], 0.5)
    assert sum(ranks) == 96
    assert ranks == [24, 24, 48]
    ranks = lowrank.palu_ranks([1.0, 1.0, 100.0], [64, 64, 64], 0.5)
    assert ranks == [16, 16, 64]  # the full unit hands on what it cannot use
    with pytest.raises(ValueError, match="ratio"):
        lowrank.palu_ranks([1.0], [64], 1.5)


def test_bad_input_is_one_line() -> None:
    x = repeated()
    broken = joint(x, 2)
    broken.moments.second[:] = np.nan
    with pytest.raises(CalibrationError, match="layer 3: keys"):
        lowrank.fit({3: broken}, "keys", 2.0)
    with pytest.raises(ValueError, match="schedule"):
        lowrank.schedule_widths(10, (4, 2, 0))


def test_trained_keys_held_out(demo: Any) -> None:
    """Both heads together, against plain rounding with more bits."""
    found = collect(demo.streaming(), demo.tokens, demo.traces, 2).done("keys")
    (keys,) = lowrank.fit(found, "keys", 2.5)
    keys.to_tensors()
    errors: dict[str, list[float]] = {"low rank": [], "plain": []}

    def hook(c: Any) -> None:
        x, n = np.array(c.keys_before), keys.layers.index(c.layer)
        decoded = lowrank.decode(keys, n, *lowrank.encode(keys, n, x))
        packed = mx.quantize(c.keys_before, group_size=64, bits=3)
        plain = np.array(mx.dequantize(*packed, group_size=64, bits=3))
        size = np.square(x - demo.statistics[c.layer].keys_before.mean[:, None])[:, 4:].sum()
        for name, y in (("low rank", decoded), ("plain", plain)):
            errors[name].append(float(np.square((y - x)[:, 4:]).sum() / size))

    demo.streaming().run(demo.heldout, hook)
    assert lowrank.bits_per_element(keys, 0) < 2.6
    assert np.mean(errors["low rank"]) < 0.5 * np.mean(errors["plain"])
