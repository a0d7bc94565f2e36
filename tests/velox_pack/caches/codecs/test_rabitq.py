from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from cache_support import opened

from trained_tokens import relative, rounded, through, trained
from vector_samples import normal, rabitq_of, statistics
from velox_pack.caches.codecs import vectors
from velox_pack.caches.codecs.rabitq import CentroidGrid
from velox_pack.caches.codecs.rotated import LogNorm
from velox_pack.caches.codecs.vectors import Rounds
from velox_pack.calibrators import rabitq
from velox_pack.manifests.errors import RecipeError


def codec_of(artifact, bits, unbiased=True):
    found = opened(artifact)
    return CentroidGrid(
        found.centroids[0],
        Rounds.stored(found.signs, found.mix),
        bits,
        LogNorm(*found.log_scale[0].tolist()),
        unbiased,
    )


def fitted(rows, part, centroids=64):
    layer, _ = statistics(rows)
    return rabitq.fit({0: layer}, part, centroids=centroids)[0]


def rows_of(*shape, seed=0):
    return mx.array(normal(*shape, seed=seed).astype(np.float32))


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("dim", [16, 64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("heads", [1, 3])
def test_decodes_to_what_numpy_decodes_in_the_bytes_said(heads, dim, bits):
    artifact, x = rabitq_of(heads, dim, 16), normal(heads, 40, dim)
    codec = codec_of(artifact, bits, unbiased=heads == 3)
    words, scales, owners = codec.encode(mx.array(x.astype(np.float32))[None], 0)
    assert (words.dtype, words.shape) == (mx.uint32, (1, 1, 40, -(-heads * dim * bits // 32)))
    for a in (owners, scales):
        assert (a.dtype, a.shape) == (mx.uint8, (1, heads, 40, 1))
    found = through(codec, x)
    codes = rabitq.encode(artifact, 0, x, bits, unbiased=codec.unbiased)
    wanted = rabitq.decode(artifact, 0, codes)
    same = np.isclose(found, wanted, rtol=1e-3, atol=1e-3).all(axis=2)
    assert np.mean(same) > 0.95
    assert relative(x, found) == pytest.approx(relative(x, wanted), rel=0.01)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_grid_point_has_the_greatest_cosine(bits):
    """Against a search over many rescalings of each row."""
    codec = codec_of(rabitq_of(1, 32, 1), bits)
    size = mx.abs(rows_of(1, 1, 50, 32))
    (levels,) = codec._levels(size)
    own = np.array(levels, np.float64)[0, 0] + 0.5
    rows = np.array(size, np.float64)[0, 0]
    cosine = (own * rows).sum(axis=1) / np.linalg.norm(own, axis=1)
    top = 2 ** (bits - 1) - 1
    for t in np.linspace(0.05, 8, 500):
        other = np.minimum(np.floor(t * rows), top) + 0.5
        found = (other * rows).sum(axis=1) / np.linalg.norm(other, axis=1)
        assert np.all(found <= cosine + 1e-5)


@pytest.mark.parametrize("bits", [1, 2])
def test_products_are_unbiased_over_the_rotation(bits):
    """The mean over rotations of the estimate is the product; that of the nearest row is less."""
    key, means = normal(1, 1, 64), {}
    for unbiased in (True, False):
        found = []
        for seed in range(150):
            signs = np.random.default_rng(seed).choice([-1, 1], (3, 64)).astype(np.int8)
            artifact = replace(
                rabitq_of(1, 64, 1), signs=signs, centroids=np.zeros((1, 1, 1, 64), np.float16)
            )
            found.append(through(codec_of(artifact, bits, unbiased), key)[0, 0] @ key[0, 0])
        means[unbiased] = np.mean(found) / np.square(key).sum()
    assert means[True] == pytest.approx(1, abs=0.03)
    assert means[False] < {1: 0.75, 2: 0.95}[bits]


@pytest.mark.parametrize("bits", [1, 4])
@pytest.mark.parametrize("dim", [64, 96])
def test_scores_and_mixtures_are_those_of_decoded_rows(dim, bits):
    codec = codec_of(rabitq_of(3, dim, 16), bits)
    packed = codec.encode(rows_of(2, 3, 50, dim), 0)
    rows = codec.decode(packed, 0, mx.float32)
    q = rows_of(2, 3, 6, dim, seed=5) * dim**-0.5
    found = codec.scores(q, packed, 0)
    assert found.shape == (2, 3, 6, 50)
    assert mx.allclose(found, q @ rows.swapaxes(-1, -2), atol=1e-4)
    p = mx.softmax(found, axis=-1)
    assert mx.allclose(codec.mix(p, packed, 0), p @ rows, atol=1e-4)


def test_one_centroid_needs_no_owner():
    artifact, x = rabitq_of(2, 64, 1), normal(2, 20, 64)
    codec = codec_of(artifact, 2)
    assert len(codec.encode(mx.array(x.astype(np.float32))[None], 0)) == 2
    wanted = rabitq.decode(artifact, 0, rabitq.encode(artifact, 0, x, 2))
    assert np.mean(np.isclose(through(codec, x), wanted, rtol=1e-3, atol=1e-3)) > 0.95
    q = rows_of(1, 2, 3, 64, seed=5) / 8
    packed = codec.encode(rows_of(1, 2, 20, 64), 0)
    rows = codec.decode(packed, 0, mx.float32)
    assert mx.allclose(codec.scores(q, packed, 0), q @ rows.swapaxes(-1, -2), atol=1e-4)


def test_planted_clusters_are_taken_off():
    fixed = 10 * normal(8, 64, seed=9)

    def rows(tokens, seed):
        rng = np.random.default_rng(seed)
        return fixed[rng.integers(8, size=(2, tokens))] + rng.standard_normal((2, tokens, 64))

    x = rows(100, 1)
    many, one = (
        relative(x, through(codec_of(fitted(rows(800, 0), "values", n), 2, False), x))
        for n in (8, 1)
    )
    assert many < 0.1 * one
    assert many < 0.1 * relative(x, rounded(x, 2))  # 3 bits


@pytest.mark.parametrize("part", ["keys", "values"])
def test_trained_rows_beat_plain_rounding_of_more_bits(part):
    tokens, held = trained()
    for i in (0, 3):
        codec = codec_of(fitted(tokens[i].part(part), part), 2, unbiased=part == "keys")
        x = held[i].part(part)
        assert relative(x, through(codec, x)) < 0.75 * relative(x, rounded(x, 2))  # 3 bits


def test_a_long_chunk_is_coded_in_blocks_as_at_once(monkeypatch):
    codec = codec_of(rabitq_of(2, 64, 16), 3)
    whole = codec.encode(rows_of(1, 2, 100, 64), 0)
    monkeypatch.setattr(vectors, "ELEMENTS", 2 * 3 * 64 * 7)
    for a, b in zip(whole, codec.encode(rows_of(1, 2, 100, 64), 0), strict=True):
        assert mx.array_equal(a, b)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_batches_and_16_bit_rows(dtype):
    codec = codec_of(rabitq_of(2, 64, 16), 4)
    x = rows_of(1, 2, 16, 64).astype(dtype)
    y = codec.decode(codec.encode(mx.concatenate([x, x[:, :, ::-1]]), 0), 0, dtype)
    assert y.dtype == dtype
    assert mx.allclose(y[0], y[1][:, ::-1], atol=0.05)
    one = codec.decode(codec.encode(x[:, :, :1], 0), 0, dtype)
    assert mx.allclose(y[:1, :, :1], one, atol=0.05)


@pytest.mark.parametrize("bits", [1, 3])
def test_rows_that_are_centroids(bits):
    artifact = rabitq_of(2, 32, 4)
    x = artifact.centroids[0].astype(np.float64)
    y = through(codec_of(artifact, bits), x)
    assert np.all(np.isfinite(y))
    least = np.exp(artifact.log_scale[0][0])
    assert np.abs(np.linalg.norm(y - x, axis=-1) - least).max() < 1e-3


def test_what_cannot_be_is_refused():
    codec = codec_of(rabitq_of(2, 32, 4), 1)
    with pytest.raises(RecipeError, match="bits=5 is not 1 to 4"):
        replace(codec, bits=5)
    with pytest.raises(RecipeError, match="3 centroids"):
        replace(codec, centroids=codec.centroids[:, :3])
    assert codec.constants()[0].dtype == mx.float16
