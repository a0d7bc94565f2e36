from pathlib import Path
from typing import Any

import numpy as np
import pytest

from velox_pack.calibrators.text import load_text, sequences, whole_tiles
from velox_pack.manifests.errors import CalibrationError


class Bytes:
    """A tokenizer: one token a byte, and one in front."""

    def encode(self, text: str) -> list[int]:
        return [256, *text.encode()]


TEXT = " ".join(f"word{i}" for i in range(4000))


def test_sequences_come_from_the_whole_text_and_depend_on_the_seed_alone() -> None:
    rows = sequences(Bytes(), TEXT, 1000, 100, seed=0)
    assert rows.shape == (10, 100)
    assert rows.dtype == np.int32
    assert np.all(rows[:, 0] == 256)
    starts = [TEXT.index(bytes(r[1:].astype(np.uint8)).decode()) for r in rows]
    stretch = len(TEXT) // 10
    assert [s // stretch for s in starts] == list(range(10))  # one from each stretch: no overlap
    assert all(TEXT[s - 1] == " " for s in starts if s)  # at the start of a word
    np.testing.assert_array_equal(rows, sequences(Bytes(), TEXT, 1000, 100, seed=0))
    assert not np.array_equal(rows, sequences(Bytes(), TEXT, 1000, 100, seed=1))
    assert sequences(Bytes(), TEXT, 1050, 100, seed=0).shape == (10, 100)


def test_a_text_that_just_suffices_is_used_up() -> None:
    assert sequences(Bytes(), TEXT, len(TEXT) // 1000 * 990, 990, seed=0).shape[1] == 990


def test_lengths_in_whole_tiles() -> None:
    lengths = (512, 511, 64, 63, 32, 31, 1)
    assert [whole_tiles(n) for n in lengths] == [512, 480, 64, 32, 32, 31, 1]


@pytest.mark.parametrize(
    ("tokens", "length", "positions", "message"),
    [
        (10**6, 100, None, "text is too short"),
        (50, 100, None, "no sequence of 100"),
        (1000, 100, 64, "longer than the model's 64 positions"),
    ],
)
def test_impossible_wishes(tokens: int, length: int, positions: Any, message: str) -> None:
    with pytest.raises(CalibrationError, match=message) as caught:
        sequences(Bytes(), TEXT, tokens, length, seed=0, max_positions=positions)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file"),
        (b"", "is empty"),
        (b" \n\n ", "is empty"),
        (b"short", "too short"),
        (b"\xff\xfe\x00binary" * 1000, "binary"),
        (b"nul \x00 inside " * 1000, "binary"),
    ],
)
def test_bad_files_are_one_line(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(CalibrationError, match=message) as caught:
        load_text(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(CalibrationError):
        load_text(tmp_path)


def test_good_files(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("\ufeff" + TEXT, encoding="utf-8")
    assert load_text(tmp_path / "t.txt") == TEXT
    assert len(load_text()) > 100_000
