"""Merging directions of two layers, as they are and brought into one basis."""

from typing import Any

import numpy as np
import pytest

from token_samples import made, of_demo, rows_of
from velox_pack.calibrators import minicache
from velox_pack.manifests.errors import CalibrationError


def pair(seed: int) -> list[np.ndarray]:
    """Layers 2 and 3 the same but for a rotation across heads, lengths and a little noise."""
    rng, fixed = np.random.default_rng(seed), np.random.default_rng(9)
    q, _ = np.linalg.qr(fixed.standard_normal((64, 64)))
    x = rng.standard_normal((4, 512, 64)) * np.linspace(2, 0.5, 64)
    x[3] = (x[2] + 0.1 * rng.standard_normal((512, 64))) @ q * rng.uniform(0.5, 2, (512, 1))
    return [v.reshape(512, 2, 32).transpose(1, 0, 2) for v in x]


def test_planted_rotation_is_undone_and_plain_merging_loses() -> None:
    aligned, plain = (minicache.fit(made(pair(0)), "values", align=a)[0] for a in (True, False))
    assert aligned.partner.tolist() == [-1, -1, -1, 2]
    assert plain.partner.tolist() == [-1] * 4
    assert aligned.error[3] < 0.05 < 0.4 < plain.error[3]
    before, x = pair(1)[2:]
    merged, lengths, apart = minicache.encode(aligned, 3, before, x)
    decoded = minicache.decode(aligned, 3, merged, lengths)
    assert minicache.pair_error((before, x), decoded) < 0.05
    np.testing.assert_allclose(np.linalg.norm(merged, axis=-1), 1)
    assert 0.01 < apart.mean() < 0.15


def test_layers_that_are_alike_merge_without_alignment() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 256, 32))
    layers = [x, x, x, 2 * x + 0.1 * rng.standard_normal(x.shape)]
    (found,) = minicache.fit(made(layers), "keys", align=False)
    assert found.partner.tolist() == [-1, -1, -1, 2]
    assert found.similarity[3].min() > 0.99
    first, second = minicache.decode(found, 3, *minicache.encode(found, 3, x, layers[3])[:2])
    assert minicache.pair_error((x, layers[3]), (first, second)) < 0.01


def test_interpolation_on_the_sphere() -> None:
    a, b = np.random.default_rng(0).standard_normal((2, 10, 8))
    for t, end in ((0.0, a), (1.0, b)):
        np.testing.assert_allclose(
            minicache.merge(a, b, t), end / np.linalg.norm(end, axis=1, keepdims=True)
        )
    third = minicache.merge(a, b, 1 / 3)
    cosine = [np.sum(third * v / np.linalg.norm(v, axis=1, keepdims=True), axis=1) for v in (a, b)]
    np.testing.assert_allclose(2 * minicache.angular(cosine[0]), minicache.angular(cosine[1]))
    np.testing.assert_allclose(minicache.merge(a, a, 0.3), minicache.merge(a, 2 * a, 0.9))


def test_trained_neighbours_are_alike_only_after_alignment(demo: Any) -> None:
    tokens, held, _ = of_demo(demo)
    for part in ("keys", "values"):
        plain = minicache.fit(tokens, part, align=False)
        aligned = minicache.fit(tokens, part)
        assert max(np.abs(a.similarity).mean() for a in plain) < 0.2
        assert min(a.similarity[1:].mean() for a in aligned) > 0.5
        (a, n) = rows_of(aligned)[4]
        assert a.partner[n] == 3
        x = [held[i].part(part).astype(np.float64) for i in (3, 4)]
        merged, lengths, _ = minicache.encode(a, n, *x)
        assert minicache.pair_error((x[0], x[1]), minicache.decode(a, n, merged, lengths)) < 0.2


def test_shares() -> None:
    with pytest.raises(CalibrationError, match="t is 2"):
        minicache.fit(made(pair(0)), "keys", t=2)
