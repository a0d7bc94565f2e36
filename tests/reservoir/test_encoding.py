import mlx.core as mx
import numpy as np
import pytest

from velox_pack.calibrators.codebooks import lloyd_max
from velox_pack.kernels import make_rotation, midpoints, quantize_levels, rotate
from velox_pack.manifests.errors import PackError
from velox_pack.reservoir import encoding
from velox_pack.reservoir.encoding import (
    decode_affine,
    decode_lloyd,
    encode_affine,
    encode_lloyd,
)


def lloyd(weight, levels, bits):
    packed = encode_lloyd(weight, levels(bits), bits)
    return decode_lloyd(**packed, bits=bits, width=weight.shape[1])


def affine(weight, bits, group, dtype=mx.bfloat16):
    packed = encode_affine(weight, bits, group, dtype)
    return decode_affine(**packed, bits=bits, group=group)


def plain(weight, bits, group):
    packed = mx.quantize(weight, group_size=group, bits=bits)
    return mx.dequantize(*packed, group_size=group, bits=bits)


def nmse(weight, rebuilt):
    weight = weight.astype(mx.float32)
    return float(mx.sum(mx.square(weight - rebuilt)) / mx.sum(mx.square(weight)))


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_lloyd_reaches_the_theory_on_gaussian_rows(bits, levels):
    weight = mx.random.normal((64, 1536), key=mx.random.key(bits)) * 0.02
    theory = lloyd_max(bits)[1]
    assert 0.85 * theory < nmse(weight, lloyd(weight, levels, bits)) < 1.02 * theory


def test_lloyd_scales_beat_the_root_mean_square_on_trained_weights(trained, levels):
    gains = []
    for weight in trained.values():
        rows = rotate(weight, make_rotation(weight.shape[1], 0))
        rms = mx.sqrt(mx.mean(mx.square(rows), axis=-1, keepdims=True))
        naive = levels(4)[quantize_levels(rows / rms, midpoints(levels(4)))] * rms
        gains.append(nmse(rows, lloyd(rows, levels, 4)) / nmse(rows, naive))
    assert max(gains) < 1
    assert np.mean(gains) < 0.95


@pytest.mark.parametrize(("bits", "group", "part"), [(4, 64, 0.85), (3, 64, 0.8), (4, 32, 0.8)])
def test_fitted_groups_beat_min_max_at_equal_bytes_on_trained_weights(trained, bits, group, part):
    ratios = []
    for weight in trained.values():
        if weight.shape[1] % group:
            continue
        naive = plain(weight, bits, group)
        turned = rotate(weight, make_rotation(weight.shape[1], 0))
        ratios.append(nmse(turned, affine(turned, bits, group)) / nmse(weight, naive))
    assert len(ratios) >= 30
    assert max(ratios) < 0.95
    assert np.mean(ratios) < part


def test_outlier_channels_need_the_rotation(levels):
    """Planted: three input channels 30 times the others, as trained models have them."""
    weight = np.random.default_rng(0).standard_normal((128, 512)).astype(np.float32) * 0.02
    weight[:, [7, 130, 400]] *= 30
    weight = mx.array(weight)
    turned = rotate(weight, make_rotation(512, 0))
    small = np.ones(512, dtype=bool)
    small[[7, 130, 400]] = False
    assert nmse(turned, lloyd(turned, levels, 4)) < 0.5 * nmse(weight, lloyd(weight, levels, 4))
    naive = np.array(plain(weight, 4, 64))[:, small]
    assert nmse(weight[:, mx.array(np.flatnonzero(small))], mx.array(naive)) > 0.02
    assert nmse(turned, affine(turned, 4, 64)) < 0.01


def test_affine_is_the_format_of_mx_quantize():
    weight = mx.random.normal((24, 256))
    for bits in (2, 3, 4, 5, 6, 8):
        packed = encode_affine(weight, bits, 64, mx.float16)
        codes, scales, biases = packed["codes"], packed["scales"], packed["biases"]
        theirs = mx.quantize(weight.astype(mx.float16), group_size=64, bits=bits)
        assert [a.shape for a in (codes, scales, biases)] == [a.shape for a in theirs]
        assert [a.dtype for a in (codes, scales, biases)] == [a.dtype for a in theirs]
        x = mx.random.normal((3, 256))
        product = mx.quantized_matmul(
            x, codes, scales.astype(mx.float32), biases.astype(mx.float32), bits=bits
        )
        exact = x @ decode_affine(codes, scales, biases, bits, 64).T
        np.testing.assert_allclose(np.array(product), np.array(exact), atol=1e-3)


def test_groups_without_spread_are_exact():
    weight = mx.concatenate([mx.zeros((2, 64)), mx.full((2, 64), 0.5)], axis=1)
    assert mx.array_equal(affine(weight, 4, 64), weight)
    two_values = mx.array([[0.25, -0.75] * 32])
    np.testing.assert_allclose(np.array(affine(two_values, 4, 32)), two_values, atol=4e-3)


def test_zero_rows_stay_zero(levels):
    weight = mx.zeros((3, 64))
    weight[1] = mx.random.normal((64,))
    rebuilt = lloyd(weight, levels, 4)
    assert mx.array_equal(rebuilt[mx.array([0, 2])], mx.zeros((2, 64)))
    assert nmse(weight, rebuilt) < 0.02
    assert mx.array_equal(lloyd(mx.zeros((2, 64)), levels, 3), mx.zeros((2, 64)))


@pytest.mark.parametrize("magnitude", [1e-12, 1e-7, 1e-3, 1.0, 1e5, 1e12])
def test_scales_beyond_float16_move_into_the_levels(magnitude, levels):
    weight = mx.random.normal((8, 256)) * magnitude
    packed = encode_lloyd(weight, levels(4), 4)
    assert packed["scales"].dtype == mx.float16
    assert bool(mx.all(mx.isfinite(packed["scales"])))
    power = float(packed["levels"][-1] / levels(4)[-1])
    assert power == 2.0 ** round(np.log2(power))
    assert (power == 1.0) == (1e-4 < magnitude < 1e4)
    assert nmse(weight / magnitude, lloyd(weight, levels, 4) / magnitude) < 0.011


def test_rows_of_very_different_size(levels):
    weight = mx.random.normal((6, 256)) * mx.array([[1e-6], [1e-4], [1e-2], [1], [10], [100]])
    rebuilt = lloyd(weight, levels, 4)
    for row in range(6):
        scale = float(mx.max(mx.abs(weight[row])))
        assert nmse(weight[row] / scale, rebuilt[row] / scale) < 0.013


def test_blocks_do_not_change_the_result(levels, monkeypatch):
    weight = mx.random.normal((37, 128))
    whole = encode_lloyd(weight, levels(3), 3), encode_affine(weight, 4, 64, mx.bfloat16)
    monkeypatch.setattr(encoding, "_BLOCK_ELEMENTS", 5 * 128)
    parts = encode_lloyd(weight, levels(3), 3), encode_affine(weight, 4, 64, mx.bfloat16)
    for one, other in zip(whole, parts, strict=True):
        for name, array in one.items():
            assert mx.array_equal(array, other[name]), name


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_weights(dtype, levels):
    weight = (mx.random.normal((16, 128)) * 0.02).astype(dtype)
    assert nmse(weight, lloyd(weight, levels, 4)) < 0.011
    assert nmse(weight, affine(weight, 4, 64, dtype)) < 0.009


@pytest.mark.parametrize("width", [1, 33, 100])
def test_odd_widths(width, levels):
    weight = mx.random.normal((200, width))
    rebuilt = lloyd(weight, levels, 3)
    assert rebuilt.shape == weight.shape
    assert nmse(weight, rebuilt) < 0.04


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused(bad, levels):
    weight = mx.random.normal((8, 64))
    weight[3, 5] = bad
    with pytest.raises(PackError, match="not finite"):
        encode_lloyd(weight, levels(4), 4)
    with pytest.raises(PackError, match="not finite"):
        encode_affine(weight, 4, 64, mx.float16)


def test_weights_that_affine_scales_cannot_hold_are_refused():
    weight = mx.random.normal((4, 64)) * 1e6
    assert nmse(weight, affine(weight, 4, 64, mx.bfloat16)) < 0.01
    with pytest.raises(PackError, match="do not fit"):
        encode_affine(weight, 4, 64, mx.float16)
