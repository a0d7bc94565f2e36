import mlx.core as mx
import numpy as np
import pytest

from velox_pack.kernels import apply_rope, rope_angles, undo_rope


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize(("head", "dims"), [(64, 64), (64, 32), (80, 20), (256, 256), (6, 2)])
def test_agrees_with_mlx_and_is_undone(traditional, head, dims):
    x = mx.random.normal((2, 3, 17, head), key=mx.random.key(head))
    inv_freq = 10000.0 ** -(mx.arange(dims // 2) / (dims // 2))
    cos, sin = rope_angles(inv_freq, mx.arange(100, 117))
    assert cos.shape == (17, dims // 2)
    turned = apply_rope(x, cos, sin, traditional)
    exact = mx.fast.rope(x, dims, traditional=traditional, base=10000.0, scale=1.0, offset=100)
    np.testing.assert_allclose(np.array(turned), np.array(exact), atol=1e-4)
    np.testing.assert_allclose(
        np.array(undo_rope(turned, cos, sin, traditional)), np.array(x), atol=2e-6
    )
    assert mx.array_equal(turned[..., dims:], x[..., dims:])


def test_positions_of_each_row_of_a_batch():
    x = mx.random.normal((2, 3, 5, 8))
    inv_freq = mx.array([1.0, 0.1, 0.01, 0.001])
    positions = mx.array([[0, 1, 2, 3, 4], [7, 8, 9, 10, 11]])
    cos, sin = rope_angles(inv_freq, positions)
    both = apply_rope(x, cos[:, None], sin[:, None])
    for row in range(2):
        single = apply_rope(x[row : row + 1], *rope_angles(inv_freq, positions[row]))
        np.testing.assert_allclose(np.array(both[row]), np.array(single[0]), atol=1e-6)


def test_long_positions_and_half_precision():
    inv_freq = 10000.0 ** -(mx.arange(32) / 32)
    cos, sin = rope_angles(inv_freq, mx.array([30000, 30001]))
    x = mx.random.normal((1, 1, 2, 64))
    exact = mx.fast.rope(x, 64, traditional=False, base=10000.0, scale=1.0, offset=30000)
    assert mx.abs(apply_rope(x, cos, sin) - exact).max() < 2e-2
    assert mx.abs(undo_rope(apply_rope(x, cos, sin), cos, sin) - x).max() < 2e-6
    assert apply_rope(x.astype(mx.bfloat16), cos, sin).dtype == mx.bfloat16


def test_more_dimensions_than_the_head_are_refused():
    cos, sin = rope_angles(mx.ones((8,)), mx.arange(3))
    with pytest.raises(ValueError, match="16 dimensions of a head of 8"):
        apply_rope(mx.zeros((1, 1, 3, 8)), cos, sin)
