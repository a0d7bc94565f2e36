import mlx.core as mx
import numpy as np
import pytest

from velox_pack.kernels import midpoints, nearest_centroid, quantize_levels


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8, 16, 32, 64, 65, 100, 128, 255, 256])
def test_codes_are_the_nearest_levels(count):
    rng = np.random.default_rng(count)
    levels = np.sort(rng.standard_normal(count)).astype(np.float32)
    x = np.concatenate([rng.standard_normal(3000) * 2, levels, [1e9, -1e9, np.inf, -np.inf]])
    x = x.astype(np.float32)[None]
    boundaries = midpoints(mx.array(levels))
    codes = quantize_levels(mx.array(x), boundaries)
    assert codes.dtype == mx.uint32
    np.testing.assert_array_equal(np.array(codes), np.searchsorted(np.array(boundaries), x))
    finite = x[np.isfinite(x)].astype(np.float64)
    nearest = np.abs(finite[:, None] - levels.astype(np.float64)).argmin(-1)
    found = np.array(codes)[np.isfinite(x)]
    # A value within a rounding of a boundary may go either way.
    differ = found != nearest
    gap = np.abs(finite - levels[found]) - np.abs(finite - levels[nearest])
    assert (gap[differ] < 1e-6).all()
    assert differ.mean() < 0.01


@pytest.mark.parametrize("count", [4, 200])
def test_a_value_on_a_boundary_takes_the_lower_level(count):
    boundaries = mx.arange(count - 1).astype(mx.float32)
    assert mx.array_equal(quantize_levels(boundaries, boundaries), mx.arange(count - 1))


@pytest.mark.parametrize(("count", "times"), [(16, 12), (256, 32)])
def test_no_array_with_an_axis_of_levels(count, times):
    x = mx.random.normal((512, 1024))
    boundaries = midpoints(mx.sort(mx.random.normal((count,))))
    mx.eval(x, boundaries)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(quantize_levels(x, boundaries))
    assert mx.get_peak_memory() - before < times * x.nbytes


def test_half_precision_and_empty_input():
    boundaries = mx.array([-0.5, 0.5])
    assert quantize_levels(mx.array([-1, 0, 1], mx.bfloat16), boundaries).tolist() == [0, 1, 2]
    assert quantize_levels(mx.zeros((0, 4)), boundaries).shape == (0, 4)
    with pytest.raises(ValueError, match="one axis"):
        quantize_levels(mx.zeros((4,)), mx.zeros((2, 2)))


def test_nearest_centroid():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((5, 40, 4)).astype(np.float32)
    centroids = rng.standard_normal((64, 4)).astype(np.float32)
    found = nearest_centroid(mx.array(x), mx.array(centroids))
    assert found.dtype == mx.uint32
    distance = np.square(x[..., None, :].astype(np.float64) - centroids).sum(-1)
    np.testing.assert_array_equal(np.array(found), distance.argmin(-1))
    assert mx.array_equal(nearest_centroid(mx.array(centroids), mx.array(centroids)), mx.arange(64))


def test_nearest_centroid_in_blocks(monkeypatch):
    x, centroids = mx.random.normal((37, 3)), mx.random.normal((10, 3))
    whole = nearest_centroid(x, centroids)
    monkeypatch.setattr("velox_pack.kernels.levels._BLOCK_ELEMENTS", 80)
    assert mx.array_equal(nearest_centroid(x, centroids), whole)


def test_nearest_centroid_edges():
    assert nearest_centroid(mx.zeros((2, 0, 4)), mx.zeros((3, 4))).shape == (2, 0)
    assert nearest_centroid(mx.zeros((2, 4)), mx.zeros((3, 4))).tolist() == [0, 0]
    with pytest.raises(ValueError, match="do not fit"):
        nearest_centroid(mx.zeros((2, 4)), mx.zeros((3, 5)))
