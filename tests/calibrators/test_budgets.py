"""Budgets go where attention is diffuse, and are even where all is alike."""

from collections.abc import Callable

import numpy as np
import pytest
from scipy.optimize import linprog

from velox_pack.calibrators import budgets
from velox_pack.calibrators.attention_mass import ORACLE, RATIOS, AttentionMass, counts
from velox_pack.calibrators.attention_mass import pooled_shares as pooled
from velox_pack.calibrators.budget_shares import capped
from velox_pack.manifests.artifacts_attention import Budgets
from velox_pack.manifests.errors import CalibrationError

KEYS = 1024


def planted(*decays: float) -> AttentionMass:
    """Heads whose sorted mass falls like exp(-decay * rank / KEYS)."""
    mass = np.stack([np.exp(-d * np.arange(KEYS) / KEYS) for d in decays])
    mass /= mass.sum(axis=1, keepdims=True)
    kept = counts(KEYS)
    lost = 1 - np.stack([np.cumsum(row)[kept - 1] for row in mass])
    heads = len(decays)
    return AttentionMass(
        mean_mass=np.zeros((1, heads, KEYS), np.float32),
        lost={ORACLE: lost},
        error={ORACLE: lost**2},
        pooled=pooled(mass, kept),
        size=np.ones(heads),
        queries=np.zeros((heads, 1, 2), np.float32),
    )


Decays = list[tuple[float, float]]


def total(decays: Decays, made: tuple[Budgets, ...]) -> np.ndarray:
    """Mass truly lost at each ratio, with the heads of each layer given."""
    (artifact,) = made
    artifact.to_tensors()
    shares = np.asarray(artifact.shares, np.float64)[..., ::-1]
    decay = np.array(decays)[..., None]
    kept = np.expm1(-decay * shares * np.array(RATIOS)) / np.expm1(-decay)
    lost: np.ndarray = (1 - kept).sum(axis=(0, 1))
    return lost


SHAPES = dict.fromkeys(range(4), (2, 8, 8))
Method = Callable[[dict[int, AttentionMass]], tuple[Budgets, ...]]
METHODS: dict[str, Method] = {
    "pyramid": lambda m: budgets.pyramid(SHAPES, m, loss="lost"),
    "ada": lambda m: budgets.ada(SHAPES, m),
    "measured": lambda m: budgets.measured(SHAPES, m, loss="lost"),
}


@pytest.mark.parametrize("method", METHODS)
def test_layers_and_heads_alike_get_the_same(method: str) -> None:
    (made,) = METHODS[method]({i: planted(6, 6) for i in SHAPES})
    np.testing.assert_allclose(made.shares[..., 2:-1], 1, atol=0.06)


def test_a_diffuse_head_gets_more_than_a_concentrated_one() -> None:
    decays = [(2.0, 40.0)] * 4
    mass = {i: planted(*d) for i, d in enumerate(decays)}
    even = total(decays, budgets.uniform(SHAPES))
    for method in ("ada", "measured"):
        (made,) = METHODS[method](mass)
        share = made.at(1 / 8)
        assert np.all(share[:, 0] > 1.2)
        assert np.all(share[:, 1] < 0.8)
        lost = total(decays, (made,))
        assert np.all(lost[1:7] < 0.97 * even[1:7])


@pytest.mark.parametrize("falling", [True, False])
def test_a_pyramid_stands_on_the_side_that_needs_it(falling: bool) -> None:
    """The code's fixed slope is right for one kind of model and wrong for its mirror image."""
    rising = [(d, d) for d in (2.0, 10.0, 20.0, 60.0)]
    decays = rising if falling else rising[::-1]
    mass = {i: planted(*d) for i, d in enumerate(decays)}
    (made,) = METHODS["pyramid"](mass)
    slope = np.diff(made.at(1 / 4)[:, 0])
    assert np.all(slope < 0 if falling else slope > 0)
    even, found = total(decays, budgets.uniform(SHAPES)), total(decays, (made,))
    assert np.all(found <= even + 1e-12)
    assert np.all(found[2:6] < 0.9 * even[2:6])
    fixed = total(decays, budgets.pyramid(SHAPES, slope=0.95))
    assert fixed[2] < 0.9 * even[2] if falling else np.all(fixed[2:9] > even[2:9])
    assert np.all(total(decays, METHODS["measured"](mass)) <= found + 1e-9)


def test_the_codes_pyramid() -> None:
    shares = budgets.pyramid_shares(5, 0.95)
    np.testing.assert_allclose(shares[:, -1], [1.95, 1.475, 1, 0.525, 0.05])  # 1/20 of the mean
    assert np.all(shares * np.array(RATIOS) <= 1 + 1e-12)
    np.testing.assert_allclose(shares.mean(axis=0), 1)
    np.testing.assert_allclose(budgets.pyramid_shares(1, 0.95), np.ones((1, len(RATIOS))))


def test_water_filling_is_optimal() -> None:
    rng = np.random.default_rng(3)
    curves = np.cumsum(rng.random((6, len(RATIOS))), axis=1)  # bumpy: hulls are needed
    x0 = np.array(RATIOS)[::-1]
    for ratio in (RATIOS[2], RATIOS[7]):
        shares = budgets.water_fill(x0, curves[:, ::-1], ratio, 0.2)
        np.testing.assert_allclose(shares.mean(), 1)
        assert shares.min() >= 0.2 - 1e-12
        assert shares.max() <= 1 / ratio + 1e-12
        # The same as a linear program: loss above every line through two points of a hull.
        lines, limits = [], []
        for head, curve in enumerate(curves):
            x, y = budgets.convex_hull(x0, curve[::-1])
            for a, b, ya, yb in zip(x[:-1], x[1:], y[:-1], y[1:], strict=True):
                row = np.zeros(12)
                row[head], row[6 + head] = (yb - ya) / (b - a), -1
                lines.append(row)
                limits.append((yb - ya) / (b - a) * a - ya)
        bounds = [(0.2 * ratio, 1)] * 6 + [(None, None)] * 6
        best = linprog(
            np.repeat([0.0, 1.0], 6), np.array(lines), np.array(limits),
            np.repeat([[1.0, 0.0]], 6, axis=1).reshape(1, 12), [6 * ratio], bounds,
        )  # fmt: skip
        hulls = [budgets.convex_hull(x0, c[::-1]) for c in curves]
        cost = 0.0
        for (x, y), share in zip(hulls, shares, strict=True):
            first = y[0] + (y[0] - y[1]) / (x[1] - x[0]) * x[0]
            cost += np.interp(share * ratio, np.append(0, x), np.append(first, y))
        np.testing.assert_allclose(cost, best.fun)


def test_weights_draw_budget_to_layers_that_count() -> None:
    mass = {i: planted(6, 6) for i in SHAPES}
    (made,) = budgets.measured(SHAPES, mass, weights={0: 4.0, 1: 1.0, 2: 1.0, 3: 1.0})
    share = made.at(1 / 8).mean(axis=1)
    assert share[0] > 1.2
    assert share[1] < 1


def test_layers_of_other_shapes_keep_to_themselves() -> None:
    shapes = {0: (2, 8, 8), 1: (1, 8, 8), 2: (2, 8, 8)}
    mass = {0: planted(2, 2), 1: planted(4), 2: planted(40, 40)}
    made = budgets.measured(shapes, mass)
    assert [a.layers for a in made] == [(0, 2), (1,)]
    for artifact in made:
        artifact.to_tensors()
    np.testing.assert_allclose(made[1].shares, 1, rtol=1e-6)


def test_no_head_may_keep_more_than_there_is() -> None:
    shares = np.ones((2, 1, len(RATIOS))) * np.array([1.9, 0.1])[:, None, None]
    within = capped(shares)
    np.testing.assert_allclose(within.mean(axis=(0, 1)), 1)
    assert np.all(within * np.array(RATIOS) <= 1 + 1e-12)
    np.testing.assert_allclose(within[..., 0], 1)


def test_wrong_options() -> None:
    with pytest.raises(CalibrationError, match="slope"):
        budgets.pyramid(SHAPES)
    with pytest.raises(CalibrationError, match="safeguard of 2"):
        budgets.ada(SHAPES, {}, 2)
    with pytest.raises(CalibrationError, match="'mass'"):
        budgets.measured(SHAPES, {}, loss="mass")
    with pytest.raises(CalibrationError, match="without a layer"):
        budgets.uniform({})
