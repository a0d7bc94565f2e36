import mlx.core as mx
import numpy as np
import pytest
from cache_support import opened

from token_samples import made
from trained_tokens import relative, rounded, through, trained
from velox_pack.caches.codecs.kitty import ChannelLevels
from velox_pack.caches.codecs.rotated import LevelTable
from velox_pack.calibrators import codebooks, kitty
from velox_pack.manifests.errors import RecipeError

TABLE = LevelTable(dict(opened(codebooks.fit()).levels))


def codec_of(artifact, row=0):
    widths = tuple(int(w) for w in artifact.widths[row].ravel())
    mean, deviation = (mx.array(a[row]) for a in (artifact.mean, artifact.deviation))
    return ChannelLevels(mean, deviation, widths, TABLE)


def wide(heads=2, tokens=256, dim=64, seed=0):
    """A few channels 20 times as wide as the others, different ones in each head."""
    x = np.random.default_rng(seed).standard_normal((heads, tokens, dim)) + 1
    for h in range(heads):
        x[h, :, [3 + h, dim - 2 - h]] *= 20
    return x


def fitted(x, bits=2.25, rule="water"):
    return kitty.fit(made([x]), "keys", bits, rule=rule)[0]


@pytest.mark.parametrize("rule", ["water", "boost"])
@pytest.mark.parametrize("dim", [16, 64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("heads", [1, 3])
def test_decodes_to_what_numpy_decodes_in_the_bytes_said(heads, dim, rule):
    artifact, x = fitted(wide(heads, 256, dim), rule=rule), wide(heads, 40, dim, seed=1)
    codec = codec_of(artifact)
    (words,) = codec.encode(mx.array(x.astype(np.float32))[None], 0)
    assert (words.dtype, words.shape) == (
        mx.uint32,
        (1, 1, 40, -(-int(artifact.widths.sum()) // 32)),
    )
    found, wanted = through(codec, x), kitty.decoded(artifact, 0, x)
    close = np.isclose(found, wanted, rtol=1e-4, atol=1e-4)
    assert np.mean(close) > 0.9999  # a number on an edge may round either way


def test_plain_rounding_of_more_bits_loses():
    x = wide(seed=1)
    ours = relative(x, through(codec_of(fitted(wide())), x))
    assert ours < 0.2 * relative(x, rounded(x, 2))  # 3 bits


def test_trained_keys_beat_plain_rounding_of_more_bits():
    tokens, held = trained()
    artifacts = kitty.fit(tokens, "keys", 2.25)
    for row, i in enumerate(artifacts[0].layers):
        x = held[i].part("keys")
        assert relative(x, through(codec_of(artifacts[0], row), x)) < 0.5 * relative(
            x, rounded(x, 2)
        )


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_batches_and_16_bit_rows(dtype):
    codec = codec_of(fitted(wide()))
    x = mx.array(wide(seed=1).astype(np.float32))[None].astype(dtype)
    both = mx.concatenate([x, x[:, :, ::-1]])
    y = codec.decode(codec.encode(both, 0), 0, dtype)
    assert y.dtype == dtype
    assert mx.array_equal(y[0], y[1][:, ::-1])
    assert mx.array_equal(y[:1, :, :1], codec.decode(codec.encode(x[:, :, :1], 0), 0, dtype))


def test_widths_must_fit_the_channels():
    flat = mx.ones((2, 4))
    for widths in ((2,) * 7, (9, *[2] * 7)):
        with pytest.raises(RecipeError, match="8 channels"):
            ChannelLevels(flat, flat, widths, TABLE)
