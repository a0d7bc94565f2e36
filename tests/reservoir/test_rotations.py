import mlx.core as mx
import pytest

from velox_pack.kernels import rotate
from velox_pack.manifests.errors import PackError
from velox_pack.reservoir.rotations import (
    make_rotations,
    rotation_id,
    rotations_from_tensors,
    rotations_to_tensors,
    tensor_name,
)


def test_one_rotation_a_width_and_back_from_what_is_stored():
    rotations = make_rotations([512, 896, 101, 512], seed=3)
    assert list(rotations) == ["w101", "w512", "w896"] == [rotation_id(w) for w in (101, 512, 896)]
    tensors = rotations_to_tensors(rotations)
    assert tensors["w896"]["signs"].dtype == mx.int8
    assert {name: sorted(roles) for name, roles in tensors.items()} == {
        "w101": ["signs"],
        "w512": ["signs"],
        "w896": ["mix", "signs"],
    }
    loaded = rotations_from_tensors(tensors)
    for name, rotation in rotations.items():
        x = mx.random.normal((2, rotation.width))
        assert mx.array_equal(rotate(x, loaded[name]), rotate(x, rotation)), name
    assert tensor_name("w896", "mix") == "velox.rotation.w896.mix"


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        ({"mix": mx.eye(3)}, "needs signs"),
        ({"signs": mx.ones((8,), mx.int8), "probe": mx.ones(1)}, "probe"),
        ({"signs": mx.ones((8,))}, "int8"),
        ({"signs": mx.ones((2, 4), mx.int8)}, "one axis"),
        ({"signs": mx.zeros((8,), mx.int8)}, "not \\+1 or -1"),
        ({"signs": mx.full((8,), -128, mx.int8)}, "not \\+1 or -1"),
        ({"signs": mx.ones((24,), mx.int8), "mix": mx.eye(5)}, "does not fit width 24"),
        ({"signs": mx.ones((24,), mx.int8), "mix": mx.eye(3).astype(mx.float16)}, "not fit"),
        ({"signs": mx.ones((24,), mx.int8), "mix": mx.eye(3) * 2}, "not orthogonal"),
        ({"signs": mx.ones((24,), mx.int8), "mix": mx.eye(3) * mx.nan}, "not orthogonal"),
        ({"signs": mx.ones((24,), mx.int8), "mix": mx.ones((3, 2))}, "not orthogonal"),
        ({"signs": mx.ones((24,), mx.int8), "mix": mx.eye(4)}, "power of two"),
    ],
)
def test_stored_rotations_that_are_wrong(roles, message):
    with pytest.raises(PackError, match="rotation bad.*" + message):
        rotations_from_tensors({"bad": roles})
