import mlx.core as mx
import numpy as np
import pytest

from trained_tokens import through, trained
from velox_pack.caches.codecs.qjl import SignSketch, SketchedKeys, chunks_of, mean_coordinate
from velox_pack.caches.codecs.rotated import PlainNorm, Structured
from velox_pack.kernels.rotation import make_rotation
from velox_pack.manifests.errors import RecipeError


def codec_of(dim, signs, seed=0):
    chunks = chunks_of(Structured(make_rotation(dim, seed)), signs)
    return SketchedKeys(SignSketch(dim, chunks), PlainNorm())


def matrix(sketch):
    """The projections in columns, float64 [D, length]."""
    return np.array(sketch.project(mx.eye(sketch.dim)), np.float64)


def estimate(q, k, projections):
    """The estimator written out: norm times the mean of (q S) sign(k S), over E|u| sqrt(...)."""
    dim, length = projections.shape
    factor = np.linalg.norm(k) / (length * mean_coordinate(dim))
    return factor * float((q @ projections) @ np.sign(k @ projections))


def awkward(dim):
    """Keys that one Hadamard would send to equal magnitudes, a few outliers, and a plain one."""
    rng = np.random.default_rng(0)
    single, pair = np.eye(dim)[3], np.eye(dim)[1] - 2 * np.eye(dim)[dim - 2]
    spiked = rng.standard_normal(dim) + 30 * np.eye(dim)[5]
    return {"single": single, "pair": pair, "spiked": spiked, "plain": rng.standard_normal(dim)}


@pytest.mark.parametrize("signs", [1, 3])
@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.parametrize("kind", ["single", "pair", "spiked", "plain"])
def test_products_are_right_on_average_over_rotations(kind, dim, signs):
    k = awkward(dim)[kind]
    k = k / np.linalg.norm(k)
    q = k + np.random.default_rng(1).standard_normal(dim) / np.sqrt(dim)
    found = np.array(
        [estimate(q, k, matrix(codec_of(dim, signs, seed).sketch)) for seed in range(150)]
    )
    deviation = found.std() / np.sqrt(len(found))
    assert abs(found.mean() - q @ k) < 4 * deviation + 0.01
    # The paper's bound on the variance, for projections of Gaussian rows; ours are orthogonal.
    assert found.var() < np.pi / 2 / (signs * dim) * (q @ q)


@pytest.mark.parametrize("signs", [1, 2, 4])
@pytest.mark.parametrize("dim", [16, 64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("heads", [1, 3])
def test_decodes_to_what_numpy_estimates_in_the_bytes_said(heads, dim, signs):
    x = np.random.default_rng(0).standard_normal((heads, 24, dim)) * 3
    codec = codec_of(dim, signs)
    words, norms = codec.encode(mx.array(x.astype(np.float32))[None], 0)
    assert (words.dtype, words.shape) == (mx.uint32, (1, heads, 24, -(-signs * dim // 32)))
    assert (norms.dtype, norms.shape) == (mx.bfloat16, (1, heads, 24, 1))
    y, projections = through(codec, x), matrix(codec.sketch)
    q = np.random.default_rng(1).standard_normal(dim)
    wanted = np.array([[estimate(q, k, projections) for k in head] for head in x])
    assert np.allclose(y @ q, wanted, rtol=2**-7, atol=0.05)


@pytest.mark.parametrize("dim", [64, 96])
def test_scores_are_products_with_decoded_keys(dim):
    codec = codec_of(dim, 2)
    rng = np.random.default_rng(0)
    x, q = (mx.array(rng.standard_normal((2, 3, n, dim), np.float32)) for n in (40, 5))
    packed = codec.encode(x, 0)
    products = q @ codec.decode(packed, 0, mx.float32).swapaxes(-1, -2)
    assert mx.allclose(codec.scores(q, packed, 0), products, atol=1e-3)


def test_trained_keys_as_well_as_the_authors_projections():
    """Theirs are orthogonal chunks by QR of Gaussian matrices, scaled by sqrt(pi / 2)."""
    rng = np.random.default_rng(0)
    errors = np.zeros(2)
    for i, layer in trained()[1].items():
        x = layer.part("keys").astype(np.float64)
        dim = x.shape[2]
        q = rng.standard_normal((16, dim))
        exact = np.einsum("qd,hnd->hqn", q, x)
        haar = [np.linalg.qr(rng.standard_normal((dim, dim)))[0] for _ in range(2)]
        theirs = np.concatenate(haar, axis=1) * np.sqrt(dim)
        signs = np.sign(x @ theirs) * np.linalg.norm(x, axis=2, keepdims=True)
        wanted = np.sqrt(np.pi / 2) / (2 * dim) * np.einsum("qs,hns->hqn", q @ theirs, signs)
        ours = np.einsum("qd,hnd->hqn", q, through(codec_of(dim, 2, seed=i), x))
        errors += [np.square(e - exact).mean() / np.square(exact).mean() for e in (ours, wanted)]
    assert errors[0] < 1.1 * errors[1]


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_batches_and_16_bit_rows(dtype):
    codec = codec_of(64, 2)
    x = mx.array(np.random.default_rng(0).standard_normal((1, 2, 9, 64), np.float32)).astype(dtype)
    y = codec.decode(codec.encode(mx.concatenate([x, x[:, :, ::-1]]), 0), 0, dtype)
    assert y.dtype == dtype
    assert mx.array_equal(y[0], y[1][:, ::-1])
    assert mx.allclose(y[:1, :, :1], codec.decode(codec.encode(x[:, :, :1], 0), 0, dtype))


def test_rows_of_zeros_and_signs_that_do_not_suffice():
    codec = codec_of(64, 1)
    y = codec.decode(codec.encode(mx.zeros((1, 1, 2, 64)), 0), 0, mx.float32)
    assert mx.array_equal(y, mx.zeros((1, 1, 2, 64)))
    with pytest.raises(RecipeError, match="16 rotations from 16 signs"):
        codec_of(16, 8)
