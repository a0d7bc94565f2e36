import mlx.core as mx
import pytest

from velox_pack.manifests.aligned import TensorSpec, layout
from velox_pack.manifests.dtypes import dtype_name
from velox_pack.manifests.errors import PackError
from velox_pack.reservoir.pack import pack_linear
from velox_pack.reservoir.rotations import make_rotations, rotation_id
from velox_pack.reservoir.spec import LinearSpec, packed_specs, scale_dtype, specs_nbytes

ENCODINGS = [("lloyd", b, None) for b in (2, 3, 4, 8)]
ENCODINGS += [("affine", b, g) for b in (2, 3, 4, 5, 6, 8) for g in (32, 64, 128)]


@pytest.mark.parametrize(("encoding", "bits", "group"), ENCODINGS)
@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_prediction_is_what_packing_makes(encoding, bits, group, dtype, with_bias, levels):
    kind = {"F16": mx.float16, "BF16": mx.bfloat16, "F32": mx.float32}[dtype]
    weight = mx.random.normal((6, 128)).astype(kind)
    bias = mx.random.normal((6,)).astype(kind) if with_bias else None
    spec = LinearSpec(encoding, bits, group, rotation_id(128), 128, 6, with_bias)
    arrays = pack_linear("a.b", weight, bias, spec, make_rotations([128], 0), levels(bits))
    predicted = packed_specs(
        "a.b", 6, 128, dtype if with_bias else None, encoding, bits, group, weight_dtype=dtype
    )
    assert {name: (dtype_name(a), a.shape) for name, a in arrays.items()} == predicted
    assert list(arrays) == list(predicted)
    assert specs_nbytes(predicted) == sum(a.nbytes for a in arrays.values())


def test_odd_widths_of_lloyd_end_in_a_padded_word():
    assert packed_specs("p", 5, 33, None, "lloyd", 3, None)["p.codes"] == ("U32", (5, 4))


def test_scales_have_the_dtype_that_the_product_runs_in():
    assert scale_dtype("affine", "BF16") == scale_dtype("affine", "F32") == "BF16"
    assert scale_dtype("affine", "F16") == scale_dtype("lloyd", "BF16") == "F16"


def test_a_model_of_half_a_billion_in_four_bits_takes_190_megabytes():
    """Qwen2.5-0.5B: 24 layers, hidden 896, MLP 4864, 2 KV heads of 64, biases on q, k and v."""
    shapes = {
        "self_attn.q_proj": (896, 896, "BF16"),
        "self_attn.k_proj": (128, 896, "BF16"),
        "self_attn.v_proj": (128, 896, "BF16"),
        "self_attn.o_proj": (896, 896, None),
        "mlp.gate_proj": (4864, 896, None),
        "mlp.up_proj": (4864, 896, None),
        "mlp.down_proj": (896, 4864, None),
    }
    specs = {}
    for layer in range(24):
        for name, (out, width, bias) in shapes.items():
            path = f"model.layers.{layer}.{name}"
            specs.update(packed_specs(path, out, width, bias, "lloyd", 4, None))
    for rotation in make_rotations([896, 4864], 0).values():
        assert rotation.nbytes < 24_000
    padded = layout({n: TensorSpec(d, s) for n, (d, s) in specs.items()}).size
    assert specs_nbytes(specs) < padded < 185e6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("lloyd", 1, None), "2 to 8 bits, not 1"),
        (("lloyd", 4, 64), "no group"),
        (("affine", 7, 64), "not 7"),
        (("affine", 4, 16), "not 16"),
        (("affine", 4, None), "not None"),
        (("nf4", 4, 64), "unknown encoding 'nf4'"),
    ],
)
def test_refusals(arguments, message):
    with pytest.raises(PackError, match=message):
        packed_specs("p", 8, 128, None, *arguments)
    with pytest.raises(PackError, match=message):
        LinearSpec(*arguments, None, 128, 8, False)


def test_widths_that_do_not_fit():
    with pytest.raises(PackError, match="width 100 is not a multiple of group 64"):
        packed_specs("p", 8, 100, None, "affine", 4, 64)
    with pytest.raises(PackError, match="width 100 is not a multiple of group 64"):
        LinearSpec("affine", 4, 64, None, 100, 8, False)
    with pytest.raises(PackError, match="0 x 128"):
        LinearSpec("lloyd", 4, None, None, 128, 0, False)
