import copy

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from velox_pack.kernels import make_rotation
from velox_pack.manifests.errors import PackError
from velox_pack.reservoir import linear
from velox_pack.reservoir.linear import ReservoirLinear
from velox_pack.reservoir.pack import pack_linear
from velox_pack.reservoir.rotations import make_rotations, rotation_id
from velox_pack.reservoir.spec import LinearSpec


@pytest.fixture
def make(levels):
    def of(encoding="lloyd", bits=4, group=None, out=48, width=192, bias=True, turned=True):
        rotations = make_rotations([width], 0)
        name = rotation_id(width) if turned else None
        spec = LinearSpec(encoding, bits, group, name, width, out, bias)
        weight = mx.random.normal((out, width), key=mx.random.key(1)) * 0.05
        vector = mx.random.normal((out,), key=mx.random.key(2)) if bias else None
        arrays = pack_linear("p", weight, vector, spec, rotations, levels(bits))
        layer = ReservoirLinear(spec, rotations[name] if name else None)
        layer.load_weights([(key[2:], array) for key, array in arrays.items()], strict=True)
        return layer, weight

    return of


CASES = [("lloyd", b, None) for b in (2, 3, 4)]
CASES += [("affine", 4, 64), ("affine", 3, 32), ("affine", 8, 64)]


@pytest.mark.parametrize(("encoding", "bits", "group"), CASES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("rows", [(1,), (3, 2), (2, 40)])
def test_forward_is_the_product_with_the_decoded_weight(
    encoding, bits, group, bias, turned, rows, make
):
    layer, weight = make(encoding, bits, group, bias=bias, turned=turned)
    x = mx.random.normal((*rows, 192))
    exact = x @ layer.decode().T + (layer.bias if bias else 0)
    assert layer(x).shape == (*rows, 48)
    np.testing.assert_allclose(np.array(layer(x)), np.array(exact), atol=2e-4)
    error = mx.mean(mx.square(layer.decode() - weight)) / mx.mean(mx.square(weight))
    assert error < {2: 0.125, 3: 0.037, 4: 0.0105, 8: 1e-4}[bits]


@pytest.mark.parametrize(("encoding", "bits", "group"), CASES)
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_inputs(encoding, bits, group, dtype, make):
    layer, _ = make(encoding, bits, group)
    for rows in (1, 40):
        x = mx.random.normal((rows, 192))
        y = layer(x.astype(dtype))
        assert y.dtype == dtype
        np.testing.assert_allclose(np.array(y.astype(mx.float32)), np.array(layer(x)), atol=0.1)


def test_large_float16_activations_do_not_overflow(make):
    layer, _ = make(bias=False, turned=False)
    x = mx.full((2, 192), 3000.0, mx.float16)
    assert bool(mx.all(mx.isfinite(layer(x))))


@pytest.mark.parametrize(("encoding", "bits", "group"), [("lloyd", 3, None), ("affine", 4, 64)])
def test_blocks_of_rows(encoding, bits, group, make, monkeypatch):
    layer, _ = make(encoding, bits, group, out=50)
    x = mx.random.normal((40, 192))
    whole = layer(x)
    monkeypatch.setattr(linear, "BLOCK_BYTES", 7 * 192 * 4)
    np.testing.assert_allclose(np.array(layer(x)), np.array(whole), atol=1e-5)


@pytest.mark.parametrize(("encoding", "group"), [("lloyd", None), ("affine", 64)])
def test_memory_stays_below_a_dense_copy_and_nothing_is_kept(encoding, group, make, monkeypatch):
    layer, weight = make(encoding, 4, group, out=4096, width=512, bias=False)
    dense = weight.nbytes
    monkeypatch.setattr(linear, "BLOCK_BYTES", dense // 32)
    x = mx.random.normal((32, 512))
    mx.eval(layer(x), x)
    del weight
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    y = layer(x)
    mx.eval(y)
    # Two blocks with their entries and table, and the result itself.
    assert mx.get_peak_memory() - before < dense / 4 + y.nbytes
    del y
    mx.clear_cache()
    assert mx.get_active_memory() <= before + 4096


def test_parameters_bytes_and_repr(make):
    layer, _ = make(bias=True)
    names = dict(tree_flatten(layer.parameters()))
    assert sorted(names) == ["bias", "codes", "levels", "scales"]
    assert layer.nbytes == sum(a.nbytes for a in names.values())
    assert layer.nbytes == 48 * 192 // 2 + 48 * 2 + 16 * 4 + 48 * 4
    assert "lloyd, bits=4, rotation=w192" in repr(layer)
    assert not hasattr(layer, "to_quantized")
    assert not isinstance(layer, nn.Linear)
    affine, _ = make("affine", 4, 64, bias=False)
    assert sorted(dict(tree_flatten(affine.parameters()))) == ["biases", "codes", "scales"]
    assert "group=64" in repr(affine)


@pytest.mark.parametrize(("encoding", "group"), [("lloyd", None), ("affine", 64)])
def test_saved_and_loaded(encoding, group, make, tmp_path):
    layer, _ = make(encoding, 4, group)
    path = str(tmp_path / "layer.safetensors")
    mx.save_safetensors(path, dict(tree_flatten(layer.parameters())))
    fresh = ReservoirLinear(layer.spec, make_rotation(192, 0))
    x = mx.random.normal((5, 192))
    assert not mx.array_equal(fresh(x), layer(x))
    fresh.load_weights(path, strict=True)
    assert mx.array_equal(fresh(x), layer(x))


def test_deepcopy_and_change_of_dtype(make):
    layer, _ = make()
    both = copy.deepcopy([layer, layer])
    x = mx.random.normal((5, 192))
    assert mx.array_equal(both[0](x), layer(x))
    both[0].set_dtype(mx.bfloat16)
    assert both[0].codes.dtype == mx.uint32
    np.testing.assert_allclose(np.array(both[0](x)), np.array(layer(x)), atol=0.1)


def test_a_deep_copy_of_a_model_shares_its_rotation(make):
    layer, _ = make()
    other = ReservoirLinear(layer.spec, layer.rotation)
    first, second = copy.deepcopy([layer, other])
    assert first.rotation is second.rotation


def test_compiled(make, monkeypatch):
    layer, _ = make()
    x = mx.random.normal((3, 192))
    exact = layer(x)
    monkeypatch.setattr(linear, "BLOCK_BYTES", 7 * 192 * 4)
    compiled = mx.compile(lambda v: layer(v))
    np.testing.assert_allclose(np.array(compiled(x)), np.array(exact), atol=1e-5)


def test_differentiable_in_its_input(make):
    for arguments in (("lloyd", 4, None), ("affine", 4, 64)):
        layer, _ = make(*arguments)
        x = mx.random.normal((3, 192))
        gradient = mx.grad(lambda v, layer=layer: layer(v).sum())(x)
        exact = mx.broadcast_to(layer.decode().sum(0), x.shape)
        np.testing.assert_allclose(np.array(gradient), np.array(exact), atol=1e-3)


def test_no_rows(make):
    for arguments in (("lloyd", 4, None), ("affine", 4, 64)):
        layer, _ = make(*arguments)
        assert layer(mx.zeros((2, 0, 192))).shape == (2, 0, 48)


def test_refusals():
    spec = LinearSpec("lloyd", 4, None, "w192", 192, 8, False)
    with pytest.raises(PackError, match="rotation is w192, given: None"):
        ReservoirLinear(spec, None)
    with pytest.raises(PackError, match="width 96 for 192 inputs"):
        ReservoirLinear(spec, make_rotation(96, 0))
