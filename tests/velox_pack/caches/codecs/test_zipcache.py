import mlx.core as mx
import numpy as np
import pytest

from trained_tokens import through, trained
from velox_pack.caches.codecs.zipcache import ChannelSeparable
from velox_pack.calibrators import affine_rounding
from velox_pack.calibrators.affine_rounding import half
from velox_pack.manifests.errors import RecipeError


def joined(x):
    """[H, N, D] to [1, N, H * D]."""
    return x.swapaxes(0, 1).reshape(1, x.shape[1], -1)


def reference(x, bits, group):
    """Scales by channel and group of tokens, then rounding of whole tokens, in NumPy."""
    y = joined(x).reshape(-1, group, x.shape[0] * x.shape[2])
    scales = half(np.clip(np.sqrt(np.abs(y).max(axis=1, keepdims=True)), 2**-10, None))
    rows = (y / scales).reshape(1, -1, y.shape[2])
    near = affine_rounding.rounded(rows, bits, "token", group=y.shape[2])
    return (near.reshape(y.shape) * scales).reshape(1, -1, y.shape[2])


def spiked(heads, tokens, dim, seed=0):
    """A few channels thirty times as large."""
    x = np.random.default_rng(seed).standard_normal((heads, tokens, dim))
    x[0, :, 3] *= 30
    x[-1, :, dim - 2] *= 30
    return x


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("dim", [16, 64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("heads", [1, 3])
def test_decodes_to_what_numpy_decodes_in_the_bytes_said(heads, dim, bits):
    x = spiked(heads, 64, dim)
    codec = ChannelSeparable(bits, 32, heads, dim)
    words, ranges, scales = codec.encode(mx.array(x.astype(np.float32))[None], 0)
    width = heads * dim
    assert (words.dtype, words.shape) == (mx.uint32, (1, 1, 2, 32, -(-bits * width // 32)))
    assert (ranges.dtype, ranges.shape) == (mx.float16, (1, 1, 2, 32, 2))
    assert (scales.dtype, scales.shape) == (mx.float16, (1, 1, 2, width))
    found, wanted = joined(through(codec, x)), reference(x, bits, 32)
    close = np.isclose(found, wanted, rtol=1e-3, atol=1e-3)
    assert np.mean(close) > 0.999  # a number on an edge may round either way


def test_scales_of_channels_win_where_channels_differ():
    """At 4 bits and little beside them, against a range for each whole token alone."""
    x = spiked(2, 256, 64)
    ours = np.square(x - through(ChannelSeparable(4, 64, 2, 64), x))
    plain = np.square(joined(x) - affine_rounding.rounded(joined(x), 4, "token", group=128))
    assert np.median(ours) < 0.2 * np.median(plain)


def test_trained_values_beat_whole_tokens_alone():
    for layer in trained()[1].values():
        x = layer.part("values").astype(np.float64)
        ours = np.square(x - through(ChannelSeparable(4, 64, x.shape[0], x.shape[2]), x)).sum()
        rows = joined(x)
        plain = affine_rounding.rounded(rows, 4, "token", group=rows.shape[2])
        assert ours < np.square(rows - plain).sum()


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_batches_and_16_bit_rows(dtype):
    codec = ChannelSeparable(4, 8, 2, 64)
    x = mx.array(spiked(2, 16, 64).astype(np.float32))[None].astype(dtype)
    y = codec.decode(codec.encode(mx.concatenate([x, x[:, ::-1]]), 0), 0, dtype)
    assert y.dtype == dtype
    assert mx.allclose(y[0], y[1][::-1], atol=0.01)
    one = codec.decode(codec.encode(x[:, :, :8], 0), 0, dtype)
    assert mx.array_equal(y[:1, :, :8], one)


def test_zeros_large_bfloat16_and_wrong_bits():
    codec = ChannelSeparable(4, 4, 1, 32)
    zeros = mx.zeros((1, 1, 4, 32))
    assert mx.array_equal(codec.decode(codec.encode(zeros, 0), 0, mx.float32), zeros)
    large = (mx.arange(128).reshape(1, 1, 4, 32) * 1e4).astype(mx.bfloat16)
    y = codec.decode(codec.encode(large, 0), 0, mx.bfloat16)
    assert mx.abs(y - large).max().item() < 0.1 * large.max().item()
    for bits, group in ((0, 4), (9, 4), (4, 0)):
        with pytest.raises(RecipeError, match="bits are 1 to 8"):
            ChannelSeparable(bits, group, 1, 32)
