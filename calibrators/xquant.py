"""XQuant: a layer takes the codes of the layer before, with offsets and steps of its own.

Read: the abstract of 2510.11236 and the authors' code (brinenick511/XQuant,
models/qwen2_xquant.py): from a chosen layer on, every odd layer decodes the codes of the layer
before it with its own smallest numbers and steps (keys after RoPE in groups of 64 tokens of a
channel, values in groups of 64 channels of a token), and rounding is relaxed: with `relax` = 1/6 at
1 bit and 0.045 at 2 bits the outermost levels move inwards (see `affine_rounding`).

What is calibrated: the relaxation (that of least error on the sample), where to share keys
(before or after RoPE), and which pairs may share at all: those whose error is below that of plain
rounding at the same bytes. Offset and step of the borrower are the least squares ones, which the
authors' are not: codes that do not fit then cost no more than having no codes.

Measured, codes of neighbours hardly agree (correlation 0.17 for keys, 0.10 for values; of 64 random
numbers it is 0.10): layers hold their channels in bases of their own. Of all pairs of the trained
models at hand one or two are worth sharing; `prediction` maps one basis into the other and is. The
relaxed rounding is worth having by itself at 1 bit (a sixth of the error); at 2 bits it is as good
as MLX's rounding, which keeps 0 exact.
"""

from collections.abc import Mapping

import numpy as np

from velox_pack.calibrators import affine_rounding
from velox_pack.calibrators.affine_rounding import (
    GROUP,
    RANGE_BITS,
    Rounded,
    half,
    interpolated,
    relative_error,
    rounded,
    split,
)
from velox_pack.calibrators.codebooks import MAX_BITS
from velox_pack.calibrators.neighbours import LayerTokens
from velox_pack.manifests.artifacts_sharing import XQuant
from velox_pack.manifests.errors import CalibrationError

Array = np.ndarray

RELAX = {1: 1 / 6, 2: 0.045}  # the authors'
MOST = 0.45  # relaxation: levels have to stay in order


def fit(
    tokens: Mapping[int, LayerTokens],
    part: str,
    bits: int,
    *,
    before_rope: bool | None = None,
    threshold: float = 1.0,
) -> tuple[XQuant, ...]:
    """Pairs of layers that may share, for "keys" or "values" of all layers of the sample.

    A pair shares if its error is below `threshold` times that of rounding at equal bytes.
    Keys are taken before or after RoPE, whichever leaves less error with shared codes, unless
    `before_rope` says. Raises CalibrationError for bits other than 1 to 8.
    """
    if not 1 <= bits <= MAX_BITS:
        raise CalibrationError(f"xquant: {bits} bits are not 1 to 8")
    if part == "values" or before_rope is not None:
        return _fit(tokens, part, bits, bool(before_rope) and part == "keys", threshold)
    found = [_fit(tokens, part, bits, before, threshold) for before in (True, False)]
    return min(found, key=lambda made: sum(float(a.shared.sum()) for a in made))


def _fit(
    tokens: Mapping[int, LayerTokens], part: str, bits: int, before: bool, threshold: float
) -> tuple[XQuant, ...]:
    axis = "channel" if part == "keys" else "token"
    groups: dict[tuple[bool, int, int], list[int]] = {}
    for index, layer in sorted(tokens.items()):
        x = layer.part(part)
        stands = before and part == "keys" and layer.rotated
        groups.setdefault((stands, x.shape[0], x.shape[2]), []).append(index)
    made = []
    for (stands, *_), indices in groups.items():
        vectors = {i: tokens[i].part(part, before_rope=stands) for i in indices}
        relax = {b: measured_relaxation(list(vectors.values()), b, axis) for b in {1, 2, 3, bits}}
        rows = [
            _pair(vectors, indices, n, bits, axis, relax, threshold) for n in range(len(indices))
        ]
        partner, shared, own, agreement = (np.array(c) for c in zip(*rows, strict=True))
        made.append(
            XQuant(
                part=part,
                before_rope=stands,
                axis=axis,
                bits=bits,
                group=GROUP,
                relax=relax[bits],
                partner=partner.astype(np.int32),
                shared=shared.astype(np.float32),
                own=own.astype(np.float32),
                agreement=agreement.astype(np.float32),
                layers=tuple(indices),
            )
        )
    return tuple(made)


def _pair(
    vectors: Mapping[int, Array],
    indices: list[int],
    n: int,
    bits: int,
    axis: str,
    relaxed: Mapping[int, float],
    threshold: float,
) -> tuple[int, float, float, float]:
    """Partner or -1, error with its codes, error with own codes, agreement; for the n-th layer."""
    x, relax = vectors[indices[n]], relaxed[bits]
    own = relative_error(x, rounded(x, bits, axis, relax=relax))
    if n % 2 == 0 or indices[n] != indices[n - 1] + 1:
        return -1, 0.0, own, 0.0
    before = vectors[indices[n - 1]]
    lent = affine_rounding.encode(before, bits, axis, relax=relax)
    shared = relative_error(x, borrow(lent, x).decode())
    lender = relative_error(before, lent.decode())
    curves = [curve_of(v, axis, relaxed) for v in (before, x)]
    at = bits / 2 + RANGE_BITS / GROUP
    plain = sum(interpolated(c, at) for c in curves)
    fits = lender + shared < threshold * plain
    return indices[n - 1] if fits else -1, shared, own, agreement(lent, x)


def curve_of(x: Array, axis: str, relax: Mapping[int, float]) -> dict[float, float]:
    """{bits of a number: relative error} of rounding relaxed by `relax[bits]`.

    0 bits are each group's mean alone.
    """
    groups = split(np.asarray(x, np.float64), axis, GROUP)
    alone = groups - groups.mean(axis=-1, keepdims=True)
    curve = {RANGE_BITS / 2 / GROUP: float(np.sum(np.square(alone)) / np.sum(np.square(groups)))}
    for bits, share in relax.items():
        error = relative_error(x, rounded(x, bits, axis, relax=share))
        if error < min(curve.values()):  # what loses to fewer bits is nobody's choice
            curve[affine_rounding.bits_per_element(bits)] = error
    return curve


def measured_relaxation(vectors: list[Array], bits: int, axis: str) -> float:
    """The relaxation of least relative error over all layers; every layer counts alike.

    A relaxed number is the rounded one plus relax * step * (top - 2 * code), so this is least
    squares of one unknown.
    """
    top = 2**bits - 1
    above = below = 0.0
    for x in vectors:
        plain = affine_rounding.encode(x, bits, axis)
        codes = split(plain.codes.astype(np.float64), axis, plain.group)
        wide = split(np.asarray(x, np.float64), axis, plain.group)
        move = plain.step * (top - 2 * codes)
        weight = 1 / max(float(np.sum(np.square(wide))), 1e-300)
        above += weight * float(np.sum((wide - plain.offset - plain.step * codes) * move))
        below += weight * float(np.sum(np.square(move)))
    return float(np.clip(above / max(below, 1e-300), 0.0, MOST))


def borrow(lent: Rounded, x: Array, *, least_squares: bool = True, relax: float = 0.0) -> Rounded:
    """Codes of another layer for vectors x [H, N, D]: only offsets and steps are x's own.

    Not `least_squares`: from the smallest and largest numbers, relaxed, as the authors do. The
    codes' number of levels is read off them.
    """
    y = split(np.asarray(x, np.float64), lent.axis, lent.group)
    codes = split(lent.codes.astype(np.float64), lent.axis, lent.group)
    if least_squares:
        away = codes - codes.mean(axis=-1, keepdims=True)
        spread = np.sum(np.square(away), axis=-1, keepdims=True)
        step = np.sum(away * y, axis=-1, keepdims=True) / np.where(spread > 0, spread, 1.0)
        step = half(step)
        offset = half(y.mean(axis=-1, keepdims=True) - step * codes.mean(axis=-1, keepdims=True))
    else:
        low, high = y.min(axis=-1, keepdims=True), y.max(axis=-1, keepdims=True)
        top = max(float(codes.max()), 1.0)
        offset = half(low + relax * (high - low))
        step = half((1 - 2 * relax) * (high - low) / top)
    return Rounded(lent.codes, offset, step, lent.group, lent.axis)


def agreement(lent: Rounded, x: Array) -> float:
    """Mean absolute correlation of codes and numbers over the groups."""
    y = split(np.asarray(x, np.float64), lent.axis, lent.group)
    codes = split(lent.codes.astype(np.float64), lent.axis, lent.group)
    y, codes = (v - v.mean(axis=-1, keepdims=True) for v in (y, codes))
    size = np.sqrt(np.sum(np.square(y), axis=-1) * np.sum(np.square(codes), axis=-1))
    inner = np.abs(np.sum(y * codes, axis=-1))
    return float(np.mean(np.divide(inner, size, out=np.zeros_like(size), where=size > 0)))


def encode(artifact: XQuant, row: int, x: Array, lent: Rounded | None = None) -> Rounded:
    """Codes of vectors [H, N, D], or `lent`, those of the partner for the same tokens."""
    if int(artifact.partner[row]) < 0:
        return affine_rounding.encode(x, artifact.bits, artifact.axis, relax=artifact.relax)
    if lent is None:
        raise ValueError(f"layer {artifact.layers[row]} needs the codes of its partner")
    return borrow(lent, x)


def bits_per_element(artifact: XQuant, row: int) -> float:
    """Bits of a number, offset and step included."""
    own = 0 if int(artifact.partner[row]) >= 0 else artifact.bits
    return affine_rounding.bits_per_element(own, group=artifact.group)
