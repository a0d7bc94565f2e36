import math

import mlx.core as mx
import numpy as np
import pytest
from cache_support import opened, rotation

from velox_pack.caches.codecs.rotated import (
    Eigenbasis,
    LevelTable,
    LogNorm,
    PlainNorm,
    RotatedScalar,
    Structured,
)
from velox_pack.calibrators import codebooks, waterfill
from velox_pack.kernels.levels import midpoints, quantize_levels
from velox_pack.kernels.rotation import StructuredRotation, make_rotation
from velox_pack.manifests.errors import RecipeError

TABLE = LevelTable(dict(opened(codebooks.fit()).levels))
D2 = codebooks.distortions()


def nmse(x, y):
    x, y = np.array(x, np.float64), np.array(y.astype(mx.float32), np.float64)
    return float(((x - y) ** 2).sum() / (x**2).sum())


def structured(heads, dim, widths, norm=None, mean=None):
    return RotatedScalar(
        turn=Structured(make_rotation(dim, 0)),
        sigma=mx.full((heads, dim), dim**-0.5),
        widths=tuple(int(w) for w in widths),
        table=TABLE,
        norm=norm or PlainNorm(),
        mean=mean,
    )


def outliers(heads, tokens, dim, seed=0):
    """Rows with a few channels 20 times as large: what a rotation has to spread."""
    rng = np.random.default_rng(seed)
    gain = np.where(np.arange(dim) % 11 == 3, 20.0, 1.0)
    return mx.array((rng.standard_normal((1, heads, tokens, dim)) * gain).astype(np.float32))


def naive(x, bits):
    """mlx's rounding of the rows as they are, in groups of 32 (bits + 1 bits an element)."""
    pad = -x.shape[-1] % 32
    padded = mx.pad(x, [(0, 0)] * 3 + [(0, pad)])
    y = mx.dequantize(*mx.quantize(padded, 32, bits), group_size=32, bits=bits)
    return y[..., : x.shape[-1]]


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("dim", [64, 128])
def test_error_is_the_predicted_distortion(bits, dim):
    """Rows are of fixed norm, so their coordinates are slightly short-tailed: never above D(b)."""
    x = outliers(4, 512, dim)
    codec = structured(4, dim, [bits] * dim)
    error = nmse(x, codec.decode(codec.encode(x, 0), 0, mx.float32))
    assert error < 1.02 * D2[bits] + 2**-18  # the norm's own rounding to bfloat16
    assert error > 0.5 * D2[bits]


@pytest.mark.parametrize("dim", [16, 32, 48, 64, 80, 96, 112, 128, 192, 256])
def test_every_head_dim(dim):
    x = outliers(2, 256, dim)
    widths = waterfill.widths(np.ones((1, dim)), 4)[0]
    codec = structured(2, dim, widths)
    words, scales = codec.encode(x, 0)
    assert (words.dtype, scales.dtype) == (mx.uint32, mx.bfloat16)
    assert words.shape == (1, 2, 256, dim * 4 // 32)
    assert scales.shape == (1, 2, 256, 1)
    error = nmse(x, codec.decode((words, scales), 0, mx.float32))
    # Small heads: a coordinate of a random unit row is no Gaussian, and one of 16 outliers stays.
    assert error < (1.1 if dim >= 64 else 1.5) * D2[4]
    if dim >= 64:  # the naive way at 4 bits takes 5 bits an element
        assert error < nmse(x, naive(x, 4))


def planted(heads, tokens, dim, seed=0):
    """Rows with a mean, and a spectrum of 1/k^1.5 in a basis of each head's own."""
    rng = np.random.default_rng(seed)
    variance = np.broadcast_to(1.0 / np.arange(1, dim + 1) ** 1.5, (heads, dim))
    basis = np.linalg.qr(rng.standard_normal((heads, dim, dim)))[0]
    mean = 2 * rng.standard_normal((heads, dim))
    y = rng.standard_normal((heads, tokens, dim)) * np.sqrt(variance)[:, None]
    x = y @ np.swapaxes(basis, 1, 2) + mean[:, None]
    return (*(mx.array(a.astype(np.float32)) for a in (x[None], mean)), basis, variance)


def eigen(mean, basis, variance, widths, norm=None):
    share = variance / variance.sum(-1, keepdims=True)
    return RotatedScalar(
        turn=Eigenbasis(mx.array(basis.astype(np.float16))),
        sigma=mx.array(np.sqrt(share).astype(np.float32)),
        widths=tuple(int(w) for w in widths),
        table=TABLE,
        norm=norm or LogNorm(-4.0, 0.03),
        mean=mean,
    )


@pytest.mark.parametrize("bits", [1.5, 2, 3])
def test_eigenbasis_wins_by_what_water_filling_predicts(bits):
    x, mean, basis, variance = planted(3, 1024, 64)
    centred = x - mean[:, None]
    widths, _ = waterfill.widths(variance, bits)
    if bits < 2:
        assert widths.min() == 0  # some coordinates are not stored at all
    codec = eigen(mean, basis, variance, widths)
    words, scales = packed = codec.encode(x, 0)
    assert (words.dtype, scales.dtype) == (mx.uint32, mx.uint8)
    assert words.nbytes * 8 == x.size * bits
    error = nmse(centred, codec.decode(packed, 0, mx.float32) - mean[:, None])
    # Rows of a few strong coordinates have norms that vary: a little above the prediction.
    assert error < 1.3 * float(waterfill.error(variance, widths)[0])
    flat = structured(3, 64, waterfill.widths(np.ones((1, 64)), bits)[0], mean=mean)
    assert error < 0.6 * nmse(
        centred, flat.decode(flat.encode(x, 0), 0, mx.float32) - mean[:, None]
    )
    whole = nmse(x, codec.decode(packed, 0, mx.float32))
    assert whole < 0.2 * nmse(x, naive(x, math.ceil(bits)))


def test_heads_keep_their_own_basis():
    x, mean, basis, variance = planted(2, 64, 32)
    codec = eigen(mean, basis, variance, [8] * 32)
    swapped = eigen(mean, basis[::-1], variance, [8] * 32)
    assert nmse(x, codec.decode(codec.encode(x, 0), 0, mx.float32)) < 1e-3
    assert nmse(x, swapped.decode(codec.encode(x, 0), 0, mx.float32)) > 0.02


def test_the_stored_scale_is_the_best_one():
    """Least squares: no other factor of the decoded rows comes closer to the original."""
    x = outliers(1, 64, 64)
    codec = structured(1, 64, [2] * 64)
    words, scales = codec.encode(x, 0)
    best = nmse(x, codec.decode((words, scales), 0, mx.float32))
    for factor in (0.95, 1.05):
        assert nmse(x, codec.decode((words, scales * factor), 0, mx.float32)) > best


@pytest.mark.parametrize("step", [0.01, 0.05])
def test_log_norm_is_within_half_a_step(step):
    norm = LogNorm(-3.0, step)
    s = mx.exp(mx.linspace(-3.0, -3.0 + 255 * step, 5000))[:, None]
    code = norm.encode(s)
    assert code.dtype == mx.uint8
    assert mx.abs(mx.log(norm.decode(code)) - mx.log(s)).max().item() <= step / 2 + 1e-5
    clipped = norm.decode(norm.encode(mx.array([[0.0], [1e-38], [1e38]])))
    ends = mx.exp(mx.array([[-3.0], [-3.0], [-3.0 + 255 * step]]))
    assert mx.allclose(clipped, ends, rtol=1e-5)


def test_plain_norm_holds_bfloat16_keys():
    s = mx.array([[1e-6], [3.0], [70000.0], [1e30]])
    back = PlainNorm().decode(PlainNorm().encode(s))
    assert mx.abs(back / s - 1).max().item() <= 2**-8


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_16_bit_rows(dtype):
    x = (outliers(2, 128, 64) * 100).astype(dtype)
    codec = structured(2, 64, [4] * 64)
    y = codec.decode(codec.encode(x, 0), 0, dtype)
    assert y.dtype == dtype
    assert nmse(x.astype(mx.float32), y) < 1.05 * D2[4] + 1e-5


@pytest.mark.parametrize("widths", [[4] * 32, [0] * 32, [8] + [0] * 31])
def test_rows_that_are_zero_or_the_mean(widths):
    mean = mx.ones((2, 32))
    codec = structured(2, 32, widths, LogNorm(-5.0, 0.05), mean)
    x = mx.broadcast_to(mean[:, None], (1, 2, 4, 32))
    y = codec.decode(codec.encode(x, 0), 0, mx.float32)
    assert mx.abs(y - x).max().item() <= 2 * math.exp(-5.0)


def test_a_batch_is_its_rows():
    x, mean, basis, variance = planted(2, 24, 64)
    codec = eigen(mean, basis, variance, waterfill.widths(variance, 3)[0])
    batch = mx.concatenate([x, x[:, :, ::-1]])
    both = codec.decode(codec.encode(batch, 0), 0, mx.float32)
    alone = codec.decode(codec.encode(batch[1:], 0), 0, mx.float32)
    assert mx.allclose(both[1:], alone, atol=1e-5)


def test_widths_must_fit_the_rows():
    with pytest.raises(RecipeError, match="31 widths for rows of 32"):
        structured(1, 32, [3] * 31)
    for wrong in (9, 255, -1):
        with pytest.raises(RecipeError, match="not 0 to 8"):
            structured(1, 32, [3] * 31 + [wrong])


@pytest.mark.parametrize("seed", range(3))
def test_nearest_level_of_columns_of_any_widths(seed):
    """The search over all columns at once finds what the kernel finds for each width alone."""
    rng = np.random.default_rng(seed)
    widths = rng.integers(0, 9, 40)
    x = mx.array((2 * rng.standard_normal((3, 300, 40))).astype(np.float32))
    x[0, 0], x[0, 1], x[0, 2] = mx.nan, mx.inf, -mx.inf
    book = opened(codebooks.fit()).levels
    starts = mx.array((1 << widths) - 1, dtype=mx.uint32)
    for j, bits in enumerate(widths.tolist()):
        if bits:  # on the edges themselves, too
            edges = midpoints(book[bits])
            x[1, : edges.size, j] = edges
    codes = TABLE.nearest(x, starts, int(widths.max())) - starts
    for j, bits in enumerate(widths.tolist()):
        expected = quantize_levels(x[..., j], midpoints(book[bits])) if bits else mx.zeros((3, 300))
        assert mx.array_equal(codes[..., j], expected)
        if bits:
            assert mx.array_equal(
                TABLE.levels(codes + starts)[..., j], mx.take(book[bits], codes[..., j])
            )


def test_constants_are_all_that_is_shared():
    stored = opened(rotation(96))
    turn = Structured(StructuredRotation(stored.signs.astype(mx.float32), stored.block, stored.mix))
    codec = RotatedScalar(turn, mx.full((1, 96), 96**-0.5), (2,) * 96, TABLE, PlainNorm())
    shapes = [tuple(a.shape) for a in codec.constants()]
    assert shapes[:4] == [(96,), (3, 3), (1, 96), (96,)]
    assert shapes[4] == (511,)
