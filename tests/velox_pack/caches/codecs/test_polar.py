import mlx.core as mx
import numpy as np
import pytest

from trained_tokens import relative, rounded, through, trained
from velox_pack.caches.codecs.polar import ANGLES, Polar, angle_levels
from velox_pack.caches.codecs.rotated import PlainNorm, Structured
from velox_pack.kernels.rotation import make_rotation
from velox_pack.manifests.errors import RecipeError


def rounds_of(dim):
    return min((dim & -dim).bit_length() - 1, 8)


def codec_of(dim, bits, rounds=None, seed=0):
    turn = Structured(make_rotation(dim, seed))
    return Polar(turn, dim, rounds or rounds_of(dim), bits + 1, bits - 1, PlainNorm())


def reference(x, codec):
    """Encode and decode in NumPy, rows [..., D], by trees of pairs."""
    rotation = np.array(codec.turn.forward(mx.eye(codec.dim)), np.float64)
    radii = x @ rotation
    angles = []
    for r in range(1, codec.rounds + 1):
        found = np.arctan2(radii[..., 1::2], radii[..., 0::2])
        radii = np.hypot(radii[..., 0::2], radii[..., 1::2])
        if r == 1:
            step = 2 * np.pi / 2**codec.first
            angles.append((np.floor(found / step) + 0.5) * step)
        else:
            levels = np.array(angle_levels(r, codec.later))
            angles.append(levels[np.searchsorted((levels[1:] + levels[:-1]) / 2, found)])
    for found in reversed(angles):
        pairs = np.stack([radii * np.cos(found), radii * np.sin(found)], axis=-1)
        radii = pairs.reshape(*pairs.shape[:-2], -1)
    return radii @ rotation.T


@pytest.mark.parametrize("bits", [1, 2, 3])
@pytest.mark.parametrize("round_", sorted(ANGLES))
def test_angle_levels_are_lloyd_max_for_their_density(round_, bits):
    """Each level is the mean of its cell; the density is sin(2 angle)^(2^(round - 1) - 1)."""
    levels = np.array(angle_levels(round_, bits))
    angle = (np.arange(400_000) + 0.5) / 400_000 * np.pi / 2
    density = np.sin(2 * angle) ** (2 ** (round_ - 1) - 1)
    cell = np.searchsorted((levels[1:] + levels[:-1]) / 2, angle)
    mass, first = (np.bincount(cell, w) for w in (density, density * angle))
    assert np.allclose(first / mass, levels, atol=1e-5)


@pytest.mark.parametrize("round_", [2, 3, 5])
def test_angles_of_gaussian_rows_have_that_density(round_):
    radii = np.random.default_rng(0).standard_normal((4000, 2**round_))
    for _ in range(round_ - 1):
        radii = np.hypot(radii[:, 0::2], radii[:, 1::2])
    found = np.arctan2(radii[:, 1], radii[:, 0])
    angle = (np.arange(2000) + 0.5) / 2000 * np.pi / 2
    density = np.sin(2 * angle) ** (2 ** (round_ - 1) - 1)
    spread = np.sqrt(np.sum(density * (angle - np.pi / 4) ** 2) / density.sum())
    assert found.std() == pytest.approx(spread, rel=0.05)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("dim", [16, 64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("heads", [1, 3])
def test_decodes_to_what_numpy_decodes_in_the_bytes_said(heads, dim, bits):
    x = np.random.default_rng(0).standard_normal((heads, 24, dim)) + 0.5
    codec, blocks = codec_of(dim, bits), dim >> rounds_of(dim)
    words, radii = codec.encode(mx.array(x.astype(np.float32))[None], 0)
    total = dim // 2 * (bits + 1) + (dim // 2 - blocks) * (bits - 1)
    assert (words.dtype, words.shape) == (mx.uint32, (1, heads, 24, -(-total // 32)))
    assert (radii.dtype, radii.shape) == (mx.bfloat16, (1, heads, 24, blocks))
    found, wanted = through(codec, x), reference(x, codec)
    same = np.isclose(found, wanted, rtol=0.01, atol=0.03).all(axis=2)
    assert np.mean(same) > 0.95
    assert relative(x, found) == pytest.approx(relative(x, wanted), rel=0.02)


@pytest.mark.parametrize(("bits", "most"), [(2, 0.13), (3, 0.037), (4, 0.0102)])
def test_plain_rounding_of_heavy_tailed_rows_loses(bits, most):
    """Scalar levels after a rotation leave 0.117, 0.0345, 0.0095 at as many bits."""
    x = np.random.default_rng(0).standard_t(3, (2, 512, 64))
    packed = codec_of(64, bits).encode(mx.array(x.astype(np.float32))[None], 0)
    assert sum(a.nbytes for a in packed) * 8 == x.size * (bits + 0.25)
    error = np.square(x - through(codec_of(64, bits), x)).sum() / np.square(x).sum()
    assert error < most
    assert error < np.square(x - rounded(x, bits)).sum() / np.square(x).sum()  # bits + 1


def test_the_papers_layout():
    """Four rounds, 4 and 2 bits, 16 bits for 16 coordinates: 62 bits, of which words hold 64."""
    codec = codec_of(128, 3, rounds=4)
    assert sum(codec.widths) + 8 * 16 == 128 * 3.875
    x = np.random.default_rng(0).standard_normal((1, 256, 128))
    deep = np.square(x - through(codec_of(128, 3), x)).sum()
    assert np.square(x - through(codec, x)).sum() == pytest.approx(deep, rel=0.13)


@pytest.mark.parametrize("part", ["keys", "values"])
def test_trained_rows_beat_plain_rounding(part):
    for layer in trained()[1].values():
        x = layer.part(part)
        ours = relative(x, through(codec_of(x.shape[2], 3), x))  # 3.25 bits
        assert ours < 0.6 * relative(x, rounded(x, 2))  # 3 bits


def test_attention_in_codes_is_that_of_decoded_rows():
    codec = codec_of(96, 3)
    rng = np.random.default_rng(0)
    x, q, p = (
        mx.array(rng.standard_normal(s, np.float32))
        for s in ((2, 3, 40, 96), (2, 3, 5, 96), (2, 3, 5, 40))
    )
    packed = codec.encode(x, 0)
    y = codec.decode(packed, 0, mx.float32)
    assert mx.allclose(codec.scores(q, packed, 0), q @ y.swapaxes(-1, -2), atol=1e-3)
    assert mx.allclose(codec.mix(p, packed, 0), p @ y, atol=1e-3)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_batches_and_16_bit_rows(dtype):
    codec = codec_of(64, 3)
    x = mx.array(np.random.default_rng(0).standard_normal((1, 2, 9, 64), np.float32)).astype(dtype)
    y = codec.decode(codec.encode(mx.concatenate([x, x[:, :, ::-1]]), 0), 0, dtype)
    assert y.dtype == dtype
    assert mx.array_equal(y[0], y[1][:, ::-1])
    zeros = mx.zeros((1, 2, 1, 64), dtype)
    assert mx.array_equal(codec.decode(codec.encode(zeros, 0), 0, dtype), zeros)


def test_refuses_what_has_no_pairs_or_tables():
    with pytest.raises(RecipeError, match="5 rounds for heads of 80; 1 to 4"):
        codec_of(80, 3, rounds=5)
    with pytest.raises(RecipeError, match="not 1 to 8 and 1 to 3"):
        codec_of(64, 5)
