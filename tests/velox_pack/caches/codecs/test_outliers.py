import mlx.core as mx
import numpy as np
import pytest
from cache_support import opened

from token_samples import made
from trained_tokens import relative, rounded, through, trained
from velox_pack.caches.codecs.outliers import TwoStreams, rest_turn
from velox_pack.caches.codecs.rotated import LevelTable, LogNorm, Structured
from velox_pack.calibrators import codebooks, outliers
from velox_pack.kernels.rotation import make_rotation
from velox_pack.manifests.errors import RecipeError

TABLE = LevelTable(dict(opened(codebooks.fit()).levels))


def codec_of(artifact, row=0, turn=None):
    found = opened(artifact)
    width = found.mean.shape[-1] - found.channels.shape[-1]
    return TwoStreams(
        found.channels[row],
        found.mean[row],
        found.deviation[row],
        found.bits,
        found.outlier_bits,
        turn or Structured(make_rotation(width, 0)),
        TABLE,
        LogNorm(*found.log_norm[row].tolist()),
    )


def planted(heads=2, tokens=256, dim=64, seed=0):
    x = np.random.default_rng(seed).standard_normal((heads, tokens, dim)) + 1
    for h in range(heads):
        x[h, :, [5 + h, dim - 3 - h]] *= 30
    return x


@pytest.mark.parametrize("bits", [1, 2, 4])
@pytest.mark.parametrize("dim", [16, 64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("heads", [1, 3])
def test_decodes_to_what_numpy_decodes_in_the_bytes_said(heads, dim, bits):
    (artifact,) = outliers.fit(made([planted(heads, 256, dim)]), "values", bits, count=2)
    x = planted(heads, 40, dim, seed=1)
    codec = codec_of(artifact)
    words, scales = codec.encode(mx.array(x.astype(np.float32))[None], 0)
    total = heads * ((bits + 2) * 2 + bits * (dim - 2))
    assert (words.dtype, words.shape) == (mx.uint32, (1, 1, 40, -(-total // 32)))
    assert (scales.dtype, scales.shape) == (mx.uint8, (1, heads, 40, 1))
    found, wanted = through(codec, x), outliers.decoded(artifact, 0, x)
    # Where a number on an edge rounds the other way, its token differs a little in all channels.
    same = np.isclose(found, wanted, rtol=1e-3, atol=1e-3).all(axis=2)
    assert np.mean(same) > 0.95
    assert relative(x, found) == pytest.approx(relative(x, wanted), rel=0.01)


def test_any_signs_are_as_good_as_the_calibrations_own():
    (artifact,) = outliers.fit(made([planted()]), "values", 2)
    x = planted(seed=1)
    width = 64 - artifact.channels.shape[-1]
    other = rest_turn(make_rotation(64, 5).signs, width)
    errors = [relative(x, through(codec_of(artifact, 0, t), x)) for t in (None, other)]
    assert errors[0] == pytest.approx(errors[1], rel=0.1)


def test_plain_rounding_of_more_bits_loses():
    (artifact,) = outliers.fit(made([planted()]), "values", 2)
    x = planted(seed=1)
    error = np.square(x - through(codec_of(artifact), x)).mean(axis=(0, 1))
    plain = np.square(x - rounded(x, 2)).mean(axis=(0, 1))
    assert np.median(error) < 0.1 * np.median(plain)


@pytest.mark.parametrize("part", ["keys", "values"])
def test_trained_rows_beat_plain_rounding(part):
    tokens, held = trained()
    artifacts = outliers.fit(tokens, part, 2)
    for row, i in enumerate(artifacts[0].layers):
        x = held[i].part(part)
        ours = relative(x, through(codec_of(artifacts[0], row), x))
        assert ours < 0.9 * relative(x, rounded(x, 2))  # 3 bits


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_batches_and_16_bit_rows(dtype):
    (artifact,) = outliers.fit(made([planted()]), "values", 3)
    codec = codec_of(artifact)
    x = mx.array(planted(seed=1).astype(np.float32))[None].astype(dtype)
    y = codec.decode(codec.encode(mx.concatenate([x, x[:, :, ::-1]]), 0), 0, dtype)
    assert y.dtype == dtype
    assert mx.allclose(y[0], y[1][:, ::-1], atol=0.05)
    one = codec.decode(codec.encode(x[:, :, :1], 0), 0, dtype)
    assert mx.allclose(y[:1, :, :1], one, atol=0.05)


def test_rows_at_the_mean_and_wrong_rotations():
    (artifact,) = outliers.fit(made([planted()]), "values", 2, count=4)
    codec = codec_of(artifact)
    mean = np.broadcast_to(artifact.mean[0][:, None], (2, 3, 64))
    assert np.all(np.isfinite(through(codec, mean)))
    with pytest.raises(RecipeError, match="no rotation of 60"):
        codec_of(artifact, 0, Structured(make_rotation(64, 0)))
