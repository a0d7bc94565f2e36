"""Sharing codes with the layer before: found where it is worth it, and only there."""

from typing import Any

import numpy as np
import pytest

from token_samples import made, of_demo, rows_of, same_bytes
from velox_pack.calibrators import affine_rounding, xquant
from velox_pack.calibrators.affine_rounding import interpolated, relative_error
from velox_pack.manifests.errors import CalibrationError


def layers(seed: int = 0) -> list[np.ndarray]:
    """0 and 1 alike but for scale and place of each channel, 2 and 3 with nothing in common."""
    rng = np.random.default_rng(seed)
    first = rng.standard_normal((2, 256, 64))
    second = first * rng.uniform(-3, 3, (2, 1, 64)) + rng.standard_normal((2, 1, 64))
    second += 0.05 * rng.standard_normal(second.shape)
    return [first, second, *rng.standard_normal((2, 2, 256, 64))]


@pytest.mark.parametrize("bits", [1, 2])
def test_planted_pair_shares_and_beats_its_bytes(bits: int) -> None:
    x = layers()
    (found,) = xquant.fit(made(x), "keys", bits)
    assert found.partner.tolist() == [-1, 0, -1, -1]
    assert found.agreement[1] > 0.6 > 0.3 > found.agreement[3]
    fresh = layers(seed=1)
    lent = xquant.encode(found, 0, fresh[0])
    errors = [
        relative_error(fresh[0], lent.decode()),
        relative_error(fresh[1], xquant.encode(found, 1, fresh[1], lent).decode()),
    ]
    at = (xquant.bits_per_element(found, 0) + xquant.bits_per_element(found, 1)) / 2
    plain = {
        b + 0.5: np.mean(
            [relative_error(v, affine_rounding.rounded(v, b, "channel")) for v in fresh[:2]]
        )
        for b in (1, 2)
    }
    assert np.mean(errors) < interpolated(plain, at) / 2
    with pytest.raises(ValueError, match="needs the codes"):
        xquant.encode(found, 1, fresh[1])


def test_least_squares_is_no_worse_than_the_authors_and_than_nothing() -> None:
    x = layers()
    lent = affine_rounding.encode(x[2], 2, "channel")
    ours, theirs = (
        relative_error(x[3], xquant.borrow(lent, x[3], least_squares=own, relax=0.045).decode())
        for own in (True, False)
    )
    assert ours < 1.0 < 1.5 < theirs


def test_relaxation_is_the_best_there_is() -> None:
    x = np.random.default_rng(0).standard_normal((2, 256, 64))
    best = xquant.measured_relaxation([x], 1, "channel")
    errors = [
        relative_error(x, affine_rounding.rounded(x, 1, "channel", relax=r))
        for r in (best, best - 0.02, best + 0.02, xquant.RELAX[1], 0)
    ]
    assert errors[0] == min(errors)
    assert errors[3] < errors[4] / 2  # the authors' is on the way


def test_trained_layers_hold_their_channels_in_bases_of_their_own(demo: Any) -> None:
    tokens, held, _ = of_demo(demo)
    found = xquant.fit(tokens, "values", 2)
    assert same_bytes(found, xquant.fit(tokens, "values", 2))
    assert all(np.all(a.partner == -1) for a in found)
    assert all(a.agreement.max() < 0.3 for a in found)
    for layer, (a, n) in rows_of(found).items():  # relaxed rounding is what is left of it
        x = held[layer].values
        plain = affine_rounding.rounded(x, 2, a.axis)
        assert relative_error(x, xquant.encode(a, n, x).decode()) < relative_error(x, plain)


def test_bits() -> None:
    with pytest.raises(CalibrationError, match="not 1 to 8"):
        xquant.fit(made(layers()), "keys", 9)
