"""Outlier channels in a stream of their own."""

from typing import Any

import numpy as np
import pytest

from token_samples import made, of_demo, rows_of
from velox_pack.calibrators import outliers
from velox_pack.calibrators.affine_rounding import interpolated, relative_error, rounded
from velox_pack.manifests.errors import CalibrationError


def two_outliers(seed: int) -> np.ndarray:
    x = np.random.default_rng(seed).standard_normal((2, 512, 64))
    x[:, :, [7, 40]] *= 30
    return x


def test_planted_channels_are_found_and_one_stream_loses() -> None:
    (found,) = outliers.fit(made([two_outliers(0)]), "values", 2)
    assert found.channels[0].tolist() == [[7, 40], [7, 40]]
    assert found.threshold[0] > 20
    fresh = two_outliers(1)
    ours = relative_error(fresh, outliers.decoded(found, 0, fresh))
    bits = outliers.bits_per_element(found)
    assert bits == pytest.approx((2 * 62 + 4 * 2) / 64 + 8 / 64)
    one = np.mean([outliers._rotated(fresh, 2), outliers._rotated(fresh, 3)])
    assert ours < one / 3
    plain = {b + 0.5: relative_error(fresh, rounded(fresh, b, "token")) for b in (2, 3)}
    assert ours < interpolated(plain, bits) / 3


def test_pairs_of_rope_go_together() -> None:
    deviation = np.ones((1, 16))
    deviation[0, 2] = 9
    for traditional, partner in ((False, 6), (True, 3)):
        chosen = outliers.largest(deviation, 2, (8, traditional))
        assert chosen.tolist() == [sorted([2, partner])]
    with pytest.raises(CalibrationError, match="whole pairs"):
        outliers.largest(deviation, 3, (8, False))


def test_trained_model_gains_on_held_out_text(demo: Any) -> None:
    tokens, held, _ = of_demo(demo)
    for part, axis, before in (
        ("keys", "channel", False),
        ("keys", "channel", True),
        ("values", "token", True),
    ):
        found = outliers.fit(tokens, part, 2, before_rope=before)
        assert all(a.pairs == (part == "keys" and not before) for a in found)
        rows = rows_of(found)
        xs = {i: held[i].part(part, before_rope=before) for i in held}
        ours = np.mean([relative_error(x, outliers.decoded(*rows[i], x)) for i, x in xs.items()])
        plain = {
            b + 0.5: np.mean([relative_error(x, rounded(x, b, axis)) for x in xs.values()])
            for b in (1, 2, 3)
        }
        assert ours < 0.5 * interpolated(plain, outliers.bits_per_element(found[0]))


@pytest.mark.parametrize("options", [{"count": 64}, {"more": 5}])
def test_wrong_arguments(options: dict[str, int]) -> None:
    with pytest.raises(CalibrationError, match="outliers"):
        outliers.fit(made([two_outliers(0)]), "values", 2, **options)
