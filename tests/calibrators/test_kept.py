import mlx.core as mx
import numpy as np
import pytest

from velox_pack.calibrators.kept import Kept


def test_what_was_kept_last_comes_back_first_and_exactly() -> None:
    rng = np.random.default_rng(0)
    given = [rng.standard_normal(shape).astype(np.float32) for shape in ((2, 3, 4), (1, 5), (7,))]
    with Kept() as kept:
        for array in given[:2]:
            kept.append(mx.array(array))
        np.testing.assert_array_equal(np.array(kept.pop()), given[1])
        kept.append(mx.array(given[2]))  # over what was taken
        kept.append(mx.array(given[0]).transpose(2, 0, 1))
        np.testing.assert_array_equal(np.array(kept.pop()), given[0].transpose(2, 0, 1))
        for array in (given[2], given[0]):
            np.testing.assert_array_equal(np.array(kept.pop()), array)
        with pytest.raises(IndexError):
            kept.pop()
