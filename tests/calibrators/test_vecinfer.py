"""Smoothing saves planted outlier channels, k-means finds planted clusters, trained keys gain."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from velox_pack.calibrators import product_quantizer, vecinfer
from velox_pack.calibrators.capture import LayerStatistics, Moments
from velox_pack.calibrators.codebooks import lloyd_max
from velox_pack.calibrators.product_quantizer import kmeans, nearest
from velox_pack.calibrators.stream import Captured
from velox_pack.calibrators.trace import LayerTrace
from velox_pack.calibrators.vecinfer import PAPER, Options
from velox_pack.calibrators.vector_tools import half_precision, query_power
from velox_pack.kernels import make_rotation, rotate
from velox_pack.manifests.errors import CalibrationError


def moments(x: np.ndarray) -> Moments:
    wide = x.astype(np.float64)
    return Moments(
        x.shape[1], wide.sum(axis=1), np.swapaxes(wide, 1, 2) @ wide, np.abs(wide).max(axis=1)
    )


def statistics(keys: np.ndarray, queries: np.ndarray) -> LayerStatistics:
    """A layer without RoPE whose keys are given, [H, S, D] float32."""
    return LayerStatistics(
        index=0,
        rotated=False,
        queries=moments(queries),
        keys=moments(keys),
        keys_before=moments(keys),
        values=moments(keys),
        sample_keys=keys,
        sample_keys_before=keys,
        sample_values=keys,
        sample_sequences=np.zeros(keys.shape[:2], int),
        sample_positions=np.zeros(keys.shape[:2], int),
    )


TRACES = [LayerTrace(0, "full", heads=4, kv_heads=2, k_dim=32, v_dim=32)]


def test_kmeans_finds_planted_clusters() -> None:
    """k-means++ finds all 32; a choice of points at random would leave some out."""
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((32, 4)) * 10
    points = centres[rng.integers(32, size=3000)] + 0.05 * rng.standard_normal((3000, 4))
    found = kmeans(points, 32, seed=0)
    error = np.square(points - found[nearest(points, found)]).sum(axis=1).mean()
    assert error < 4 * 0.05**2 * 1.5
    drawn = points[rng.choice(len(points), 32, replace=False)]
    for _ in range(30):
        owner = nearest(points, drawn)
        drawn = product_quantizer._means(points, owner, drawn)
    # The seeding's merit: plain Lloyd from random points is stuck (or as good at the very best).
    assert error <= np.square(points - drawn[nearest(points, drawn)]).sum(axis=1).mean() * 1.01


def test_kmeans_with_few_distinct_points_and_with_too_few() -> None:
    points = np.repeat(np.arange(3.0)[:, None], 10, axis=0)
    found = kmeans(points, 5, seed=0)
    assert np.all(np.isfinite(found))
    assert np.square(points - found[nearest(points, found)]).sum() == 0
    with pytest.raises(CalibrationError, match="at least 31 vectors, got 30"):
        kmeans(points, 31, seed=0)
    with pytest.raises(CalibrationError, match="NaN"):
        kmeans(points * np.nan, 2, seed=0)


@pytest.mark.parametrize("sharing", ["layer", "head", "subspace"])
@pytest.mark.parametrize(("sub", "bits"), [(2, 4), (4, 5), (8, 8)])
def test_codes_round_trip_and_name_the_nearest(sub: int, bits: int, sharing: Any) -> None:
    rows = np.random.default_rng(0).standard_normal((2, 300, 16))
    books = product_quantizer.fit(rows, sub, bits, sharing, 0)
    heads, parts = {"layer": (1, 1), "head": (2, 1), "subspace": (2, 16 // sub)}[sharing]
    assert books.shape == (heads, parts, 2**bits, sub)
    codes = product_quantizer.encode(rows, books)
    assert codes.shape == (2, 300, 16 // sub)
    assert codes.max() < 2**bits
    decoded = product_quantizer.decode(codes, books)
    np.testing.assert_array_equal(product_quantizer.encode(decoded, books), codes)
    h, n, g = 1, 17, 16 // sub - 1
    own = books[h % heads, g % parts]
    part = rows[h, n, g * sub : (g + 1) * sub]
    assert codes[h, n, g] == np.square(own - part).sum(axis=1).argmin()
    assert np.square(decoded - rows).sum() < np.square(rows).sum()


def outliers(rng: np.random.Generator, n: int) -> np.ndarray:
    """Keys whose channels 3 and 20 are 40 times the others, and which queries hardly use."""
    keys = rng.standard_normal((2, n, 32))
    keys[:, :, [3, 20]] *= 40
    return keys.astype(np.float32)


def logit_error(queries: np.ndarray, keys: np.ndarray, decoded: np.ndarray) -> float:
    grouped = queries.reshape(2, -1, 32)
    return float(np.square(grouped @ np.swapaxes(keys - decoded, 1, 2)).mean())


def test_smoothing_saves_outlier_channels() -> None:
    rng = np.random.default_rng(0)
    queries = rng.standard_normal((4, 500, 32)).astype(np.float32)
    queries[:, :, [3, 20]] /= 20
    layer = statistics(outliers(rng, 2000), queries)
    x = outliers(rng, 200).astype(np.float64)
    errors = {}
    for smoothing in ("none", "maxima", "balanced"):
        options = Options(smoothing=smoothing, sharing="head")
        (artifact,) = vecinfer.fit({0: layer}, TRACES, "keys", sub=4, bits=8, options=options)
        decoded = vecinfer.decode(artifact, 0, vecinfer.encode(artifact, 0, x))
        errors[smoothing] = logit_error(queries, x, decoded)
    errors["levels"] = logit_error(queries, x, rotated_levels(x, np.zeros(32), 2))
    assert errors["maxima"] < 0.5 * errors["none"]
    assert errors["balanced"] < 0.6 * errors["maxima"]
    assert errors["balanced"] < 0.1 * errors["levels"]


def test_factors_are_those_of_the_formula() -> None:
    rng = np.random.default_rng(0)
    queries = rng.standard_normal((4, 500, 32)).astype(np.float32)
    layer = statistics(outliers(rng, 400), queries)

    def smoothing(options: Options) -> np.ndarray:
        (artifact,) = vecinfer.fit({0: layer}, TRACES, "keys", bits=4, options=options)
        return np.asarray(artifact.smoothing[0])

    np.testing.assert_allclose(smoothing(PAPER), np.sqrt(layer.keys.largest), rtol=1e-6)
    assert np.all(smoothing(Options(smoothing="none")) == 1)
    spread = layer.sample_keys.astype(np.float64).std(axis=1)
    grouped = queries.reshape(2, -1, 32).astype(np.float64)
    expected = np.sqrt(spread / np.sqrt(np.square(grouped).mean(axis=1)))
    np.testing.assert_allclose(smoothing(Options()), expected, rtol=1e-5)
    (values,) = vecinfer.fit({0: layer}, TRACES, "values", bits=4, options=PAPER)
    assert np.all(values.smoothing == 1)


def test_dead_channels_and_unused_queries_are_survived() -> None:
    rng = np.random.default_rng(0)
    keys, queries = outliers(rng, 400), rng.standard_normal((4, 100, 32)).astype(np.float32)
    keys[:, :, 5], queries[:, :, 6] = 0, 0
    keys[1] = 0
    layer = statistics(keys, queries)
    for options in (Options(), PAPER):
        (artifact,) = vecinfer.fit({0: layer}, TRACES, "keys", bits=4, options=options)
        artifact.to_tensors()
        decoded = vecinfer.decode(artifact, 0, vecinfer.encode(artifact, 0, keys))
        assert np.abs(decoded[1]).max() < 0.05


def test_query_power_is_that_of_pairs(demo: Any) -> None:
    layer, trace = demo.statistics[0], demo.traces[0]
    assert trace.rope is not None
    assert not trace.rope.traditional
    plain, paired = query_power(layer, None), query_power(layer, trace)
    np.testing.assert_allclose(paired[:, :32], paired[:, 32:], rtol=1e-12)
    np.testing.assert_allclose(paired.sum(axis=1), plain.sum(axis=1), rtol=1e-12)


def rotated_levels(x: np.ndarray, mean: np.ndarray, bits: int) -> np.ndarray:
    """TurboQuant's way: mean and norm apart, rotation, Lloyd-Max levels."""
    d = x.shape[-1]
    rotation = np.array(rotate(mx.eye(d), make_rotation(d, 0)))
    norm = np.linalg.norm(x - mean, axis=-1, keepdims=True) / np.sqrt(d)
    levels = lloyd_max(bits)[0]
    codes = np.searchsorted((levels[1:] + levels[:-1]) / 2, (x - mean) @ rotation / norm)
    return np.asarray(levels[codes] * norm @ rotation.T + mean)


@pytest.mark.parametrize(
    ("part", "sub", "bits", "limit"),
    [("keys", 4, 8, 0.75), ("keys", 2, 6, 0.8), ("values", 4, 8, 0.9)],
)
def test_trained_rows_beat_rotated_levels_at_equal_bits(
    part: str, sub: int, bits: int, limit: float, demo: Any
) -> None:
    """Held out, at 2 or 3 bits and a scale a row on both sides."""
    options = Options(sharing="head")
    (artifact,) = vecinfer.fit(
        demo.statistics, demo.traces, part, sub=sub, bits=bits, options=options
    )
    assert vecinfer.bits_per_element(artifact) == bits / sub + 8 / 64
    ratios: list[float] = []

    def hook(c: Captured) -> None:
        layer = demo.statistics[c.layer]
        x = np.array(c.keys_before if part == "keys" else c.values, np.float64)[:, 4:]
        decoded = vecinfer.decode(artifact, c.layer, vecinfer.encode(artifact, c.layer, x))
        plain = rotated_levels(x, layer.part(part)[0].mean[:, None], bits // sub)
        power = query_power(layer, demo.traces[c.layer])[:, None] if part == "keys" else 1.0
        mine, other = ((np.square(y - x) * power).sum() for y in (decoded, plain))
        ratios.append(mine / other)

    demo.streaming().run(demo.heldout, hook)
    assert np.mean(ratios) < limit


def test_unknown_options_and_sizes_are_refused(demo: Any) -> None:
    few = {0: demo.statistics[0]}
    with pytest.raises(ValueError, match="smoothing is 'max'"):
        Options(smoothing="max")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="sharing is 'all'"):
        Options(sharing="all")  # type: ignore[arg-type]
    for sub, bits in ((3, 8), (16, 8), (4, 3), (4, 9)):
        with pytest.raises(CalibrationError, match="sub vectors of"):
            vecinfer.fit(few, demo.traces, "keys", sub=sub, bits=bits)
    with pytest.raises(CalibrationError, match="part is 'queries'"):
        vecinfer.fit(few, demo.traces, "queries")
    with pytest.raises(CalibrationError, match="beyond float16"):
        half_precision(np.array([1e5]), "codebooks")
