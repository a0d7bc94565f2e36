"""The beam keeps exactly the best candidates, at any size; many stages fit into their columns."""

import numpy as np
import pytest

from velox_pack.calibrators import additive_em
from velox_pack.calibrators.additive_em import Beam, fit_codebooks, search


def complex_normal(*shape: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.standard_normal(shape) + 1j * rng.standard_normal(shape)


@pytest.mark.parametrize("width", [1, 2, 5, 40])
@pytest.mark.parametrize("entries", [4, 8])
def test_the_beam_keeps_the_best(width: int, entries: int) -> None:
    z, books = complex_normal(300, 6), complex_normal(3, entries, 6, seed=1)
    found = Beam(z, width)
    rest = z[:, None]
    for c in books:
        found.extend(c)
        # All candidates of all that was kept, by brute force.
        sums = (c[:, None] + 1j * c[None]).reshape(-1, 6)
        left = (rest[:, :, None] - sums).reshape(len(z), -1, 6)
        error = np.square(np.abs(left)).sum(axis=2)
        order = np.argsort(error, axis=1)[:, : min(width, error.shape[1])]
        best = np.take_along_axis(error, order, axis=1)
        np.testing.assert_allclose(np.sort(found.error, axis=1), best, rtol=1e-9)
        np.testing.assert_allclose(
            np.square(np.abs(found.rest)).sum(axis=2), found.error, rtol=1e-9, atol=1e-9
        )
        rest = np.take_along_axis(left, order[:, :, None], axis=1)
    codes, rest = found.best()
    added = sum(books[m, codes[:, m, 0]] + 1j * books[m, codes[:, m, 1]] for m in range(len(books)))
    np.testing.assert_allclose(added + rest, z, atol=1e-12)


def test_blocks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    z, books = complex_normal(301, 5), complex_normal(3, 8, 5, seed=1)
    codes, rest = search(z, books, 4)
    monkeypatch.setattr(additive_em, "_CANDIDATES", 1)  # one vector at a time
    again, left = search(z, books, 4)
    np.testing.assert_array_equal(again, codes)
    np.testing.assert_allclose(left, rest, atol=1e-12)


def test_more_than_255_entries_in_all() -> None:
    """20 stages of 16 entries, as keys of 128 coordinates and more have."""
    z = complex_normal(400, 16)
    books = fit_codebooks(z, 20, 16, 0, beam=2)
    fewer = fit_codebooks(z, 5, 16, 0, beam=2)
    error = [np.square(np.abs(search(z, b, 2)[1])).mean() for b in (fewer, books)]
    assert error[1] < 0.1 * error[0]
    assert np.all(np.isfinite(books))
