import mlx.core as mx
import numpy as np
import pytest

from velox_pack.caches.codecs.affine import Affine
from velox_pack.caches.codecs.exact import Exact
from velox_pack.calibrators import affine_rounding
from velox_pack.manifests.errors import RecipeError


def normal(*shape, seed=0):
    return mx.array(np.random.default_rng(seed).standard_normal(shape, np.float32))


def nmse(x, y):
    x, y = np.array(x, np.float64), np.array(y.astype(mx.float32), np.float64)
    return float(((x - y) ** 2).sum() / (x**2).sum())


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_exact_changes_nothing_and_holds_no_view(dtype):
    before = mx.get_active_memory()
    x = normal(1, 1, 4096, 16).astype(dtype)
    (held,) = Exact().encode(x[:, :, 8:24], 8)
    assert mx.array_equal(Exact().decode((held,), 8, dtype), x[:, :, 8:24])
    assert held.dtype == dtype
    del x
    assert mx.get_active_memory() - before < 4 * held.nbytes


# NMSE on a Gaussian at group 32, measured with mx.quantize: 0.13, 0.029, 0.0065 at 2, 3, 4 bits.
@pytest.mark.parametrize(("bits", "most"), [(2, 0.18), (3, 0.04), (4, 0.009), (6, 6e-4), (8, 4e-5)])
@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize("axis", ["token", "channel"])
def test_affine_error_and_size(bits, most, group, axis):
    codec = Affine(bits, group, 128, axis)
    x = normal(2, 3, 128, 128)
    packed = codec.encode(x, 0)
    assert nmse(x, codec.decode(packed, 0, mx.float32)) < most
    codes, scales, biases = packed
    assert (codes.dtype, scales.dtype, biases.dtype) == (mx.uint32, mx.float16, mx.float16)
    assert codes.nbytes * 8 == x.size * bits
    assert scales.nbytes == biases.nbytes == 2 * x.size // group
    assert all(a.shape[2] == 128 // codec.granularity for a in packed)


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("dim", [64, 96, 192, 256])
def test_affine_per_token_is_mlx_quantize(bits, dim):
    """In a 16-bit model scales lose nothing, so the baseline is mlx-lm's own."""
    x = normal(1, 2, 16, dim).astype(mx.bfloat16)
    group = 32 if dim == 96 else 64
    codec = Affine(bits, group, dim)
    expected = mx.dequantize(*mx.quantize(x, group, bits), group_size=group, bits=bits)
    assert mx.array_equal(codec.decode(codec.encode(x, 0), 0, mx.bfloat16), expected)


def test_groups_along_tokens_win_where_channels_differ():
    """KIVI's reason: outlier channels spoil every group of a token, but only their own column."""
    x = normal(1, 2, 128, 64) * mx.where(mx.arange(64) % 16 == 5, 30.0, 1.0)
    x = x + mx.where(mx.arange(64) % 16 == 5, 100.0, 0.0)
    channel, token = (Affine(4, 64, 64, axis) for axis in ("channel", "token"))
    errors = [nmse(x, c.decode(c.encode(x, 0), 0, mx.float32)) for c in (channel, token)]
    assert errors[0] < errors[1] / 2


def test_groups_of_tokens_do_not_depend_on_how_many_come():
    codec = Affine(4, 32, 48, "channel")
    x = normal(1, 2, 96, 48)
    whole = codec.encode(x, 4)
    parts = [codec.encode(x[:, :, i : i + 32], 4 + i) for i in (0, 32, 64)]
    for a, *b in zip(whole, *parts, strict=True):
        assert mx.array_equal(a, mx.concatenate(b, axis=2))


def test_bfloat16_rows_beyond_float16():
    x = (normal(1, 1, 32, 64) * 3e5).astype(mx.bfloat16)
    for axis in ("token", "channel"):
        codec = Affine(8, 32, 64, axis)
        y = codec.decode(codec.encode(x, 0), 0, mx.bfloat16)
        assert mx.isfinite(y).all()
        assert nmse(x.astype(mx.float32), y) < 1e-3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((7, 64, 64), r"bits=7 is not one of \(2, 3"),
        ((4, 48, 96), r"group=48 is not one of \(32"),
        ((4, 64, 64, "row"), "neither token nor channel"),
        ((4, 64, 96), r"does not divide the head dim 96; possible are \[32\]"),
        ((4, 64, 80), r"does not divide the head dim 80; possible are \[32\]"),
        ((4, 128, 64), r"does not divide the head dim 64; possible are \[32, 64\]"),
    ],
)
def test_refuses(options, message):
    with pytest.raises(RecipeError, match=message):
        Affine(*options)


@pytest.mark.parametrize("dim", [16, 80, 96, 112])
def test_any_head_dim_can_be_grouped_along_tokens(dim):
    codec = Affine(4, 32, dim, "channel")
    x = normal(1, 1, 64, dim)
    assert nmse(x, codec.decode(codec.encode(x, 0), 0, mx.float32)) < 0.01


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize(("dim", "group", "held"), [(16, 32, 32), (80, 32, 96), (112, 32, 128)])
def test_a_last_group_is_filled_up_and_counted(dim, group, held, bits):
    """Copies of the last channel: the group's range, and so its codes, are those without them."""
    codec = Affine(bits, group, dim)
    x = normal(1, 2, 16, dim)
    packed = codec.encode(x, 0)
    groups = held // group
    assert packed[0].nbytes * 8 == 2 * 16 * held * bits
    assert packed[1].shape == packed[2].shape == (1, 2, 16, groups)
    y = codec.decode(packed, 0, mx.float32)
    assert y.shape == x.shape
    whole = dim // group * group
    if whole:
        alone = Affine(bits, group, whole)
        first = x[..., :whole]
        assert mx.array_equal(y[..., :whole], alone.decode(alone.encode(first, 0), 0, mx.float32))
    rest = np.array(x)[..., whole:]
    step = np.ptp(rest, axis=-1, keepdims=True) / (2**bits - 1)
    assert np.all(np.abs(np.array(y)[..., whole:] - rest) < 1.6 * step)


def test_kivi_is_the_authors_rounding_but_for_the_level_at_0():
    """mlx moves a group's levels so that one is 0; least and greatest are the authors' ends."""
    x = np.random.default_rng(0).standard_normal((2, 128, 64))
    for axis in ("channel", "token"):
        codec = Affine(2, 32, 64, axis)
        y = mx.array(x.astype(np.float32))[None]
        ours = nmse(x[None], codec.decode(codec.encode(y, 0), 0, mx.float32))
        theirs = np.square(x - affine_rounding.rounded(x, 2, axis, group=32)).sum()
        assert ours < 1.05 * theirs / np.square(x).sum()
