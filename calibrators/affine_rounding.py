"""Plain affine rounding in groups, in NumPy: the baseline, and what several methods build on.

A group of numbers has an offset (its smallest) and a step, float16 each; codes count steps. Groups
are `group` channels of one token (axis "token", KIVI's values), or `group` consecutive tokens of
one channel (axis "channel", KIVI's keys: 2402.02750, from the description in DESIGN).

`relax` brings the outermost levels nearer to each other by that share of the range at each end, as
XQuant does (2510.11236, models/qwen2_xquant.py of the authors: codes as ever, then offset +=
relax * range and step *= 1 - 2 * relax). With few bits the largest and smallest numbers of a group
are far from most others, and the error falls to a third at 1 bit at no cost.
"""

from dataclasses import dataclass

import numpy as np

Array = np.ndarray

GROUP = 64
AXES = ("token", "channel")
RANGE_BITS = 32  # offset and step of a group, float16 each


@dataclass(frozen=True, eq=False)
class Rounded:
    """Codes uint8 [H, N, D]; `offset` and `step` float64 (float16 values) [H, groups, ..., 1]."""

    codes: Array
    offset: Array
    step: Array
    group: int
    axis: str

    def decode(self) -> Array:
        """Vectors float64 [H, N, D]."""
        y = split(self.codes.astype(np.float64), self.axis, self.group)
        return join(y * self.step + self.offset, self.axis, self.codes.shape)


def encode(x: Array, bits: int, axis: str, *, group: int = GROUP, relax: float = 0.0) -> Rounded:
    """Round vectors [H, N, D] to 1 to 8 bits; a last group of tokens may be shorter.

    Raises ValueError for an unknown axis, or where `group` does not divide the channels.
    """
    y = split(np.asarray(x, np.float64), axis, group)
    top = 2**bits - 1
    low = half(y.min(axis=-1, keepdims=True))
    step = half((y.max(axis=-1, keepdims=True) - low) / top)
    codes = np.clip(np.rint((y - low) / np.where(step > 0, step, 1.0)), 0, top)
    low, step = half(low + relax * top * step), half((1 - 2 * relax) * step)
    return Rounded(join(codes, axis, x.shape).astype(np.uint8), low, step, group, axis)


def rounded(x: Array, bits: int, axis: str, *, group: int = GROUP, relax: float = 0.0) -> Array:
    """`encode` and decode: float64 [H, N, D]."""
    return encode(x, bits, axis, group=group, relax=relax).decode()


def bits_per_element(bits: float, *, group: int = GROUP) -> float:
    """Bits of a number, offset and step included."""
    return bits + RANGE_BITS / group


def split(x: Array, axis: str, group: int) -> Array:
    """[H, N, D] with the numbers of a group along the last axis; missing tokens repeat the last."""
    heads, tokens, dim = x.shape
    if axis == "channel":
        extra = -tokens % group
        if extra:
            x = np.concatenate([x, np.repeat(x[:, -1:], extra, axis=1)], axis=1)
        return x.reshape(heads, -1, group, dim).swapaxes(2, 3)
    if axis != "token":
        raise ValueError(f"axis is {axis!r}, not one of {AXES}")
    group = min(group, dim)
    if dim % group:
        raise ValueError(f"groups of {group} do not divide {dim} channels")
    return x.reshape(heads, tokens, dim // group, group)


def join(y: Array, axis: str, shape: tuple[int, ...]) -> Array:
    """The inverse of `split`."""
    heads, tokens, dim = shape
    if axis == "channel":
        y = y.swapaxes(2, 3)
    joined: Array = y.reshape(heads, -1, dim)[:, :tokens]
    return joined


def half(x: Array) -> Array:
    """Rounded to float16 and back, within its range."""
    top = float(np.finfo(np.float16).max)
    near: Array = np.clip(x, -top, top).astype(np.float16).astype(np.float64)
    return near


def relative_error(x: Array, decoded: Array) -> float:
    """Sum of squared errors over the sum of squares."""
    x = np.asarray(x, np.float64)
    return float(np.sum(np.square(x - decoded)) / max(float(np.sum(np.square(x))), 1e-300))


def interpolated(curve: dict[float, float], bits: float) -> float:
    """Error at `bits` on a curve {bits: error}, logarithm of the error linear in the bits.

    Beyond its ends the curve goes on as its last two points say.
    """
    at = np.array(sorted(curve))
    logs = np.log(np.maximum([curve[b] for b in at], 1e-300))
    n = int(np.clip(np.searchsorted(at, bits), 1, len(at) - 1))
    slope = (logs[n] - logs[n - 1]) / (at[n] - at[n - 1])
    return float(np.exp(logs[n - 1] + slope * (bits - at[n - 1])))
