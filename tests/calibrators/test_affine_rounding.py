"""Affine rounding in NumPy: against MLX's, and what relaxing it is worth."""

import mlx.core as mx
import numpy as np
import pytest

from velox_pack.calibrators import affine_rounding as affine


def sample(tokens: int = 192) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((2, tokens, 64))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_about_as_good_as_mlx(bits: int) -> None:
    x = sample()
    codes = mx.quantize(mx.array(x.astype(np.float32)), group_size=64, bits=bits)
    theirs = np.array(mx.dequantize(*codes, group_size=64, bits=bits))
    ours = affine.rounded(x, bits, "token")
    most = 1.3 if bits == 2 else 1.1  # MLX keeps 0 exact, which is worth something at 2 bits
    assert affine.relative_error(x, ours) < most * affine.relative_error(x, theirs)


@pytest.mark.parametrize("axis", affine.AXES)
def test_groups_run_along_their_axis(axis: str) -> None:
    x = sample(100)
    x[:, :, 3] *= 100  # a channel that spoils the groups of tokens only
    error = affine.relative_error(np.delete(x, 3, 2), np.delete(affine.rounded(x, 3, axis), 3, 2))
    assert (error < 0.1) == (axis == "channel")
    once = affine.rounded(x, 3, axis)
    assert once.shape == x.shape
    parts = np.concatenate(
        [affine.rounded(x[:, :64], 3, axis), affine.rounded(x[:, 64:], 3, axis)], 1
    )
    np.testing.assert_array_equal(once, parts)


def test_relaxing_helps_few_bits_at_no_cost() -> None:
    x = sample()
    plain, relaxed = (
        affine.relative_error(x, affine.rounded(x, 1, "token", relax=r)) for r in (0, 1 / 3)
    )
    assert relaxed < plain / 4
    np.testing.assert_array_equal(
        affine.encode(x, 1, "token").codes, affine.encode(x, 1, "token", relax=0.3).codes
    )


def test_constant_groups_and_wrong_arguments() -> None:
    x = np.full((1, 64, 64), 3.0)
    np.testing.assert_array_equal(affine.rounded(x, 2, "channel"), x)
    with pytest.raises(ValueError, match="axis"):
        affine.rounded(x, 2, "head")
    with pytest.raises(ValueError, match="divide"):
        affine.rounded(x[:, :, :60], 2, "token", group=16)


def test_interpolation_is_on_the_logarithm() -> None:
    curve = {1.0: 0.1, 2.0: 0.001}
    assert affine.interpolated(curve, 1.5) == pytest.approx(0.01)
    assert affine.interpolated(curve, 3.0) == pytest.approx(1e-5)
