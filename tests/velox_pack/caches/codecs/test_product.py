from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from cache_support import opened

from trained_tokens import relative, rounded, through, trained
from vector_samples import normal, statistics, vecinfer_of
from velox_pack.caches.codecs import vectors
from velox_pack.caches.codecs.product import Product
from velox_pack.caches.codecs.rotated import LogNorm
from velox_pack.caches.codecs.vectors import Rounds
from velox_pack.calibrators import vecinfer
from velox_pack.calibrators.vecinfer import PAPER, Options
from velox_pack.manifests.errors import RecipeError


def codec_of(artifact):
    found = opened(artifact)
    return Product(
        turn=Rounds.stored(found.signs, found.mix),
        codebooks=found.codebooks[0],
        mean=found.mean[0],
        smoothing=found.smoothing[0],
        norm=LogNorm(*found.log_scale[0].tolist()) if found.scaled else None,
        unbiased=found.part == "keys",
    )


def fitted(rows, part="keys", sub=4, bits=8, options=None):
    layer, trace = statistics(rows)
    return vecinfer.fit({0: layer}, [trace], part, sub=sub, bits=bits, options=options)[0]


def in_numpy(artifact, x):
    return vecinfer.decode(artifact, 0, vecinfer.encode(artifact, 0, x))


@pytest.mark.parametrize(("sub", "bits"), [(8, 8), (4, 8), (2, 6), (2, 8)])
@pytest.mark.parametrize("dim", [16, 64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("heads", [1, 3])
def test_decodes_to_what_numpy_decodes_in_the_bytes_said(heads, dim, sub, bits):
    part = "keys" if heads == 3 else "values"
    artifact = vecinfer_of(heads, dim, sub, bits, part=part)
    x, codec = normal(heads, 40, dim), codec_of(artifact)
    codes, scales = codec.encode(mx.array(x.astype(np.float32))[None], 0)
    if bits == 8:
        assert (codes.dtype, codes.shape) == (mx.uint8, (1, heads, 40, dim // sub))
    else:
        words = -(-heads * dim // sub * bits // 32)
        assert (codes.dtype, codes.shape) == (mx.uint32, (1, 1, 40, words))
    assert (scales.dtype, scales.shape) == (mx.uint8, (1, heads, 40, 1))
    found, wanted = through(codec, x), in_numpy(artifact, x)
    # Where two centroids are as near, float32 may take the other one.
    same = np.isclose(found, wanted, rtol=1e-3, atol=1e-3).all(axis=2)
    assert np.mean(same) > 0.95
    assert relative(x, found) == pytest.approx(relative(x, wanted), rel=0.01)


@pytest.mark.parametrize("options", [PAPER, Options(sharing="head"), Options()])
def test_shared_codebooks_and_rows_without_a_scale(options):
    artifact, x = fitted(normal(2, 300, 32), bits=4, options=options), normal(2, 40, 32, seed=1)
    codec = codec_of(artifact)
    packed = codec.encode(mx.array(x.astype(np.float32))[None], 0)
    assert len(packed) == 1 + artifact.scaled
    same = np.isclose(through(codec, x), in_numpy(artifact, x), rtol=1e-3, atol=1e-3).all(axis=2)
    assert np.mean(same) > 0.95


@pytest.mark.parametrize("queries", [1, 6])
@pytest.mark.parametrize(("sub", "bits"), [(8, 8), (4, 8), (2, 6)])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("dim", [64, 96])
def test_scores_and_mixtures_are_those_of_decoded_rows(dim, shared, sub, bits, queries):
    codec = codec_of(vecinfer_of(3, dim, sub, bits, shared=shared))
    x = mx.array(normal(2, 3, 50, dim).astype(np.float32))
    packed = codec.encode(x, 0)
    rows = codec.decode(packed, 0, mx.float32)
    q = mx.array(normal(2, 3, queries, dim, seed=5).astype(np.float32)) * dim**-0.5
    found = codec.scores(q, packed, 0)
    assert found.shape == (2, 3, queries, 50)
    assert mx.allclose(found, q @ rows.swapaxes(-1, -2), atol=1e-4)
    p = mx.softmax(found, axis=-1)
    assert mx.allclose(codec.mix(p, packed, 0), p @ rows, atol=1e-4)


def test_scores_without_a_scale():
    codec = replace(codec_of(vecinfer_of(2, 64, 4, 8)), norm=None)
    packed = codec.encode(mx.array(normal(1, 2, 50, 64).astype(np.float32)), 0)
    q = mx.array(normal(1, 2, 3, 64, seed=5).astype(np.float32)) / 8
    rows = codec.decode(packed, 0, mx.float32)
    assert mx.allclose(codec.scores(q, packed, 0), q @ rows.swapaxes(-1, -2), atol=1e-4)


def outliers(tokens, seed):
    """Rows with a few channels 30 times as large: what smoothing and rotation have to spread."""
    return normal(2, tokens, 64, seed=seed) * np.where(np.arange(64) % 11 == 3, 30.0, 1.0)


def test_planted_outlier_channels_cost_plain_rounding_more():
    x = outliers(200, 1)
    error, unsmoothed = (
        np.square(x - through(codec_of(fitted(outliers(1500, 0), options=o)), x)).mean(axis=(0, 1))
        for o in (Options(), Options(smoothing="none"))
    )
    plain = np.square(x - rounded(x, 2)).mean(axis=(0, 1))  # 3 bits
    assert np.median(error) < 0.6 * np.median(plain)
    assert np.median(error) < 0.3 * np.median(unsmoothed)


@pytest.mark.parametrize(("part", "limit"), [("keys", 0.5), ("values", 0.75)])
def test_trained_rows_beat_plain_rounding_of_more_bits(part, limit):
    tokens, held = trained()
    for i in (0, 3):
        codec = codec_of(fitted(tokens[i].part(part), part))
        x = held[i].part(part)
        assert relative(x, through(codec, x)) < limit * relative(x, rounded(x, 2))  # 3 bits


def test_a_long_chunk_is_coded_in_blocks_as_at_once(monkeypatch):
    codec = codec_of(vecinfer_of(2, 64, 4, 8))
    x = mx.array(normal(1, 2, 100, 64).astype(np.float32))
    whole = codec.encode(x, 0)
    monkeypatch.setattr(vectors, "ELEMENTS", 2 * 16 * 256 * 7)
    for a, b in zip(whole, codec.encode(x, 0), strict=True):
        assert a.shape == b.shape
        assert mx.mean(a == b).item() > 0.99


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_batches_and_16_bit_rows(dtype):
    codec = codec_of(vecinfer_of(2, 64, 2, 6))
    x = mx.array(normal(1, 2, 16, 64).astype(np.float32)).astype(dtype)
    y = codec.decode(codec.encode(mx.concatenate([x, x[:, :, ::-1]]), 0), 0, dtype)
    assert y.dtype == dtype
    assert mx.allclose(y[0], y[1][:, ::-1], atol=0.05)
    one = codec.decode(codec.encode(x[:, :, :1], 0), 0, dtype)
    assert mx.allclose(y[:1, :, :1], one, atol=0.05)


def test_rows_at_the_mean_and_sizes_that_do_not_fit():
    artifact = vecinfer_of(2, 64, 4, 8)
    codec = codec_of(artifact)
    assert np.all(
        np.isfinite(through(codec, np.broadcast_to(artifact.mean[0][:, None], (2, 3, 64))))
    )
    with pytest.raises(RecipeError, match="20 centroids"):
        replace(codec, codebooks=codec.codebooks[:, :, :20])
    with pytest.raises(RecipeError, match=r"codebooks \[2, 8, 256, 4\] for 2 heads of 64"):
        replace(codec, codebooks=codec.codebooks[:, :8])


def test_constants_are_all_that_is_shared():
    codec = codec_of(vecinfer_of(2, 96, 4, 8))
    shapes = [tuple(a.shape) for a in codec.constants()]
    assert shapes == [(2, 24, 256, 4), (2, 96), (2, 96), (2, 1, 24), (96,), (3, 3)]
    assert codec.codebooks.dtype == mx.float16
