"""Token sequences out of a text, with one clear line where the text does not hold as many."""

from typing import Any

import numpy as np

from velox_pack.calibrators.text import sequences
from velox_pack.manifests.errors import CalibrationError

# Pieces of a text that are tokenized to say about how many tokens it holds, characters of each.
_PIECES, _PIECE = 16, 2000
FEWEST_KINDS = 8  # different tokens, below which every key is much like the one before


def sample(
    tokenizer: Any, text: str, tokens: int, length: int, *, seed: int, name: str, hint: str
) -> np.ndarray:
    """Token ids int32 [tokens // length, length], as `calibrators.text.sequences` takes them.

    Raises CalibrationError for more tokens than the text, called `name`, holds, and for a text that
    says always the same; `hint` says what to do. Numbers that are beyond any text cost no work and
    no memory.
    """
    if tokens > len(text.encode()):  # hardly any tokenizer has a token for less than a byte
        raise CalibrationError(_told(tokenizer, text, tokens, length, name, hint))
    try:
        found = sequences(tokenizer, text, tokens, length, seed)
    except CalibrationError as error:
        raise CalibrationError(_told(tokenizer, text, tokens, length, name, hint)) from error
    kinds = len(np.unique(found))
    if kinds < min(FEWEST_KINDS, tokens // 2):
        raise CalibrationError(
            f"{name} says always the same: {tokens:,} tokens of it are {kinds} different ones; "
            "take one that is more varied"
        )
    return found


def _told(tokenizer: Any, text: str, tokens: int, length: int, name: str, hint: str) -> str:
    starts = range(0, len(text), max(_PIECE, len(text) // _PIECES))
    pieces = [text[start : start + _PIECE] for start in starts]
    found = sum(len(tokenizer.encode(piece)) for piece in pieces)
    held = round(found * len(text) / sum(map(len, pieces)))
    about = round(held, 2 - len(str(held)))
    uneven = ", some parts fewer than others" if about >= tokens else ""
    return (
        f"{name} is too short for {tokens:,} tokens in sequences of {length}: "
        f"it holds about {about:,}{uneven}; {hint}"
    )
