import dataclasses

import mlx.core as mx
import numpy as np
import pytest
import scipy.linalg

from velox_pack.kernels import (
    StructuredRotation,
    hadamard,
    make_rotation,
    mix_size,
    rotate,
    rotate_transpose,
)

REAL = [576, 896, 960, 1152, 1408, 1536, 4864, 8960, 11008, 14336, 29568]


def kurtosis(x):
    """Mean over rows; 3 for a Gaussian."""
    x = np.asarray(x, dtype=np.float64)
    return np.mean(np.mean(x**4, axis=-1) / np.mean(x**2, axis=-1) ** 2)


@pytest.mark.parametrize("n", [1, 2, 4, 64, 256])
def test_hadamard_is_the_sylvester_matrix(n):
    exact = scipy.linalg.hadamard(n) / np.sqrt(n)
    np.testing.assert_allclose(np.array(hadamard(mx.eye(n))), exact, atol=1e-6)


@pytest.mark.parametrize("n", [8192, 16384])
def test_hadamard_beyond_one_call(n):
    x = mx.zeros((2, n))
    x[0, 5], x[1, n - 1] = 1.0, 1.0
    rows = scipy.linalg.hadamard(n // 4096)
    base = scipy.linalg.hadamard(4096)
    exact = [np.kron(rows[k // 4096], base[k % 4096]) for k in (5, n - 1)]
    np.testing.assert_allclose(np.array(hadamard(x)), np.array(exact) / np.sqrt(n), atol=1e-7)


# 12, 20 and 28 times something pass MLX's own check and corrupt the heap or are not self-inverse.
@pytest.mark.parametrize("n", [0, 3, 12, 20, 28, 576, 896, 8960])
def test_hadamard_refuses_other_sizes(n):
    with pytest.raises(ValueError, match="powers of two"):
        hadamard(mx.zeros((2, n)))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_hadamard_keeps_dtype_and_empty_arrays(dtype):
    assert hadamard(mx.ones((3, 64), dtype)).dtype == dtype
    assert hadamard(mx.ones((0, 64), dtype)).shape == (0, 64)


def test_every_small_width_is_orthogonal():
    for width in range(1, 301):
        rotation = make_rotation(width, seed=7)
        matrix = np.array(rotate(mx.eye(width), rotation), dtype=np.float64)
        assert np.abs(matrix @ matrix.T - np.eye(width)).max() < 1e-6, width
        transpose = np.array(rotate_transpose(mx.eye(width), rotation))
        np.testing.assert_allclose(transpose, matrix.T, atol=1e-6, err_msg=str(width))


@pytest.mark.parametrize("width", REAL)
def test_real_widths_are_orthogonal(width):
    rotation = make_rotation(width, seed=1)
    x = mx.random.normal((8, width), key=mx.random.key(width)) / width**0.5
    y = rotate(x, rotation)
    gram = np.array(x, dtype=np.float64) @ np.array(x, dtype=np.float64).T
    turned = np.array(y, dtype=np.float64) @ np.array(y, dtype=np.float64).T
    assert np.abs(gram - turned).max() < 1e-6
    np.testing.assert_allclose(np.array(rotate_transpose(y, rotation)), np.array(x), atol=1e-6)
    assert rotation.nbytes <= 4 * width + 4 * 64 * 64


# 5 * 67 * 7 = 2345 and the prime 4999 take the overlapping form.
@pytest.mark.parametrize("width", [*REAL, 512, 4096, 2345, 4999])
def test_outlier_channels_come_out_gaussian(width):
    rng = np.random.default_rng(width)
    rows = rng.standard_normal((64, width)).astype(np.float32)
    for channels in (rng.choice(width, 3, replace=False), [0, 1, 2], [0, width // 2, width - 1]):
        x = rows.copy()
        x[:, channels] *= 30
        assert kurtosis(x) > 50, "the premise: these rows are far from Gaussian"
        y = np.array(rotate(mx.array(x), make_rotation(width, seed=3)))
        # Below 3 where a few outliers are all of a short row; never a heavy tail.
        assert 2.2 < kurtosis(y) < 3.05


def test_rotated_products_are_kept():
    rotation = make_rotation(576, seed=0)
    x, w = mx.random.normal((4, 576)), mx.random.normal((9, 576))
    turned = rotate(x, rotation) @ rotate(w, rotation).T
    np.testing.assert_allclose(np.array(turned), np.array(x @ w.T), atol=3e-4)


def test_deterministic_and_different_for_seed_and_width():
    first, again, other = (make_rotation(896, seed) for seed in (5, 5, 6))
    assert mx.array_equal(first.signs, again.signs)
    assert mx.array_equal(first.mix, again.mix)
    assert not mx.array_equal(first.signs, other.signs)
    assert not mx.array_equal(make_rotation(448, 5).signs, first.signs[:448])
    # Golden: a bundle made today must be made again with the same signs tomorrow.
    signs = make_rotation(576, 0).signs.tolist()
    assert "".join("+" if s > 0 else "-" for s in signs[:24]) == "++-+-++++-++-+-++-+--+++"


def test_shape_of_what_is_stored():
    assert (make_rotation(896, 0).block, mix_size(896)) == (128, 7)
    assert (make_rotation(4864, 0).block, mix_size(4864)) == (256, 19)
    assert (make_rotation(512, 0).block, mix_size(512)) == (512, None)
    assert (make_rotation(4999, 0).block, mix_size(4999)) == (4096, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_rotation(8, 0).block = 4


def test_empty_batches_and_dtypes():
    for width in (64, 96, 4999):
        rotation = make_rotation(width, 0)
        assert rotate(mx.zeros((2, 0, width)), rotation).shape == (2, 0, width)
        x = mx.random.normal((3, width))
        for dtype in (mx.float16, mx.bfloat16):
            y = rotate(x.astype(dtype), rotation)
            assert y.dtype == dtype
            np.testing.assert_allclose(
                np.array(y.astype(mx.float32)), np.array(rotate(x, rotation)), atol=0.1
            )


@pytest.mark.parametrize(
    ("signs", "block", "mix", "message"),
    [
        (mx.ones((2, 4)), 8, None, "one axis"),
        (mx.ones((12,)), 12, mx.eye(1), "power of two"),
        (mx.ones((12,)), 4, None, "needs 8"),
        (mx.ones((12,)), 4, mx.eye(4), "does not make width 12"),
        (mx.ones((12,)), 4, mx.ones((3, 2)), "does not make width 12"),
    ],
)
def test_refusals(signs, block, mix, message):
    with pytest.raises(ValueError, match=message):
        StructuredRotation(signs, block, mix)


def test_other_widths_are_refused():
    with pytest.raises(ValueError, match="width 0"):
        make_rotation(0, 0)
    with pytest.raises(ValueError, match="width 8 for rows of 9"):
        rotate(mx.zeros((2, 9)), make_rotation(8, 0))
    with pytest.raises(ValueError, match="width 8 for rows of 9"):
        rotate_transpose(mx.zeros((2, 9)), make_rotation(8, 0))
