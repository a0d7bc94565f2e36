"""Calibration text, and the token sequences taken from it."""

from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from velox_pack.manifests.errors import CalibrationError

SHORTEST = 2000  # characters

TILE = 32  # tokens; products of fewer rows are summed otherwise with one BLAS thread than with two
_ROOM = 12  # characters left for each token wanted when a place in a stretch is chosen


def load_text(path: Path | None = None) -> str:
    """The text of a UTF-8 file, or the built-in calibration text.

    Raises CalibrationError for a file that is missing, no file, binary, empty or too short.
    """
    if path is None:
        return (files("velox_pack") / "data" / "text" / "calibration.txt").read_text("utf-8")
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        raise CalibrationError(f"calibration text {path}: no such file") from None
    except OSError as error:
        raise CalibrationError(f"calibration text {path}: {error.strerror}") from None
    if not data.strip():
        raise CalibrationError(f"calibration text {path} is empty")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        raise CalibrationError(f"calibration text {path} is binary, not UTF-8 text")
    if len(text) < SHORTEST:
        raise CalibrationError(
            f"calibration text {path} is too short: {len(text)} characters, "
            f"at least {SHORTEST} are needed"
        )
    return text


def whole_tiles(length: int) -> int:
    """`length` tokens rounded down to a multiple of TILE, if there are as many."""
    return length - length % TILE if length >= TILE else length


def sequences(
    tokenizer: Any, text: str, tokens: int, length: int, seed: int, max_positions: int | None = None
) -> np.ndarray:
    """Token ids int32 [tokens // length, length], from stretches spread over the whole text.

    The text is divided into as many equal stretches as there are sequences; each sequence starts at
    the first word after a place in its stretch that the seed chooses, with the tokens that the
    tokenizer puts in front of a text. Stretches do not overlap. Raises CalibrationError if `length`
    is more than the model's positions, if there are fewer tokens than one sequence, or if the text
    is too short.
    """
    if length < 1 or tokens < length:
        raise CalibrationError(f"{tokens} calibration tokens make no sequence of {length}")
    if max_positions is not None and length > max_positions:
        raise CalibrationError(
            f"sequences of {length} tokens are longer than the model's {max_positions} positions"
        )
    count = tokens // length
    stretch = len(text) // count
    places = np.random.Generator(np.random.PCG64(seed)).random(count)
    rows = []
    for i, place in enumerate(places):
        part = text[i * stretch : (i + 1) * stretch]
        spare = max(0, len(part) - _ROOM * length)
        row = _encode(tokenizer, _from_word(part, int(place * spare)), length)
        if len(row) < length:  # long tokens, or a short stretch: all of it
            row = _encode(tokenizer, _from_word(part, 0), length)
        if len(row) < length:
            raise CalibrationError(
                f"the text is too short: one of {count} stretches of {stretch} characters gives "
                f"{len(row)} tokens, {length} are needed (ask for fewer tokens, or give more text)"
            )
        rows.append(row)
    return np.array(rows, dtype=np.int32)


def _from_word(text: str, start: int) -> str:
    """`text` from the first word that begins at or after `start`."""
    if start:
        start = next((i + 1 for i in range(start, len(text)) if text[i].isspace()), start)
    return text[start:].lstrip()


def _encode(tokenizer: Any, text: str, length: int) -> list[int]:
    """The first `length` tokens, encoding little more text than that needs."""
    window = 4 * length
    while True:
        ids = list(tokenizer.encode(text[:window]))
        # The last token may end differently in a longer text, so it does not count.
        if len(ids) > length or window >= len(text):
            return ids[:length]
        window *= 2
