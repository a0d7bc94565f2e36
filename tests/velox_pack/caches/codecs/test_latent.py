import mlx.core as mx
import numpy as np
import pytest
from cache_support import opened

from trained_tokens import relative, rounded, through, trained
from velox_pack.caches.codecs.latent import Latents, LatentScalar
from velox_pack.caches.codecs.rotated import LevelTable, LogNorm
from velox_pack.calibrators import codebooks, lowrank
from velox_pack.calibrators.capture import Moments
from velox_pack.calibrators.joint import Joint, grouped, unit_moment
from velox_pack.manifests.errors import RecipeError

TABLE = LevelTable(dict(opened(codebooks.fit()).levels))


def fitted(x, group, bits=2.0, **options):
    y = grouped(x.astype(np.float64), group)
    moments = Moments(y.shape[1], y.sum(axis=1), np.swapaxes(y, 1, 2) @ y, np.abs(y).max(axis=1))
    directions = unit_moment(y - y.mean(axis=1, keepdims=True))
    own = Joint(moments, directions, y[:, :256].astype(np.float32), group, True)
    return lowrank.fit({0: own}, "keys", bits, **options)[0]


def codec_of(artifact):
    found = opened(artifact)
    groups, width = found.mean.shape[1:]
    heads, dim = groups * found.group, width // found.group
    variance = found.variance[0] * (found.widths[0] > 0)
    sigma = mx.sqrt(variance / variance.sum(-1, keepdims=True))
    return LatentScalar(
        turn=Latents(found.basis[0].reshape(heads, dim, -1), found.group),
        sigma=mx.maximum(sigma, 1e-6),
        widths=tuple(int(w) for w in artifact.widths[0].ravel()),
        table=TABLE,
        norm=LogNorm(*found.log_norm[0].tolist()),
        mean=found.mean[0].reshape(heads, dim),
    )


def repeated(heads=4, tokens=400, dim=64, seed=0):
    """Heads that are mixtures of eight factors, with a mean and little of their own."""
    rng, fixed = np.random.default_rng(seed), np.random.default_rng(9)
    mix = fixed.standard_normal((heads, 8, dim)) / np.arange(1, heads + 1)[:, None, None]
    factors = rng.standard_normal((tokens, 8)) / np.sqrt(np.arange(1, 9))
    x = np.einsum("nf,hfd->hnd", factors, mix) + 2.0
    return (x + 0.05 * rng.standard_normal(x.shape)).astype(np.float32)


@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize("dim", [16, 64, 80, 96, 112, 128])
def test_decodes_to_what_numpy_decodes_in_the_bytes_said(group, dim):
    artifact, x = fitted(repeated(dim=dim), group), repeated(tokens=40, dim=dim, seed=1)
    codec = codec_of(artifact)
    words, scales = codec.encode(mx.array(x)[None], 0)
    total = int(artifact.widths.sum())
    assert (words.dtype, words.shape) == (mx.uint32, (1, 1, 40, -(-total // 32)))
    assert (scales.dtype, scales.shape) == (mx.uint8, (1, 4 // group, 40, 1))
    found, wanted = through(codec, x), lowrank.decode(artifact, 0, *lowrank.encode(artifact, 0, x))
    same = np.isclose(found, wanted, rtol=2e-3, atol=2e-3).all(axis=(0, 2))
    assert np.mean(same) >= 0.9
    assert relative(x, found) == pytest.approx(relative(x, wanted), rel=0.01)


@pytest.mark.parametrize("dim", [192, 256])
def test_wide_heads(dim):
    artifact, x = fitted(repeated(2, dim=dim), 1), repeated(2, 40, dim, seed=1)
    wanted = lowrank.decode(artifact, 0, *lowrank.encode(artifact, 0, x))
    found = relative(x, through(codec_of(artifact), x))
    assert found == pytest.approx(relative(x, wanted), rel=0.01)


def test_groups_may_differ_in_rank_and_bits():
    """PALU's ranks: a group that cannot use its bits leaves them out, with no padding between."""
    artifact = fitted(repeated(), 2, 3.0, ranks={0: [5, 40]})
    sums = artifact.widths[0].astype(int).sum(axis=1)
    assert sums[0] == 40 < sums[1]
    x = repeated(tokens=40, seed=1)
    wanted = lowrank.decode(artifact, 0, *lowrank.encode(artifact, 0, x))
    codec = codec_of(artifact)
    assert relative(x, through(codec, x)) == pytest.approx(relative(x, wanted), rel=0.01)
    assert codec.encode(mx.array(x)[None], 0)[0].shape[-1] == -(-int(sums.sum()) // 32)


@pytest.mark.parametrize("group", [1, 2, 4])
def test_scores_and_mixtures_in_codes_are_those_of_decoded_rows(group):
    codec = codec_of(fitted(repeated(), group))
    x = mx.array(repeated(tokens=24, seed=1))[None]
    packed = codec.encode(x, 0)
    rows = codec.decode(packed, 0, mx.float32)
    rng = np.random.default_rng(0)
    q = mx.array(rng.standard_normal((1, 4, 3, 64)).astype(np.float32))
    p = mx.softmax(mx.array(rng.standard_normal((1, 4, 3, 24)).astype(np.float32)), axis=-1)
    wanted = q @ rows.swapaxes(-1, -2)
    assert mx.allclose(codec.scores(q, packed, 0), wanted, rtol=1e-3, atol=1e-3 * 64)
    assert mx.allclose(codec.mix(p, packed, 0), p @ rows, rtol=1e-3, atol=1e-3)


def test_heads_that_repeat_each_other_are_cheaper_together():
    x = repeated(dim=16, seed=1)
    alone, together = (
        relative(x, through(codec_of(fitted(repeated(dim=16), g)), x)) for g in (1, 4)
    )
    assert together < 0.5 * alone
    x = repeated(seed=1)
    together = relative(x, through(codec_of(fitted(repeated(), 4)), x))
    assert together < 0.1 * relative(x, rounded(x, 2))  # 3 bits


def test_trained_keys_beat_plain_rounding_of_more_bits():
    tokens, held = trained()
    for i in (0, 3, 5):
        x = held[i].part("keys")
        codec = codec_of(fitted(tokens[i].part("keys").astype(np.float64), len(x)))
        assert relative(x, through(codec, x)) < 0.3 * relative(x, rounded(x, 2))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_batches_and_16_bit_rows(dtype):
    codec = codec_of(fitted(repeated(), 2))
    x = mx.array(repeated(tokens=16, seed=1))[None].astype(dtype)
    y = codec.decode(codec.encode(mx.concatenate([x, x[:, :, ::-1]]), 0), 0, dtype)
    assert y.dtype == dtype
    assert mx.allclose(y[0], y[1][:, ::-1], atol=0.1)
    one = codec.decode(codec.encode(x[:, :, :1], 0), 0, dtype)
    assert mx.allclose(y[:1, :, :1], one, atol=0.1)


def test_widths_must_fit_the_latents():
    turn = Latents(mx.zeros((2, 8, 4)), 2)
    for widths in ((2,) * 3, (9, 2, 2, 2)):
        with pytest.raises(RecipeError, match="4 latents"):
            LatentScalar(turn, mx.ones((1, 4)), widths, TABLE, LogNorm(0.0, 0.1))
