import mlx.core as mx
import numpy as np
import pytest
from cache_support import opened

from trained_tokens import relative, rounded, through, trained
from velox_pack.caches.codecs.qjl import chunks_of
from velox_pack.caches.codecs.residual import TwoStage, remaining
from velox_pack.caches.codecs.rotated import LevelTable, PlainNorm, Structured
from velox_pack.calibrators import codebooks
from velox_pack.calibrators.scalar_codebooks import coded
from velox_pack.kernels.packing import unpack_mixed
from velox_pack.kernels.rotation import make_rotation
from velox_pack.manifests.errors import RecipeError

TABLE = LevelTable(dict(opened(codebooks.fit()).levels))
D2 = codebooks.distortions()


def codec_of(dim, stages, seed=0):
    turn = Structured(make_rotation(dim, seed))
    ((again,),) = chunks_of(turn, 1, rounds=1)
    return TwoStage(turn, again, dim, stages, TABLE, PlainNorm())


def matrix(turn, dim):
    return np.array(turn.forward(mx.eye(dim)), np.float64)


def reference(x, codec):
    """The first stage alone and both stages in NumPy, for rows [..., D], in the turned basis."""
    first, second = codec.stages
    dim = x.shape[-1]
    y, again = x @ matrix(codec.turn, dim), matrix(codec.again, dim)
    unit = y / np.sqrt(np.mean(y**2, axis=-1, keepdims=True))
    coarse = coded(unit, codebooks.lloyd_max(first)[0])
    left = np.sqrt(D2[first])
    fine = coded((unit - coarse) / left @ again, codebooks.lloyd_max(second)[0]) @ again.T
    shape = coarse + left * fine
    scale = (y * y).sum(-1, keepdims=True) / (y * shape).sum(-1, keepdims=True)
    return coarse, scale * shape @ matrix(codec.turn, dim).T


def spiked(heads, tokens, dim, seed=0):
    gain = np.where(np.arange(dim) % 11 == 3, 20.0, 1.0)
    return np.random.default_rng(seed).standard_normal((heads, tokens, dim)) * gain


@pytest.mark.parametrize("stages", [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("dim", [16, 64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("heads", [1, 3])
def test_decodes_to_what_numpy_decodes_in_the_bytes_said(heads, dim, stages):
    x = np.random.default_rng(0).standard_normal((heads, 24, dim)) + 0.5
    codec = codec_of(dim, stages)
    words, scales = codec.encode(mx.array(x.astype(np.float32))[None], 0)
    assert (words.dtype, words.shape) == (
        mx.uint32,
        (1, heads, 24, -(-sum(stages) * dim // 32)),
    )
    assert (scales.dtype, scales.shape) == (mx.bfloat16, (1, heads, 24, 1))
    found, (coarse, wanted) = through(codec, x), reference(x, codec)
    same = np.isclose(found, wanted, rtol=0.01, atol=0.03).all(axis=2)
    assert np.mean(same) > 0.9
    assert relative(x, found) == pytest.approx(relative(x, wanted), rel=0.02)
    # The first stage is the front of the bitstream.
    codes = np.array(unpack_mixed(words, codec.widths))[0, ..., :dim]
    assert np.mean(codebooks.lloyd_max(stages[0])[0][codes] == coarse.astype(float)) > 0.999


@pytest.mark.parametrize("stages", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_the_error_is_the_product_of_both_stages(stages):
    x = np.random.default_rng(0).standard_normal((2, 512, 128))
    error = np.square(x - through(codec_of(128, stages), x)).sum() / np.square(x).sum()
    product = D2[stages[0]] * D2[stages[1]]
    assert 0.9 * product < error < 1.2 * product  # the scale that keeps products costs a little


@pytest.mark.parametrize("stages", [(1, 1), (2, 1), (2, 2)])
def test_plain_rounding_of_heavy_tailed_rows_loses(stages):
    x = np.random.default_rng(0).standard_t(3, (2, 512, 64))
    error = np.square(x - through(codec_of(64, stages), x)).sum()
    plain = np.square(x - rounded(x, min(3, sum(stages)))).sum()  # in 3, 4, 4 bits
    assert error < 0.95 * plain  # in 2.25, 3.25, 4.25 bits


def test_remaining_is_the_distortion():
    for bits in range(1, 9):
        assert remaining(TABLE, bits) == pytest.approx(D2[bits], rel=1e-3)


@pytest.mark.parametrize("part", ["keys", "values"])
def test_trained_rows_beat_plain_rounding_of_more_bits(part):
    for layer in trained()[1].values():
        x = layer.part(part)
        ours = relative(x, through(codec_of(x.shape[2], (1, 1)), x))  # 2.25 bits
        assert ours < 1.2 * relative(x, rounded(x, 2))  # 3 bits


@pytest.mark.parametrize("dim", [64, 96])
def test_attention_in_codes_is_that_of_decoded_rows(dim):
    codec = codec_of(dim, (2, 1))
    rng = np.random.default_rng(0)
    x, q, p = (
        mx.array(rng.standard_normal(s, np.float32))
        for s in ((2, 3, 40, dim), (2, 3, 5, dim), (2, 3, 5, 40))
    )
    packed = codec.encode(x, 0)
    y = codec.decode(packed, 0, mx.float32)
    assert mx.allclose(codec.scores(q, packed, 0), q @ y.swapaxes(-1, -2), atol=1e-3)
    assert mx.allclose(codec.mix(p, packed, 0), p @ y, atol=1e-3)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_batches_and_16_bit_rows(dtype):
    codec = codec_of(64, (2, 2))
    x = mx.array(spiked(2, 9, 64).astype(np.float32))[None].astype(dtype)
    y = codec.decode(codec.encode(mx.concatenate([x, x[:, :, ::-1]]), 0), 0, dtype)
    assert y.dtype == dtype
    assert mx.array_equal(y[0], y[1][:, ::-1])
    zeros = mx.zeros((1, 2, 1, 64), dtype)
    assert mx.abs(codec.decode(codec.encode(zeros, 0), 0, dtype)).max().item() < 1e-6


def test_stages_that_no_table_has():
    for stages in ((0, 2), (5, 1), (2,)):
        with pytest.raises(RecipeError, match="each has 1 to 4"):
            codec_of(64, stages)
