from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from cache_support import opened

from trained_tokens import relative, rounded, through, trained
from vector_samples import commvq_of, normal, statistics
from velox_pack.caches.codecs import vectors
from velox_pack.caches.codecs.additive import Additive
from velox_pack.caches.codecs.rope import BeforeRope, RopeTable
from velox_pack.caches.codecs.rotated import LogNorm
from velox_pack.calibrators import commvq
from velox_pack.kernels.rope import apply_rope
from velox_pack.manifests.errors import RecipeError


def codec_of(artifact, beam=4):
    found = opened(artifact)
    return Additive(
        found.codebooks[0],
        found.mean[0],
        found.weight[0],
        LogNorm(*found.log_scale[0].tolist()),
        found.dims,
        found.traditional,
        beam,
    )


def fitted(rows, bits):
    layer, trace = statistics(rows)
    return commvq.fit({0: layer}, [trace], bits=bits)[0]


def rows_of(*shape, seed=0):
    return mx.array(normal(*shape, seed=seed).astype(np.float32))


def agree(artifact, x, beam=4):
    """Whether nearly all rows decode to what NumPy's decode to, at the same error over all."""
    found = through(codec_of(artifact, beam), x)
    wanted = commvq.decode(artifact, 0, commvq.encode(artifact, 0, x, beam=beam))
    same = np.isclose(found, wanted, rtol=1e-3, atol=1e-3).all(axis=2)
    return np.mean(same) > 0.95 and np.isclose(relative(x, found), relative(x, wanted), rtol=0.01)


@pytest.mark.parametrize("dim", [16, 64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("heads", [1, 3])
def test_decodes_to_what_numpy_decodes_in_the_bytes_said(heads, dim):
    artifact, x = commvq_of(heads, dim, 3, 16, dims=dim), normal(heads, 40, dim)
    (words,) = codec_of(artifact).encode(mx.array(x.astype(np.float32))[None], 0)
    total = heads * (8 + 3 * 2 * 4)
    assert (words.dtype, words.shape) == (mx.uint32, (1, 1, 40, -(-total // 32)))
    assert agree(artifact, x)


@pytest.mark.parametrize("beam", [1, 2, 4, 40])
@pytest.mark.parametrize("entries", [4, 8, 64])
def test_any_beam_and_number_of_entries(entries, beam):
    assert agree(commvq_of(2, 32, 4, entries, dims=32), normal(2, 20, 32), beam)


def test_two_bits_are_two_bits():
    """At whole bits codes and scale fill the words of a token of any number of heads."""
    for heads in (1, 3):
        codec = codec_of(commvq_of(heads, 64, 15, 16, dims=64))
        assert codec.encode(rows_of(1, heads, 8, 64), 0)[0].nbytes * 8 == 2 * heads * 8 * 64


def test_a_wider_beam_is_nearer():
    artifact = commvq_of(2, 64, 6, 16, dims=64)
    x = normal(2, 100, 64)
    errors = [relative(x, through(codec_of(artifact, beam), x)) for beam in (1, 4)]
    assert errors[1] < errors[0]


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("dims", [32, 16])
def test_codes_do_not_depend_on_the_position_and_commute_with_rope(dims, traditional):
    artifact = commvq_of(2, 32, 4, 16, dims=dims, traditional=traditional)
    inv_freq = mx.array((100.0 ** (-np.arange(0, dims, 2) / dims)).astype(np.float32))
    table = RopeTable(inv_freq, traditional)
    codec = BeforeRope(codec_of(artifact), table)
    before = rows_of(1, 2, 20, 32)
    packed = []
    for start in (0, 700):
        cos, sin = table.at(start, 20)
        packed.append(codec.encode(apply_rope(before, cos, sin, traditional), start))
    assert mx.mean(packed[0][0] == packed[1][0]).item() > 0.95
    # What NumPy decodes with the rotation applied to the coefficients of the code.
    codes = commvq.encode(artifact, 0, np.array(before[0], np.float64))
    cos, sin = (np.array(a, np.float64) for a in table.at(700, 20))
    wanted = commvq.decode_turned(artifact, 0, codes, cos, sin)
    found = np.array(codec.decode(packed[1], 700, mx.float32))[0]
    assert np.mean(np.isclose(found, wanted, rtol=1e-3, atol=1e-3).all(axis=2)) > 0.9


def planted(tokens, seed):
    """Keys that are sums of a few directions turned by any multiple of 90 degrees, and a mean."""
    fixed, rng = np.random.default_rng(9), np.random.default_rng(seed)
    z = fixed.standard_normal((2, 6, 16)) + 1j * fixed.standard_normal((2, 6, 16))
    rows = z[np.arange(2)[:, None], rng.integers(6, size=(2, tokens))]
    rows = rows * 1j ** rng.integers(4, size=(2, tokens, 1))
    x = np.concatenate([rows.real, rows.imag], axis=-1) + 0.05 * rng.standard_normal(
        (2, tokens, 32)
    )
    return x + 3


def test_planted_directions_are_found():
    x = planted(100, 1)
    error = relative(x, through(codec_of(fitted(planted(600, 0), 1.5)), x))
    assert error < 0.05
    assert error < 0.1 * relative(x, rounded(x, 2))  # 3 bits


def test_trained_keys_beat_plain_rounding_of_twice_the_bits():
    tokens, held = trained()
    x = held[3].part("keys")
    codec = codec_of(fitted(tokens[3].part("keys"), 1.0))
    assert codec.encode(mx.array(x)[None], 0)[0].nbytes * 8 == x.size
    assert relative(x, through(codec, x)) < 0.8 * relative(x, rounded(x, 2))  # 3 bits


def test_a_long_chunk_is_coded_in_blocks_as_at_once(monkeypatch):
    codec = codec_of(commvq_of(2, 32, 4, 16, dims=32))
    x = rows_of(1, 2, 100, 32)
    whole = codec.encode(x, 0)[0]
    monkeypatch.setattr(vectors, "ELEMENTS", 2 * 4 * 256 * 7)
    blocks = codec.encode(x, 0)[0]
    assert blocks.shape == whole.shape
    assert mx.mean(whole == blocks).item() > 0.95


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_batches_and_16_bit_rows(dtype):
    codec = codec_of(commvq_of(2, 64, 4, 16, dims=64))
    x = rows_of(1, 2, 16, 64).astype(dtype)
    y = codec.decode(codec.encode(mx.concatenate([x, x[:, :, ::-1]]), 0), 0, dtype)
    assert y.dtype == dtype
    assert mx.allclose(y[0], y[1][:, ::-1], atol=0.05)
    one = codec.decode(codec.encode(x[:, :, :1], 0), 0, dtype)
    assert mx.allclose(y[:1, :, :1], one, atol=0.05)


def test_rows_at_the_mean_and_what_cannot_be():
    artifact = commvq_of(2, 32, 3, 16, dims=32)
    codec = codec_of(artifact)
    mean = np.broadcast_to(artifact.mean[0][:, None], (2, 3, 32))
    assert np.all(np.isfinite(through(codec, mean)))
    with pytest.raises(RecipeError, match="12 entries"):
        replace(codec, codebooks=codec.codebooks[:, :, :12])
    with pytest.raises(RecipeError, match="dims 7 of 32"):
        replace(codec, dims=7)
    with pytest.raises(RecipeError, match="beam=0"):
        replace(codec, beam=0)
    assert codec.constants()[0].dtype == mx.float16
