"""NUQ: outliers apart, levels where errors cost, first token exact; plain rounding must lose."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from velox_pack.calibrators import nuq
from velox_pack.manifests.artifacts_scalar import Nuq
from velox_pack.manifests.errors import CalibrationError

Array = np.ndarray


def made(x: Array, part: str, bits: int = 3, weights: Array | None = None, **options: Any) -> Nuq:
    axis = "channel" if part == "keys" else "token"
    layer = nuq.fit_layer(x, weights, bits, axis=axis, **options)
    share = options.get("outliers", nuq.OUTLIERS)
    (found,) = nuq.stack({5: layer}, {5: True}, part, bits, share)
    found.to_tensors()
    return found


def planted() -> Array:
    """Channels of very different place and size, and 0.5 % of numbers ten times as large."""
    rng = np.random.default_rng(0)
    x = rng.laplace(size=(2, 3000, 64)) * np.geomspace(0.1, 10, 64) + 5 * rng.standard_normal(64)
    x[rng.random(x.shape) < 0.005] *= 10
    return x.astype(np.float32)


def affine(x: Array, bits: int) -> Array:
    y = mx.array(x)
    return np.array(
        mx.dequantize(*mx.quantize(y, group_size=64, bits=bits), group_size=64, bits=bits)
    )


@pytest.mark.parametrize("part", ["keys", "values"])
def test_plain_rounding_loses_on_channels_and_outliers(part: str) -> None:
    x = planted()
    found = made(x, part)
    codes = nuq.encode(found, 0, x)
    decoded = nuq.decode(found, 0, codes)
    assert decoded.shape == x.shape
    np.testing.assert_array_equal(decoded[:, 0], x[:, 0])  # the first token is exact
    rest, own = x[:, 1:], decoded[:, 1:]
    np.testing.assert_allclose(own[codes.outliers], rest[codes.outliers], rtol=1e-3)
    scale = np.square(rest - rest.mean(axis=1, keepdims=True)).mean(axis=1)

    def error(y: Array) -> float:
        return float(np.mean(np.square(y - rest).mean(axis=1) / scale))

    bits = codes.bits_per_element(3)
    assert 3.3 < bits < 3.8
    assert codes.outliers.mean() == pytest.approx(0.01, abs=0.006)
    if part == "keys":
        assert error(own) < 0.1 * error(affine(rest, 3))
    without = made(x, part, outliers=0.0)
    dense = nuq.decode(without, 0, nuq.encode(without, 0, x))[:, 1:]
    assert error(own) < 0.6 * error(dense)


def test_levels_go_where_errors_cost() -> None:
    rng = np.random.default_rng(1)
    x = rng.uniform(-1, 1, (1, 4000, 4)).astype(np.float32)
    weights = np.where(x > 0.5, 1.0, 1e-4)
    even, own = (made(x, "keys", weights=w, outliers=0.0) for w in (None, weights))
    assert np.sum(own.levels[0] > 0.5) > 2 * np.sum(even.levels[0] > 0.5)

    def cost(found: Nuq) -> float:
        decoded = nuq.decode(found, 0, nuq.encode(found, 0, x, start=1))
        return float(np.sum(weights * np.square(decoded - x)))

    assert cost(own) < 0.3 * cost(even)


def test_q_norm_restores_mean_and_deviation() -> None:
    x = np.random.default_rng(2).standard_normal((1, 5000, 8)).astype(np.float32)
    plain, moved = (made(x, "keys", 2, q_norm=q) for q in (False, True))
    np.testing.assert_array_equal(plain.edges, moved.edges)
    deviations = []
    for found in (plain, moved):
        codes = nuq.encode(found, 0, x, start=1)
        inside = ~codes.outliers
        decoded = nuq.decode(found, 0, codes)
        deviations.append(decoded[inside].std() / x[inside].std())
    assert deviations[0] < 0.97
    assert deviations[1] == pytest.approx(1, abs=0.01)


def test_tokens_have_their_own_range() -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((2, 50, 64)) * np.geomspace(0.01, 100, 50)[None, :, None]
    x[0, :, 3] *= 30
    apart = nuq.token_outliers(x, 0.01)
    assert np.all(apart.sum(axis=(0, 2)) == 2)  # one at either end of 128 numbers
    found = made(x, "values")
    decoded = nuq.decode(found, 0, nuq.encode(found, 0, x))
    relative = np.square(decoded - x).sum(axis=(0, 2)) / np.square(x).sum(axis=(0, 2))
    assert relative[1:].max() < 0.1
    assert not nuq.token_outliers(x, 0.0).any()


def test_exact_tokens_are_those_at_the_start() -> None:
    x = planted()[:, :10]
    found = made(planted(), "keys")
    for start, exact in ((0, 1), (1, 0), (100, 0)):
        codes = nuq.encode(found, 0, x, start)
        assert codes.exact.shape[1] == exact
        assert codes.codes.shape[1] == 10 - exact


def test_bad_input_is_one_line() -> None:
    with pytest.raises(CalibrationError, match="not finite"):
        nuq.fit_layer(np.full((1, 100, 4), np.inf), None, 3, axis="channel")
    with pytest.raises(CalibrationError, match="samples"):
        nuq.fit_layer(np.zeros((1, 2, 4)), None, 8, axis="channel")
    flat = nuq.fit_layer(np.zeros((1, 100, 4)), np.zeros((1, 100, 4)), 3, axis="channel")
    assert np.all(flat.high > flat.low)


def test_trained_model_held_out(demo: Any) -> None:
    """Calibrated on other text, 3 bits with outliers against plain rounding at as many bits."""
    artifacts = nuq.calibrate(demo.streaming(), demo.tokens[:2], demo.traces, 3, window=28)
    again = nuq.calibrate(demo.streaming(), demo.tokens[:2], demo.traces, 3, window=28)
    keys, values = artifacts
    assert (keys.part, keys.before_rope, keys.axis) == ("keys", True, "channel")
    assert (values.part, values.before_rope, values.axis) == ("values", False, "token")
    for a, b in zip(artifacts, again, strict=True):
        assert a.to_tensors().keys() == b.to_tensors().keys()
        assert all(np.array_equal(t, b.to_tensors()[n]) for n, t in a.to_tensors().items())
    errors: dict[str, list[float]] = {
        "keys": [],
        "values": [],
        "plain keys": [],
        "plain values": [],
    }
    bits: dict[str, list[float]] = {"keys": [], "values": []}

    def hook(c: Any) -> None:
        for found, x in ((keys, np.array(c.keys_before)), (values, np.array(c.values))):
            codes = nuq.encode(found, found.layers.index(c.layer), x)
            bits[found.part].append(codes.bits_per_element(3))
            decoded = nuq.decode(found, found.layers.index(c.layer), codes)
            mean = demo.statistics[c.layer].part(found.part)[0].mean[:, None]
            size = np.square((x - mean)[:, 4:]).sum()
            for name, y in ((found.part, decoded), (f"plain {found.part}", affine(x, 3))):
                errors[name].append(float(np.square((y - x)[:, 4:]).sum() / size))

    demo.streaming().run(demo.heldout, hook)
    mean = {name: np.mean(e) for name, e in errors.items()}
    assert np.mean(bits["keys"]) < 3.5
    assert np.mean(bits["values"]) < 3.8
    assert mean["keys"] < 0.7 * mean["plain keys"]
    assert mean["values"] < mean["plain values"]
