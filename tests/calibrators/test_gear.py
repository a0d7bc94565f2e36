"""What rounding leaves over: a basis where it has one, a correction where it has none."""

from typing import Any

import numpy as np

from token_samples import made, of_demo, rows_of, same_bytes
from velox_pack.calibrators import gear
from velox_pack.calibrators.affine_rounding import interpolated, relative_error, rounded


def low_rank_residual(seed: int) -> np.ndarray:
    """One huge channel spoils the groups; the others are a rank 2 signal far below a step."""
    rng, fixed = np.random.default_rng(seed), np.random.default_rng(7)
    signal = rng.standard_normal((1, 512, 2)) @ fixed.standard_normal((2, 64))
    signal[:, :, 0] = 1000 * np.sign(rng.standard_normal((1, 512)))
    return signal


def test_planted_residual_has_a_basis_and_rounding_alone_loses() -> None:
    (found,) = gear.fit(made([low_rank_residual(0)]), "values", 2, rank=2, outliers=0.0)
    assert found.captured.min() > 0.9
    fresh = low_rank_residual(1)
    out, bits = gear.decoded(found, 0, fresh)
    plain = {
        b + 0.5: relative_error(fresh[:, :, 1:], rounded(fresh, b, "token")[:, :, 1:])
        for b in (2, 3)
    }
    assert bits == 2 + 0.5 + 16 * 2 / 64
    assert relative_error(fresh[:, :, 1:], out[:, :, 1:]) < interpolated(plain, bits) / 5


def test_outliers_are_kept_where_they_are_worth_it() -> None:
    x = np.random.default_rng(0).standard_normal((2, 256, 64))
    assert gear.best_share([x], 2, "token") == 0.0
    x[:, :, 5] *= 100
    assert gear.best_share([x], 2, "token") > 0
    out, kept = gear.sparse_rounded(x, 2, "token", 0.02)
    assert kept == 2 / 64
    assert relative_error(x, out) < relative_error(x, rounded(x, 2, "token")) / 30


def test_trained_rounding_errors_have_hardly_a_direction(demo: Any) -> None:
    """GEAR's low rank loses at equal bytes: the premise of the correction."""
    tokens, held, _ = of_demo(demo)
    for part, axis in (("keys", "channel"), ("values", "token")):
        found = gear.fit(tokens, part, 2, rank=4)
        assert all(4 / 64 < a.captured.mean() < 0.25 for a in found)
        xs = {i: held[i].part(part, before_rope=False) for i in held}
        rows = rows_of(found)
        errors, bits = zip(
            *(
                (relative_error(x, out), b)
                for i, x in xs.items()
                for out, b in [gear.decoded(*rows[i], x)]
            ),
            strict=True,
        )
        plain = {
            b + 0.5: np.mean([relative_error(x, rounded(x, b, axis)) for x in xs.values()])
            for b in (2, 3)
        }
        assert np.mean(errors) > 1.5 * interpolated(plain, float(np.mean(bits)))


def test_correction_gains_at_no_byte(demo: Any) -> None:
    tokens, held, _ = of_demo(demo)
    for part, axis in (("keys", "channel"), ("values", "token")):
        found = gear.correct(tokens, part, 2)
        assert same_bytes(found, gear.correct(tokens, part, 2))
        ours = plain = 0.0
        for i, (a, n) in rows_of(found).items():
            x = held[i].part(part)
            ours += relative_error(x, gear.corrected(a, n, x))
            plain += relative_error(x, rounded(x, 2, axis))
            assert a.corrected[n] < a.plain[n]
        assert ours < 0.75 * plain


def test_planted_dependence_of_heads_corrects_and_independence_harms_nothing() -> None:
    rng = np.random.default_rng(0)
    one = rng.standard_normal((1, 2048, 32))
    same = np.concatenate([one, one, one, one]) + 0.01 * rng.standard_normal((4, 2048, 32))
    same *= rng.uniform(0.5, 2, (4, 1, 32))
    errors = []
    for x in (same, rng.standard_normal((4, 2048, 32))):
        (found,) = gear.correct(made([x[:, :1024]]), "values", 2)
        fresh = x[:, 1024:]
        better, plain = gear.corrected(found, 0, fresh), rounded(fresh, 2, "token")
        errors.append(relative_error(fresh, better) / relative_error(fresh, plain))
    assert errors[0] < 0.5
    assert errors[1] < 1.01
