"""Codes commute with RoPE, planted sums of entries are found, and trained keys cost fewer bits."""

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from velox_pack.calibrators import additive_em, commvq
from velox_pack.calibrators.codebooks import lloyd_max
from velox_pack.calibrators.stream import Captured
from velox_pack.calibrators.trace import LayerTrace, RopeSpec
from velox_pack.kernels import apply_rope, make_rotation, rotate
from velox_pack.manifests.artifacts_vector import CommVQ, rope_pairs
from velox_pack.manifests.errors import CalibrationError

POSITIONS = np.array([0, 1, 2, 63, 1024, 4095, 32_768, 65_537, 99_999, 100_000])


def random_artifact(width: int, dims: int, traditional: bool) -> CommVQ:
    rng = np.random.default_rng(width + dims)
    first, second = rope_pairs(width, dims, traditional)
    weight = np.ones((1, 2, width), np.float32)
    weight[..., first] = weight[..., second] = rng.random((1, 2, width // 2)) + 0.5
    return CommVQ(
        dims=dims,
        traditional=traditional,
        mean=rng.standard_normal((1, 2, width)).astype(np.float32),
        weight=weight,
        codebooks=rng.standard_normal((1, 2, 6, 8, width)).astype(np.float16),
        log_scale=np.array([[-1.0, 0.01]], np.float32),
        layers=(0,),
    )


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize(("width", "dims"), [(64, 64), (64, 32), (96, 40), (256, 256), (64, 0)])
def test_rotating_before_and_after_decoding_is_the_same(
    width: int, dims: int, traditional: bool
) -> None:
    artifact = random_artifact(width, dims, traditional)
    rng = np.random.default_rng(1)
    entry = rng.integers(0, 8, (2, len(POSITIONS), 6, 2)).astype(np.uint8)
    codes = commvq.Codes(entry, rng.integers(0, 200, (2, len(POSITIONS))).astype(np.uint8))
    inv_freq = 10_000.0 ** (-np.arange(dims // 2) / max(1, dims // 2))
    angle = POSITIONS[:, None] * inv_freq
    cos, sin = np.cos(angle), np.sin(angle)
    key = commvq.decode(artifact, 0, codes)
    first, second = (i[: dims // 2] for i in rope_pairs(width, dims, traditional))
    turned = key.copy()
    turned[..., first] = key[..., first] * cos - key[..., second] * sin
    turned[..., second] = key[..., first] * sin + key[..., second] * cos
    found = commvq.decode_turned(artifact, 0, codes, cos, sin)
    np.testing.assert_allclose(found, turned, rtol=0, atol=1e-13 * np.abs(turned).max() * 10)
    if dims:  # and the kernel that caches rotate with says the same, to float32
        tables = mx.array(cos.astype(np.float32)), mx.array(sin.astype(np.float32))
        kernel = apply_rope(mx.array(key.astype(np.float32))[None], *tables, traditional)
        np.testing.assert_allclose(np.array(kernel)[0], found, rtol=0, atol=2e-5)
        assert np.abs(found - key).max() > 1  # the rotation did something


def test_codes_of_unequal_weights_would_not_commute() -> None:
    artifact = random_artifact(8, 8, False)
    wrong = artifact.weight + np.arange(8, dtype=np.float32)
    with pytest.raises(ValueError, match="within a pair"):
        CommVQ(8, False, artifact.mean, wrong, artifact.codebooks, artifact.log_scale, layers=(0,))


def planted(rng: np.random.Generator, n: int) -> np.ndarray:
    """Vectors that are sums of two stages of entries, with a little noise, complex [n, 16]."""
    books = rng.standard_normal((2, 8, 16)) + 1j * rng.standard_normal((2, 8, 16))
    books[1] *= 0.3
    codes = rng.integers(0, 8, (n, 2, 2))
    z = sum(books[m, codes[:, m, 0]] + 1j * books[m, codes[:, m, 1]] for m in range(2))
    noise = rng.standard_normal((n, 16)) + 1j * rng.standard_normal((n, 16))
    return np.asarray(z + 0.01 * noise)


def test_planted_codebooks_are_found_again() -> None:
    """The entries themselves, by EM of the first stage; scalar levels at equal bits lose."""
    rng = np.random.default_rng(0)
    z = planted(rng, 3000)
    books = additive_em.fit_codebooks(z[:2000], 2, 8, 0, beam=4)
    _, left = additive_em.search(z[2000:], books, 4)
    error = np.square(np.abs(left)).sum() / np.square(np.abs(z[2000:])).sum()
    # 12 bits for 32 coordinates: rate distortion of white noise is 2 ** (-2 * 12 / 32) = 0.59.
    assert error < 0.1
    plain = 1 - 2 / np.pi  # a sign for each coordinate already costs 32 bits
    assert error < plain / 3


def test_each_hard_step_lowers_the_error() -> None:
    z = planted(np.random.default_rng(1), 500)
    rng = np.random.Generator(np.random.PCG64(0))
    c = z[rng.choice(len(z), 8, replace=False)] / np.sqrt(2)
    errors = []
    for _ in range(6):
        codes, left = additive_em.search(z, c[None], 1)
        errors.append(np.square(np.abs(left)).sum())
        a, b = np.eye(8)[codes[:, 0, 0]], np.eye(8)[codes[:, 0, 1]]
        u = a + 1j * b
        c = np.linalg.lstsq(u, z, rcond=None)[0]
    assert np.all(np.diff(errors) <= 1e-9)


@pytest.mark.parametrize("variance", [5.0, 0.5, 0.01])
def test_factored_posterior_is_that_of_all_codes(variance: float) -> None:
    """Also where the variance is so small that the factors vanish."""
    z = planted(np.random.default_rng(1), 300)
    c = z[:8] / np.sqrt(2)
    p_a, p_b, joint = additive_em._posterior(z, c, variance)
    centres = c[:, None] + 1j * c[None]
    d = np.square(np.abs(z[:, None, None] - centres)).sum(axis=-1)
    w = np.exp((d.min(axis=(1, 2), keepdims=True) - d) / (2 * variance))
    w /= w.sum(axis=(1, 2), keepdims=True)
    np.testing.assert_allclose(p_a, w.sum(axis=2), atol=1e-10)
    np.testing.assert_allclose(p_b, w.sum(axis=1), atol=1e-10)
    np.testing.assert_allclose(joint, w.sum(axis=0), atol=1e-7)


def test_search_finds_at_least_what_greedy_finds() -> None:
    z = planted(np.random.default_rng(2), 400)
    books = additive_em.fit_codebooks(z, 3, 4, 0, beam=1)
    errors = [np.square(np.abs(additive_em.search(z, books, w)[1])).sum() for w in (1, 4, 4096)]
    assert errors[0] > errors[1] >= errors[2]
    codes, left = additive_em.search(z, books, 4)
    again = sum(books[m, codes[:, m, 0]] + 1j * books[m, codes[:, m, 1]] for m in range(3))
    np.testing.assert_allclose(z - again, left, atol=1e-12)


def test_trained_keys_beat_rotated_levels_at_equal_bits(demo: Any) -> None:
    """Held-out text; the mean is off on both sides, so that is not the reason."""
    few = {i: demo.statistics[i] for i in sorted(demo.statistics)[:2]}
    (artifact,) = commvq.fit(few, demo.traces, bits=2.0, entries=8)
    assert commvq.bits_per_element(artifact) <= 2.0
    ratios: list[float] = []

    def hook(c: Captured) -> None:
        if c.layer not in few:
            return
        keys = np.array(c.keys_before, np.float64)[:, 4:]
        decoded = commvq.decode(artifact, c.layer, commvq.encode(artifact, c.layer, keys))
        mean = few[c.layer].keys_before.mean[:, None]
        weight = artifact.weight[artifact.layers.index(c.layer)][:, None].astype(np.float64)
        plain = rotated_levels(keys - mean, 2) + mean
        errors = [np.square((x - keys) * weight).sum() for x in (decoded, plain)]
        ratios.append(errors[0] / errors[1])
        assert np.square(decoded - keys).sum() < 0.2 * np.square(keys - mean).sum()

    demo.streaming().run(demo.heldout, hook)
    assert len(ratios) == 2
    assert max(ratios) < 0.6


def rotated_levels(centred: np.ndarray, bits: int) -> np.ndarray:
    """TurboQuant's way: norm apart (its bits not counted), rotation, Lloyd-Max levels."""
    d = centred.shape[-1]
    rotation = np.array(rotate(mx.eye(d), make_rotation(d, 0)))
    norm = np.linalg.norm(centred, axis=-1, keepdims=True) / np.sqrt(d)
    levels = lloyd_max(bits)[0]
    codes = np.searchsorted((levels[1:] + levels[:-1]) / 2, centred @ rotation / norm)
    return np.asarray(levels[codes] * norm @ rotation.T)


def test_same_input_same_bytes(demo: Any) -> None:
    few = {0: demo.statistics[0]}
    once, again = (commvq.fit(few, demo.traces, bits=0.5, entries=8)[0] for _ in range(2))
    for role, tensor in once.to_tensors().items():
        assert tensor.tobytes() == again.to_tensors()[role].tobytes()


@pytest.mark.parametrize("dims", [0, 16])
def test_layers_that_rope_turns_in_part_or_not_at_all(demo: Any, dims: int) -> None:
    rope = RopeSpec(dims, False, tuple(1.0 / (i + 1) for i in range(dims // 2))) if dims else None
    traces = [replace(demo.traces[0], rope=rope)]
    (found,) = commvq.fit({0: demo.statistics[0]}, traces, bits=0.5, entries=8)
    assert found.dims == dims
    keys = demo.statistics[0].sample_keys_before[:, :256]
    decoded = commvq.decode(found, 0, commvq.encode(found, 0, keys))
    centred = keys - found.mean[0][:, None]
    assert np.square(decoded - keys).mean() < 0.7 * np.square(centred).mean()


def test_what_cannot_be_fitted_is_refused(demo: Any) -> None:
    few = {0: demo.statistics[0]}
    with pytest.raises(CalibrationError, match="entries is 5"):
        commvq.fit(few, demo.traces, entries=5)
    with pytest.raises(CalibrationError, match="at least 4096 vectors"):
        commvq.fit(few, demo.traces, entries=64)
    with pytest.raises(CalibrationError, match="stages"):
        commvq.fit(few, demo.traces, bits=0.01)
    odd = [LayerTrace(0, "full", rope=RopeSpec(31, False, ()))]
    with pytest.raises(CalibrationError, match="no pairs"):
        commvq.fit(few, odd)
    with pytest.raises(CalibrationError, match="NaN"):
        additive_em.fit_codebooks(np.full((20, 2), np.nan + 0j), 1, 4, 0, beam=1)
