from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from velox_pack.manifests import strict_json

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**62), 2**62)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=12,
)


@given(VALUES)
def test_round_trip_and_one_form(value: object) -> None:
    data = strict_json.dumps(value)
    assert strict_json.loads(data) == value
    assert strict_json.dumps(strict_json.loads(data)) == data
    assert data.endswith(b"\n")


def test_keys_are_sorted_and_text_stays_text() -> None:
    assert strict_json.dumps({"b": 1, "a": "ä"}) == '{\n  "a": "ä",\n  "b": 1\n}\n'.encode()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"a": 1, "a": 2}', "key 'a' twice"),
        (b'{"x": {"a": 1, "b": 0, "a": 1}}', "key 'a' twice"),
        (b"[NaN]", "NaN"),
        (b"[-Infinity]", "-Infinity"),
        (b"[1e999]", "overflows"),
        (b"[" + b"9" * 5000 + b"]", "overflows"),
        (b"[" * 33 + b"]" * 33, "nests deeper than 32"),
        (b"[" * 200_000, "nests deeper than 32"),
        (b'{"a":' * 100_000, "nests deeper than 32"),
        (rb'["\ud800"]', "surrogate"),
        (rb'{"\udfff": 1}', "surrogate"),
        (b"\xff", "not UTF-8"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        (b"{} {}", "not JSON"),
        (b"", "not JSON"),
        (b"{'a': 1}", "not JSON"),
    ],
)
def test_refused(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        strict_json.loads(data)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), [float("inf")], {"a": object()}])
def test_not_written(value: object) -> None:
    with pytest.raises(ValueError):
        strict_json.dumps(value)
