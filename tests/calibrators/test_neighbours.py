"""The same tokens of all layers, within a budget."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from token_samples import of_demo
from velox_pack.calibrators import neighbours
from velox_pack.manifests.errors import CalibrationError


def test_rows_are_the_tokens_that_attention_saw(demo: Any) -> None:
    tokens, _, _ = of_demo(demo)
    seen: dict[tuple[int, int], Any] = {}
    mx.eval(
        demo.streaming().run(demo.tokens[:1], lambda c: seen.update({(c.layer, c.sequence): c}))
    )
    assert list(tokens) == [t.index for t in demo.traces]
    for layer, own in tokens.items():
        captured = seen[layer, 0]
        first = own.sequences == 0
        rows = own.positions[first]
        np.testing.assert_array_equal(own.keys[:, first], np.array(captured.keys_before)[:, rows])
        np.testing.assert_array_equal(own.values[:, first], np.array(captured.values)[:, rows])
        after = own.part("keys", before_rope=False)[:, first]
        np.testing.assert_allclose(after, np.array(captured.keys)[:, rows], atol=2e-4)
        assert own.positions.min() >= 4
        assert np.all(np.diff(own.positions.reshape(-1, own.run), axis=1) == 1)


def test_budget_bounds_what_is_held(demo: Any) -> None:
    bytes_of_token = sum(4 * t.kv_heads * (t.k_dim + t.v_dim) for t in demo.traces)
    budget = 300 * bytes_of_token
    found = neighbours.collect(demo.streaming(), demo.tokens, demo.traces, budget=budget)
    held = sum(t.keys.nbytes + t.values.nbytes for t in found.values())
    assert budget / 2 < held <= budget
    assert {int(s) for s in found[0].sequences} == {0, 1, 2, 3}


@pytest.mark.parametrize(("length", "expected"), [(512, 64), (40, 36), (5, 1)])
def test_short_sequences_make_short_runs(length: int, expected: int) -> None:
    rows, run = neighbours.sample_runs(2, length, tokens=10**6, run=64, skip_first=4)
    assert run == expected
    assert rows.max() < length
    assert len(rows) == (length - 4) // run * run


def test_no_token_left() -> None:
    with pytest.raises(CalibrationError, match="too short"):
        neighbours.sample_runs(2, 4, tokens=100, run=64, skip_first=4)
