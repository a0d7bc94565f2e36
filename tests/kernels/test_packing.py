import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from velox_pack.kernels import (
    level_table,
    mixed_words,
    pack,
    pack_mixed,
    packed_words,
    unpack,
    unpack_levels,
    unpack_mixed,
)
from velox_pack.kernels.packing import unpack_joined


def stream(words, widths):
    """The definition, code by code: little-endian bits of the words, one field after another."""
    out = np.zeros((words.shape[0], len(widths)), dtype=np.uint32)
    for row, line in enumerate(words):
        value = int.from_bytes(line.astype("<u4").tobytes(), "little")
        for i, width in enumerate(widths):
            out[row, i] = value & ((1 << width) - 1)
            value >>= width
        assert value == 0, "the rest of the last word must be zero"
    return out


def random_codes(rng, rows, widths):
    return np.stack([rng.integers(0, 1 << w, rows) for w in widths], axis=-1).astype(np.uint32)


@pytest.mark.parametrize("bits", range(1, 9))
@given(n=st.integers(1, 200), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=12, deadline=None)
def test_round_trip_and_layout(bits, n, seed):
    codes = random_codes(np.random.default_rng(seed), 3, [bits] * n)
    words = pack(mx.array(codes), bits)
    assert words.dtype == mx.uint32
    assert words.shape == (3, packed_words(n, bits))
    np.testing.assert_array_equal(stream(np.array(words), [bits] * n), codes)
    np.testing.assert_array_equal(np.array(unpack(words, bits, n)), codes)


@given(widths=st.lists(st.integers(0, 8), min_size=1, max_size=140), seed=st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_mixed_round_trip_and_layout(widths, seed):
    codes = random_codes(np.random.default_rng(seed), 2, widths)
    words = pack_mixed(mx.array(codes), widths)
    assert words.shape == (2, mixed_words(widths)) == (2, max(1, -(-sum(widths) // 32)))
    np.testing.assert_array_equal(stream(np.array(words), widths), codes)
    np.testing.assert_array_equal(np.array(unpack_mixed(words, widths)), codes)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_layout_is_the_one_of_mx_quantize(bits):
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (5, 128)).astype(np.uint32)
    ones = mx.ones((5, 2))
    values = mx.dequantize(pack(mx.array(codes), bits), ones, 0 * ones, group_size=64, bits=bits)
    np.testing.assert_array_equal(np.array(values).astype(np.uint32), codes)

    words, scales, biases = mx.quantize(mx.random.normal((5, 128)), group_size=64, bits=bits)
    unpacked = unpack(words, bits, 128).reshape(5, 2, 64) * scales[..., None] + biases[..., None]
    exact = mx.dequantize(words, scales, biases, group_size=64, bits=bits)
    np.testing.assert_allclose(np.array(unpacked.reshape(5, 128)), np.array(exact), atol=1e-6)


@pytest.mark.parametrize("dtype", [mx.uint8, mx.int32, mx.uint32, mx.uint16])
def test_any_integer_dtype_and_surplus_bits(dtype):
    codes = mx.array([[1, 2, 3, 4 + 3, 0, 6]]).astype(dtype)
    assert unpack(pack(codes, 2), 2, 6).tolist() == [[1, 2, 3, 3, 0, 2]]
    assert unpack_mixed(pack_mixed(codes, [1, 2, 3, 2, 0, 8]), [1, 2, 3, 2, 0, 8]).tolist() == [
        [1, 2, 3, 3, 0, 6]
    ]


@pytest.mark.parametrize("bits", range(1, 9))
def test_leading_axes_views_and_empty(bits):
    rng = np.random.default_rng(0)
    codes = mx.array(rng.integers(0, 1 << bits, (2, 3, 8, 64)).astype(np.uint32))
    words = pack(codes, bits)
    assert words.shape == (2, 3, 8, 2 * bits)
    assert mx.array_equal(pack(codes[:, :, 2:5], bits), words[:, :, 2:5])
    assert mx.array_equal(pack(codes[..., ::2], bits), pack(mx.contiguous(codes[..., ::2]), bits))
    assert mx.array_equal(unpack(words[:, ::2, 1:], bits, 64), codes[:, ::2, 1:])
    assert mx.array_equal(unpack(words, bits, 40), codes[..., :40])
    empty = pack(codes[:, :, :0], bits)
    assert empty.shape == (2, 3, 0, 2 * bits)
    assert unpack(empty, bits, 64).shape == (2, 3, 0, 64)
    widths = [bits] * 64
    assert mx.array_equal(pack_mixed(codes, widths), words)
    assert mx.array_equal(unpack_mixed(words, widths), codes)
    assert unpack_mixed(empty, widths).shape == (2, 3, 0, 64)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("n", [1, 5, 64, 99, 576])
def test_levels_straight_from_words(bits, n):
    rng = np.random.default_rng(n)
    codes = mx.array(rng.integers(0, 1 << bits, (3, n)).astype(np.uint32))
    levels = mx.array(np.sort(rng.standard_normal(1 << bits)).astype(np.float32))
    found = unpack_levels(pack(codes, bits), bits, n, level_table(levels, bits))
    assert mx.array_equal(found, levels[codes])


def test_joined_codes():
    codes = mx.array([[1, 2, 3, 0, 1]], dtype=mx.uint32)
    assert unpack_joined(pack(codes, 2), 2, 2, 5).tolist() == [[1 + 4 * 2, 3, 1]]


def test_refusals():
    words = mx.zeros((2, 3), mx.uint32)
    for bits in (0, 9, -1):
        with pytest.raises(ValueError, match="1 to 8"):
            pack(words, bits)
        with pytest.raises(ValueError, match="1 to 8"):
            unpack(words, bits, 4)
    with pytest.raises(ValueError, match="fewer than 33 codes"):
        unpack(words, 3, 33)
    with pytest.raises(ValueError, match="cannot be read at once"):
        unpack_joined(words, 3, 3, 9)
    with pytest.raises(ValueError, match="0 to 8"):
        pack_mixed(words, [1, 9, 2])
    with pytest.raises(ValueError, match="0 to 8"):
        mixed_words([])
    with pytest.raises(ValueError, match="3 codes a row for 2 widths"):
        pack_mixed(words, [1, 2])
    with pytest.raises(ValueError, match="3 words a row"):
        unpack_mixed(words, [8] * 9 + [8] * 4)
    with pytest.raises(ValueError, match="for 3 bits"):
        level_table(mx.zeros((4,)), 3)
    with pytest.raises(ValueError, match="not one for 2 bits"):
        unpack_levels(words, 2, 4, level_table(mx.zeros((8,)), 3))
    with pytest.raises(ValueError, match="fewer than"):
        unpack_levels(words, 2, 49, level_table(mx.zeros((4,)), 2))
