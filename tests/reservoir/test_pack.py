from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model, load_tokenizer

from velox_pack.manifests.errors import PackError
from velox_pack.reservoir.linear import ReservoirLinear
from velox_pack.reservoir.pack import graft, pack_linear
from velox_pack.reservoir.rotations import (
    make_rotations,
    rotations_from_tensors,
    rotations_to_tensors,
)
from velox_pack.reservoir.select import select
from velox_pack.reservoir.spec import LinearSpec
from velox_pack.source import data_folder

WINDOW, WINDOWS = 512, 2


@pytest.fixture(scope="module")
def exact(demo_path):
    """Tokens [B, T] of held-out text and the trained demo's log-probabilities [B, T, V]."""
    model, _ = load_model(demo_path)
    model.set_dtype(mx.float32)
    text = (data_folder() / "text" / "heldout.txt").read_text(encoding="utf-8")
    tokens = load_tokenizer(demo_path).encode(text[:20_000])[: WINDOW * WINDOWS]
    tokens = mx.array(tokens).reshape(WINDOWS, WINDOW)
    return tokens, log_probabilities(model, tokens)


def log_probabilities(model, tokens):
    return nn.log_softmax(model(tokens), axis=-1)


def kl(exact, other):
    return float(mx.mean(mx.sum(mx.exp(exact) * (exact - other), axis=-1)))


def packed_model(demo_path, encoding, bits, group, levels):
    """A model packed, stored and loaded: (model, bits per packed weight)."""
    source, _ = load_model(demo_path, lazy=True)
    selection = select(source, encoding, bits, group)
    rotations = make_rotations(selection.widths, 0)
    modules = dict(source.named_modules())
    arrays = {}
    for path, spec in selection.packed.items():
        arrays |= pack_linear(path, modules[path].weight, None, spec, rotations, levels(bits))
    size = sum(a.nbytes for a in arrays.values())
    rest = {
        name: a
        for name, a in tree_flatten(source.parameters())
        if name.rpartition(".")[0] not in selection.packed
    }
    model, _ = load_model(demo_path, lazy=True)
    graft(model, selection.packed, rotations_from_tensors(rotations_to_tensors(rotations)))
    model.load_weights(list({**rest, **arrays}.items()), strict=True)
    model.set_dtype(mx.float32)
    return model, 8 * size / selection.parameters_packed


def naive_model(demo_path, bits, group):
    """All linears of the layers by plain mx.quantize and back."""
    model, _ = load_model(demo_path)
    model.set_dtype(mx.float32)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            packed = mx.quantize(module.weight, group_size=group, bits=bits)
            module.weight = mx.dequantize(*packed, group_size=group, bits=bits)
    return model


def test_packed_models_are_close_and_beat_plain_rounding(demo_path, exact, levels):
    tokens, truth = exact
    naive = {b: kl(truth, log_probabilities(naive_model(demo_path, b, 64), tokens)) for b in (3, 4)}
    assert naive[3] > 3 * naive[4] > 0.01, "the premise: the model is trained and feels rounding"
    lloyd, lloyd_bits = packed_model(demo_path, "lloyd", 4, None, levels)
    affine, affine_bits = packed_model(demo_path, "affine", 4, 64, levels)
    assert affine_bits == 4.5
    assert lloyd_bits < 4.12, "16 bits a row, and the levels, which weigh more in narrow layers"
    assert kl(truth, log_probabilities(affine, tokens)) < 0.9 * naive[4]
    # Plain rounding at lloyd's bits, by the straight line between 3.5 and 4.5 bits in log KL.
    at = (4.5 - lloyd_bits) / 1.0
    line = naive[4] ** (1 - at) * naive[3] ** at
    assert kl(truth, log_probabilities(lloyd, tokens)) < 0.7 * line


def test_grafting_evaluates_nothing_and_shares_rotations(demo_path):
    model, _ = load_model(demo_path, lazy=True)
    selection = select(model, "lloyd", 4)
    rotations = make_rotations(selection.widths, 0)
    mx.eval([r.signs for r in rotations.values()])
    before = mx.get_active_memory()
    graft(model, selection.packed, rotations)
    assert mx.get_active_memory() - before < 1 << 16
    layers = [m for m in model.modules() if isinstance(m, ReservoirLinear)]
    assert len(layers) == 42
    assert len({id(layer.rotation) for layer in layers}) == 3, "inputs of 192, 256 and 320"
    names = [name for name, _ in tree_flatten(model.parameters())]
    assert "model.layers.5.mlp.up_proj.codes" in names
    assert not any("rotation" in name or name.endswith("proj.weight") for name in names)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = [nn.Linear(64, 32), nn.Linear(32, 64, bias=False)]
        self.norm = nn.RMSNorm(64)

    def __call__(self, x):
        return self.norm(self.layers[1](self.layers[0](x)))


SPEC = LinearSpec("lloyd", 4, None, "w64", 64, 32, True)


def test_linears_in_a_list(levels):
    net = Net()
    rotations = make_rotations([64], 0)
    x = mx.random.normal((3, 64))
    truth = net(x)
    arrays = pack_linear(
        "layers.0", net.layers[0].weight, net.layers[0].bias, SPEC, rotations, levels(4)
    )
    graft(net, {"layers.0": SPEC}, rotations)
    net.load_weights(list(arrays.items()), strict=False)
    assert isinstance(net.layers[0], ReservoirLinear)
    np.testing.assert_allclose(np.array(net(x)), np.array(truth), atol=0.6)


@pytest.mark.parametrize(
    ("path", "change", "message"),
    [
        ("layers.2", {}, "layers.2: the model has no linear"),
        ("norm", {}, "norm: the model has no linear"),
        ("layers.0.deeper", {}, "no linear"),
        ("layers.0", {"in_features": 128}, "linear is \\(32, 64\\), the packed one \\(32, 128\\)"),
        ("layers.0", {"bias": False}, "differ about a bias"),
        ("layers.0", {"rotation": "w65"}, "layers.0: rotation 'w65' is missing"),
        ("layers.0", {"rotation": "w32"}, "layers.0: rotation w32 of width 32 for 64 inputs"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(path, change, message):
    net = Net()
    with pytest.raises(PackError, match=message):
        graft(net, {path: replace(SPEC, **change)}, make_rotations([32, 64], 0))
    assert isinstance(net.layers[0], nn.Linear), "a refused graft changes nothing"


def test_bad_input_to_packing_names_the_layer(levels):
    weight, bias = mx.random.normal((32, 64)), mx.zeros((32,))
    rotations = make_rotations([64], 0)
    with pytest.raises(PackError, match=r"a.b: weight \(64, 32\)"):
        pack_linear("a.b", weight.T, bias, SPEC, rotations, levels(4))
    with pytest.raises(PackError, match=r"a.b: missing bias"):
        pack_linear("a.b", weight, None, SPEC, rotations, levels(4))
    with pytest.raises(PackError, match=r"a.b: rotation 'w64' is missing"):
        pack_linear("a.b", weight, bias, SPEC, {}, levels(4))
    with pytest.raises(PackError, match=r"a.b: needs a codebook"):
        pack_linear("a.b", weight, bias, SPEC, rotations, None)
    weight[3, 4] = mx.nan
    with pytest.raises(PackError, match=r"a.b: a weight is not finite"):
        pack_linear("a.b", weight, bias, SPEC, rotations, levels(4))


def test_same_input_same_bytes(levels):
    weight, bias = mx.random.normal((32, 64)), mx.zeros((32,))
    for spec in (SPEC, replace(SPEC, encoding="affine", group=32)):
        one, other = (
            pack_linear("p", weight, bias, spec, make_rotations([64], 5), levels(4))
            for _ in range(2)
        )
        for name, array in one.items():
            assert mx.array_equal(array, other[name]), name
