import mlx.core as mx
import numpy as np
import pytest

from velox_pack.caches.codecs.affine import Affine
from velox_pack.caches.codecs.exact import Exact
from velox_pack.caches.codecs.rope import BeforeRope, RopeTable
from velox_pack.calibrators.hooks import RopeCall
from velox_pack.calibrators.trace import rope_spec


def table(dims, traditional, base=10000.0, scale=1.0, freqs=None):
    call = RopeCall(None, None, dims, traditional, base, scale, 0, freqs)
    return RopeTable(mx.array(rope_spec(call).inv_freq), traditional)


def keys(tokens=40, dim=64, seed=0):
    return mx.array(np.random.default_rng(seed).standard_normal((2, 2, tokens, dim), np.float32))


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("dims", [64, 32, 8])
@pytest.mark.parametrize("offset", [0, 100, 2040, 30_000])
def test_undoes_mlx_rope(traditional, dims, offset):
    before = keys()
    after = mx.fast.rope(
        before, dims, traditional=traditional, base=10000.0, scale=1.0, offset=offset
    )
    codec = BeforeRope(Exact(), table(dims, traditional))
    (held,) = codec.encode(after, offset)
    # mx.fast.rope makes its frequencies in float32, so its angles drift by 1e-7 of the position.
    assert mx.abs(held - before).max().item() < 1e-5 + 3e-7 * (offset + 40)
    # What is undone is done again by the same table: nothing of that is left.
    assert mx.abs(codec.decode((held,), offset, mx.float32) - after).max().item() < 3e-6


@pytest.mark.parametrize("options", [{"scale": 0.25}, {"freqs": mx.exp(mx.linspace(0, 9, 32))}])
def test_scaled_and_given_frequencies(options):
    before = keys()
    base = None if "freqs" in options else 10000.0
    mlx_options = {"scale": 1.0, "freqs": None} | options
    after = mx.fast.rope(before, 64, traditional=False, base=base, offset=500, **mlx_options)
    (held,) = BeforeRope(Exact(), table(64, False, base=base, **options)).encode(after, 500)
    assert mx.abs(held - before).max().item() < 1e-3


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_16_bit_keys_come_back_to_one_rounding(dtype):
    after = mx.fast.rope(
        keys().astype(dtype), 64, traditional=False, base=10000.0, scale=1.0, offset=5
    )
    codec = BeforeRope(Exact(), table(64, False))
    back = codec.decode(codec.encode(after, 5), 5, dtype)
    assert back.dtype == dtype
    assert mx.allclose(back, after, rtol=1e-2, atol=1e-2)
    assert mx.mean(back == after).item() > 0.99  # held in float32, so hardly any is rounded anew


def test_a_wrong_position_shows():
    after = mx.fast.rope(keys(), 64, traditional=False, base=10000.0, scale=1.0, offset=5)
    codec = BeforeRope(Exact(), table(64, False))
    back = codec.decode(codec.encode(after, 5), 6, mx.float32)
    assert mx.abs(back - after).max().item() > 0.5


def test_groups_of_tokens_work_inside():
    after = mx.fast.rope(keys(64), 64, traditional=False, base=10000.0, scale=1.0, offset=4)
    codec = BeforeRope(Affine(8, 32, 64, "channel"), table(64, False))
    assert codec.granularity == 32
    back = codec.decode(codec.encode(after, 4), 4, mx.float32)
    assert mx.abs(back - after).max().item() < 0.05


def test_table_grows_and_is_counted_once_for_all_layers():
    shared = table(64, False)
    one, two = BeforeRope(Exact(), shared), BeforeRope(Exact(), shared)
    one.encode(keys(), 0)
    cos, _ = shared.at(0, 10)
    small = [a.nbytes for a in one.constants()]
    assert small == [32 * 4, 2048 * 32 * 4, 2048 * 32 * 4]
    two.encode(keys(), 5000)
    assert [a.nbytes for a in one.constants()][1:] == [8192 * 32 * 4] * 2
    assert {id(a) for a in one.constants()} == {id(a) for a in two.constants()}
    assert mx.array_equal(shared.at(0, 10)[0], cos)  # growing changes no angle
