from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from cache_support import opened

from trained_tokens import relative, rounded, through, trained
from velox_pack.caches.codecs.prod import InnerProduct
from velox_pack.caches.codecs.qjl import SignSketch, chunks_of
from velox_pack.caches.codecs.rotated import LevelTable, PlainNorm, RotatedScalar, Structured
from velox_pack.calibrators import codebooks
from velox_pack.calibrators.scalar_codebooks import coded
from velox_pack.kernels.rotation import make_rotation

TABLE = LevelTable(dict(opened(codebooks.fit()).levels))
# Theorem 2: squared error of a product of unit vectors, times the dimension.
BOUND = {2: 0.56, 3: 0.18, 4: 0.047}


def codec_of(dim, bits, heads=1, seed=0):
    turn = Structured(make_rotation(dim, seed))
    first = RotatedScalar(
        turn, mx.full((heads, dim), dim**-0.5), (bits - 1,) * dim, TABLE, PlainNorm()
    )
    return InnerProduct(first, SignSketch(dim, chunks_of(turn, 1, rounds=1)), PlainNorm())


def matrix(turn, dim):
    return np.array(turn.forward(mx.eye(dim)), np.float64)


def reference(x, codec, bits):
    """Algorithm 2 in NumPy for rows [..., D]: the first stage's part, and all of it."""
    dim = x.shape[-1]
    rotation = matrix(codec.first.turn, dim)
    levels = codebooks.lloyd_max(bits - 1)[0]
    y = x @ rotation
    shape = coded(y * np.sqrt(dim) / np.linalg.norm(y, axis=-1, keepdims=True), levels)
    fit = (y * shape).sum(-1, keepdims=True) / (shape**2).sum(-1, keepdims=True) * np.sqrt(dim)
    # Rounded as it is stored: the residual is what that leaves over.
    fit = np.array(mx.array(fit.astype(np.float32)).astype(mx.bfloat16).astype(mx.float32))
    coarse = shape / np.sqrt(dim) * fit @ rotation.T
    left = x - coarse
    sketch = np.array(codec.sketch.project(mx.eye(dim)), np.float64)
    signs = np.sign(left @ sketch) @ sketch.T
    scale = np.linalg.norm(left, axis=-1, keepdims=True) / (dim * mean_on_sphere(dim))
    return coarse, coarse + scale * signs


@cache
def mean_on_sphere(dim):
    """Mean absolute coordinate of a random unit vector, by integration."""
    t = np.linspace(0, 1, 200001)
    density = (1 - t * t) ** ((dim - 3) / 2)
    return np.trapezoid(t * density, t) / np.trapezoid(density, t)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("kind", ["plain", "spiked"])
def test_products_are_right_on_average_and_within_the_papers_bound(kind, bits):
    dim, rng = 64, np.random.default_rng(bits)
    x = rng.standard_normal(dim) + (20 * np.eye(dim)[7] if kind == "spiked" else 0)
    x /= np.linalg.norm(x)
    q = x + 0.5 * rng.standard_normal(dim) / np.sqrt(dim)
    both = np.array([reference(x, codec_of(dim, bits, seed=s), bits) for s in range(100)]) @ q
    coarse, found = both[:, 0], both[:, 1]
    deviation = found.std() / np.sqrt(len(found))
    assert abs(found.mean() - q @ x) < 4 * deviation
    assert np.square(found - q @ x).mean() < BOUND[bits] / dim * (q @ q)
    if kind == "plain":  # a lone spike comes out of the rotation at two magnitudes: 1 bit fits it
        # Levels alone fall short by what they leave over.
        assert coarse.mean() < (1 - 0.5 * codebooks.distortions()[bits - 1]) * (q @ x)


@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("dim", [16, 64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("heads", [1, 3])
def test_decodes_to_what_numpy_decodes_in_the_bytes_said(heads, dim, bits):
    x = np.random.default_rng(0).standard_normal((heads, 24, dim))
    codec = codec_of(dim, bits, heads)
    words, scales, signs, sizes = codec.encode(mx.array(x.astype(np.float32))[None], 0)
    assert words.shape == (1, heads, 24, -(-(bits - 1) * dim // 32))
    assert signs.shape == (1, heads, 24, -(-dim // 32))
    assert words.dtype == signs.dtype == mx.uint32
    assert scales.shape == sizes.shape == (1, heads, 24, 1)
    assert scales.dtype == sizes.dtype == mx.bfloat16
    found, wanted = through(codec, x), reference(x, codec, bits)[1]
    # A coordinate on an edge, or a residual near 0, may fall to the other side.
    same = np.isclose(found, wanted, rtol=0.01, atol=0.03).all(axis=2)
    assert np.mean(same) > 0.9
    assert relative(x, found) == pytest.approx(relative(x, wanted), rel=0.03)


@pytest.mark.parametrize("dim", [64, 96])
def test_scores_are_products_with_decoded_keys(dim):
    codec = codec_of(dim, 3, heads=3)
    rng = np.random.default_rng(0)
    x, q = (mx.array(rng.standard_normal((2, 3, n, dim), np.float32)) for n in (40, 5))
    packed = codec.encode(x, 0)
    products = q @ codec.decode(packed, 0, mx.float32).swapaxes(-1, -2)
    assert mx.allclose(codec.scores(q, packed, 0), products, atol=1e-3)


def test_trained_keys_beat_plain_rounding():
    for layer in trained()[1].values():
        x = layer.part("keys")
        ours = relative(x, through(codec_of(x.shape[2], 3, x.shape[0]), x))  # 3.5 bits
        assert ours < relative(x, rounded(x, 2))  # 3 bits
        assert ours < 3 * relative(x, rounded(x, 3))  # 4 bits


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_batches_and_16_bit_rows(dtype):
    codec = codec_of(64, 3, heads=2)
    x = mx.array(np.random.default_rng(0).standard_normal((1, 2, 9, 64), np.float32)).astype(dtype)
    y = codec.decode(codec.encode(mx.concatenate([x, x[:, :, ::-1]]), 0), 0, dtype)
    assert y.dtype == dtype
    assert mx.array_equal(y[0], y[1][:, ::-1])
    zeros = mx.zeros((1, 2, 1, 64), dtype)
    assert mx.abs(codec.decode(codec.encode(zeros, 0), 0, dtype)).max().item() < 1e-6
