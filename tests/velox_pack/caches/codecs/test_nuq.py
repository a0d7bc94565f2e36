import mlx.core as mx
import numpy as np
import pytest
from cache_support import opened

from trained_tokens import relative, rounded, through, trained
from velox_pack.caches.channel_recipes import _kept
from velox_pack.caches.codecs.nuq import Nuq, OwnLevels
from velox_pack.calibrators import nuq
from velox_pack.manifests.errors import RecipeError

DIMS = [16, 64, 80, 96, 112, 128, 192, 256]


def fitted(x, part, bits=3, share=0.01, **options):
    layer = nuq.fit_layer(
        x, None, bits, axis={"keys": "channel", "values": "token"}[part], outliers=share, **options
    )
    return nuq.stack({0: layer}, {0: True}, part, bits, share)[0]


def codec_of(artifact, kept=None):
    found = opened(artifact)
    heads, dim = found.low.shape[1:]
    keys = found.axis == "channel"
    if kept is None:
        kept = _kept(heads * dim, found.outliers, 1 if keys else 2)
    low, high = (found.low[0], found.high[0]) if keys else (None, None)
    table = OwnLevels(found.levels[0], found.edges[0])
    return Nuq(table, found.bits, heads, dim, kept, low, high)


def planted(heads=2, tokens=256, dim=64, seed=0):
    """Channels of other places and sizes; every third token has a number ten times as large."""
    rng = np.random.default_rng(seed)
    place = np.random.default_rng(9)
    x = rng.laplace(size=(heads, tokens, dim)) * np.geomspace(0.1, 10, dim)
    x += 5 * place.standard_normal(dim)
    third = np.arange(0, tokens, 3)
    at = (rng.integers(heads, size=third.size), third, rng.integers(dim, size=third.size))
    x[at] *= 10
    return x.astype(np.float32)


@pytest.mark.parametrize("share", [0.0, 0.01])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("part", ["keys", "values"])
def test_decodes_to_what_numpy_decodes(part, bits, share):
    """With places for all outliers that a token has, numbers are NumPy's or the exact ones."""
    artifact = fitted(planted(), part, bits, share, q_norm=bits == 2)
    x = planted(seed=1)
    codes = nuq.encode(artifact, 0, x, start=4)
    wanted = nuq.decode(artifact, 0, codes)
    most = int(codes.outliers.sum(axis=(0, 2)).max())
    found = through(codec_of(artifact, most), x)
    size = np.abs(x) + np.abs(wanted)
    same = np.abs(found - wanted) < 2e-3 * size + 1e-4
    exact = np.abs(found - x) < 1e-3 * size + 1e-4
    # A number on an edge may round either way; at 8 bits edges are near.
    assert np.mean(same | exact) > 0.995
    assert np.all(exact[codes.outliers])
    if part == "values" or not share:
        assert np.mean(same) > 0.995
    else:
        assert np.mean(same) > 0.9


@pytest.mark.parametrize("dim", DIMS)
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("part", ["keys", "values"])
def test_bytes_are_as_said(part, heads, dim):
    width = heads * dim
    codec = codec_of(fitted(planted(heads, 64, dim), part))
    x = mx.array(planted(heads, 5, dim))
    packed = codec.encode(mx.stack([x, x]), 0)
    words, *ranges, places, numbers = packed
    assert (words.shape, words.dtype) == ((2, 1, 5, -(-3 * width // 32)), mx.uint32)
    sides = 1 if part == "keys" else 2
    kept = sides * max(1, round(width / 100 / sides))
    assert places.shape == numbers.shape == (2, 1, 5, kept)
    assert places.dtype == (mx.uint8 if width <= 256 else mx.uint16)
    assert numbers.dtype == mx.float16
    if part == "keys":
        assert not ranges
    else:
        assert (ranges[0].shape, ranges[0].dtype) == ((2, 1, 5, 2), mx.float16)
    both = codec.decode(packed, 0, mx.bfloat16)
    assert (both.shape, both.dtype) == ((2, heads, 5, dim), mx.bfloat16)
    assert mx.array_equal(both[0], both[1])
    one = codec.encode(x[None, :, :1], 0)
    assert all(mx.array_equal(a[:1, :, :1], b) for a, b in zip(packed, one, strict=True))


def test_plain_rounding_loses_on_channels_and_outliers():
    x = planted(seed=1)
    ours = through(codec_of(fitted(planted(tokens=2000), "keys")), x)
    spread = np.square(x - x.mean(axis=1, keepdims=True)).mean(axis=1)

    def error(y):
        return float(np.mean(np.square(x - y).mean(axis=1) / spread))

    assert error(ours) < 0.05 * error(rounded(x, 3))  # of 4 bits


def test_plain_rounding_loses_on_outliers_of_tokens():
    def rows(seed):
        x = np.random.default_rng(seed).laplace(size=(2, 256, 64))
        x[seed % 2, :, 7] *= 20
        return x.astype(np.float32)

    x = rows(1)
    ours = through(codec_of(fitted(rows(0), "values")), x)
    assert relative(x, ours) < 0.5 * relative(x, rounded(x, 3))  # of 4 bits


@pytest.mark.parametrize("bits", [2, 3])
def test_a_fixed_number_of_outliers_costs_little_on_trained_keys(bits):
    tokens, held = trained()
    ours, paper, without, plain = [], [], [], []
    for i in (0, 3, 5):
        artifact = fitted(tokens[i].part("keys"), "keys", bits)
        x = held[i].part("keys")
        ours.append(relative(x, through(codec_of(artifact), x)))
        paper.append(relative(x, nuq.decode(artifact, 0, nuq.encode(artifact, 0, x, start=4))))
        without.append(relative(x, through(codec_of(artifact, 0), x)))
        plain.append(relative(x, rounded(x, bits)))
    assert np.mean(ours) < 1.2 * np.mean(paper)  # 128 numbers a token: 1 instead of 1.3 on average
    assert np.mean(ours) < np.mean(without)
    assert np.mean(ours) < 0.6 * np.mean(plain)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("part", ["keys", "values"])
def test_outliers_of_16_bit_rows_are_exact(part, dtype):
    codec = codec_of(fitted(planted(), part))
    x = mx.array(planted(seed=1))[None].astype(dtype)
    y = codec.decode(codec.encode(x, 0), 0, dtype)
    assert y.dtype == dtype
    most = (x == y).sum(axis=(1, 3)).min().item()
    assert most >= codec.kept


def test_rows_that_are_constant_or_beyond_float16():
    for part in ("keys", "values"):
        codec = codec_of(fitted(np.ones((2, 32, 16), np.float32), part))
        x = np.ones((2, 4, 16), np.float32)
        assert np.abs(through(codec, x) - 1).max() < 1e-3
        x[:, 1, 3] = 1e6
        y = through(codec, x)
        assert np.all(np.isfinite(y))
        big = codec.encode(mx.array(x)[None].astype(mx.bfloat16), 0)
        assert mx.isfinite(codec.decode(big, 0, mx.bfloat16)).all().item()


def test_what_cannot_be_kept_is_refused():
    table = OwnLevels(mx.array([-0.5, 0.5]), mx.array([0.0]))
    with pytest.raises(RecipeError, match="3 outliers of 64"):
        Nuq(table, 1, 2, 32, 3)
    with pytest.raises(RecipeError, match="63 outliers of 64"):
        Nuq(table, 1, 2, 32, 63, mx.zeros((2, 32)), mx.ones((2, 32)))
    with pytest.raises(RecipeError, match="too many places"):
        Nuq(table, 1, 513, 128, 2)
