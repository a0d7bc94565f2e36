"""Bases find planted directions, and real keys: a plain rotation must lose at equal bits."""

import os
import subprocess
import sys
from typing import Any

import mlx.core as mx
import numpy as np

from velox_pack.calibrators import spectral
from velox_pack.calibrators.stream import Captured
from velox_pack.calibrators.waterfill import error, widths
from velox_pack.kernels import make_rotation, rotate


def test_planted_directions_are_found_in_order_and_sign() -> None:
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.standard_normal((8, 8)))[0]
    variance = 2.0 ** -np.arange(8)
    covariance = (basis * variance) @ basis.T
    found, values = spectral.eigenbasis(covariance[None])
    np.testing.assert_allclose(values[0], variance, atol=1e-12)
    np.testing.assert_allclose(np.abs(found[0].T @ basis), np.eye(8), atol=1e-10)
    assert np.all(np.take_along_axis(found[0], np.abs(found[0]).argmax(axis=0)[None], 0) > 0)
    again, _ = spectral.eigenbasis((covariance + 0.0)[None])
    assert again.tobytes() == found.tobytes()


def test_norm_codes_cover_the_sample_with_room() -> None:
    x = np.random.default_rng(0).standard_normal((2, 100, 16)) * 5
    low, step = spectral.norm_range(x)
    norms = np.linalg.norm(x, axis=-1)
    assert np.exp(low) < norms.min() / 1.99
    assert np.exp(low + 255 * step) > norms.max() * 1.99
    assert step < 0.02  # 1 % of the norm at most
    assert np.all(np.isfinite(spectral.norm_range(np.zeros((1, 4, 8)))))


def test_trained_keys_before_rope_are_cheaper_in_their_own_basis(demo: Any) -> None:
    """On held-out text; and after RoPE the advantage shrinks, which is why it is undone."""
    (keys,) = spectral.fit(demo.statistics, "keys")
    assert keys.before_rope
    keys.to_tensors()
    (values,) = spectral.fit(demo.statistics, "values")
    assert not values.before_rope
    ratios: dict[str, list[float]] = {"before": [], "after": []}

    def spread_of(x: np.ndarray, mean: np.ndarray, basis: np.ndarray) -> np.ndarray:
        return np.square((x - mean[:, None]) @ basis).mean(axis=1)

    def hook(c: Captured) -> None:
        layer = demo.statistics[c.layer]
        d = c.keys.shape[-1]
        hadamard = np.array(rotate(mx.eye(d), make_rotation(d, 0)))
        after, variance = spectral.eigenbasis(layer.keys.covariance)
        for name, x, moments, basis, table in (
            ("before", c.keys_before, layer.keys_before, keys.basis, keys.variance),
            ("after", c.keys, layer.keys, after[None], variance[None]),
        ):
            n = keys.layers.index(c.layer) if name == "before" else 0
            own = spread_of(np.array(x)[:, 4:], moments.mean, basis[n].astype(np.float64))
            plain = spread_of(np.array(x)[:, 4:], moments.mean, hadamard)
            given, _ = widths(table[n], 3.0)
            equal = np.full(d, 3, np.uint8)
            ratios[name].append(float(np.mean(error(own, given) / error(plain, equal))))

    demo.streaming().run(demo.heldout, hook)
    assert np.mean(ratios["before"]) < 0.65
    assert np.mean(ratios["before"]) < 0.9 * np.mean(ratios["after"])


_HASH = """
import hashlib, numpy as np
from velox_pack.calibrators import spectral
x = np.random.default_rng(0).standard_normal((4, 200, 64))
basis, variance = spectral.eigenbasis(np.swapaxes(x, 1, 2) @ x)
print(hashlib.sha256(basis.tobytes() + variance.tobytes()).hexdigest())
"""


def test_threads_do_not_change_the_bytes() -> None:
    digests = set()
    for threads in ("1", "2"):
        env = os.environ | {"OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads}
        command = [sys.executable, "-c", _HASH]
        digests.add(subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE).stdout)
    assert len(digests) == 1
