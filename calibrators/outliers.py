"""Outlier channels apart: two streams, few channels with more bits and the rest without them.

The idea of KVQuant (2401.18079) and of recipes that keep outlier channels in a stream of their own,
from the description in DESIGN. Which channels are outliers is a matter of the model: here the ones
of largest deviation in the calibration text, in whole RoPE pairs if keys are taken after RoPE. They
are coded at fixed levels; the rest, a shorter vector, is rotated and coded as usual.

How many there are is measured: the number whose error, brought to equal bytes by what a bit more
for all is worth, is least. Keeping them in 16 bits costs more than it gains (measured: 4 of 64
channels cost 0.9 bits each number); 2 bits more than the others are enough. Measured, the second
stream beats rounding by far, but so does one stream that is rotated: where a random rotation has
spread the outliers already, keeping them apart adds little (except to Gemma's normalized keys,
where it halves the error).
"""

from collections.abc import Mapping

import numpy as np

from velox_pack.calibrators.affine_rounding import relative_error
from velox_pack.calibrators.neighbours import LayerTokens
from velox_pack.calibrators.rotated_code import RotatedCode, gaussian, norm_bits, range_of
from velox_pack.manifests.artifacts_channels import Outliers
from velox_pack.manifests.artifacts_vector import rope_pairs
from velox_pack.manifests.errors import CalibrationError

Array = np.ndarray
Turn = tuple[int, bool] | None  # how many coordinates RoPE turns, and whether in neighbours

SHARES = (1 / 32, 1 / 16, 1 / 8, 1 / 4)  # of the channels, that are tried
MORE = 2  # bits more for outliers
MAX_BITS = 6
JUDGED = 512  # tokens that the number of outliers is tried on


def fit(
    tokens: Mapping[int, LayerTokens],
    part: str,
    bits: int,
    *,
    before_rope: bool = True,
    count: int | None = None,
    more: int = MORE,
) -> tuple[Outliers, ...]:
    """Outlier channels of "keys" or "values" of all layers of the sample.

    `count` channels of each head, by measured error unless given (an even number where RoPE turns
    pairs). Raises CalibrationError for impossible bits or counts.
    """
    if not 1 <= bits <= MAX_BITS or not 0 <= more <= 8 - MAX_BITS:
        raise CalibrationError(f"outliers: {bits} bits and {more} more, not 1 to {MAX_BITS} and 2")
    groups: dict[tuple[bool, bool, tuple[int, int]], list[int]] = {}
    for index, layer in sorted(tokens.items()):
        heads, _, dim = layer.part(part).shape
        turned = part == "keys" and layer.rotated
        place = (turned and before_rope, turned and not before_rope, (heads, dim))
        groups.setdefault(place, []).append(index)
    made = []
    for (stands, pairs, (_, dim)), indices in groups.items():
        turns = {i: _turn(tokens[i]) if pairs else None for i in indices}
        xs = {i: tokens[i].part(part, before_rope=stands).astype(np.float64) for i in indices}
        chosen = best_count(xs, turns, bits, more) if count is None else count
        if not 0 < chosen < dim:
            raise CalibrationError(f"outliers: {chosen} of {dim} channels")
        made.append(_made(xs, turns, part, stands, chosen, bits, more))
    return tuple(made)


def _turn(layer: LayerTokens) -> Turn:
    rope = layer.trace.rope
    return None if rope is None else (rope.dims, rope.traditional)


def best_count(xs: Mapping[int, Array], turns: Mapping[int, Turn], bits: int, more: int) -> int:
    """The number of outliers of least error at equal bytes, on a part of the tokens."""
    xs = {i: x[:, :: max(1, x.shape[1] // JUDGED)] for i, x in xs.items()}
    dim = next(iter(xs.values())).shape[2]
    tried = sorted({2 * max(1, round(share * dim / 2)) for share in SHARES})

    def error(count: int) -> float:
        artifact = _made(xs, turns, "keys", False, count, bits, more)
        rows = enumerate(artifact.layers)
        return float(np.mean([relative_error(xs[i], decoded(artifact, n, xs[i])) for n, i in rows]))

    plain = [float(np.mean([_rotated(x, b) for x in xs.values()])) for b in (bits, bits + 1)]
    worth = np.log(plain[0] / plain[1])  # of a bit for all channels
    scores = [np.log(error(k)) + worth * more * k / dim for k in tried]
    return int(tried[int(np.argmin(scores))])


def _rotated(x: Array, bits: int) -> float:
    """Relative error of the rotated code alone, mean off."""
    centred = x - x.mean(axis=1, keepdims=True)
    code = RotatedCode(x.shape[2], bits, range_of(centred))
    error = np.sum(np.square(centred - code.decode(*code.encode(centred))))
    return float(error / max(float(np.sum(np.square(x))), 1e-300))


def _made(
    xs: Mapping[int, Array],
    turns: Mapping[int, Turn],
    part: str,
    stands: bool,
    count: int,
    bits: int,
    more: int,
) -> Outliers:
    rows = []
    for index, x in xs.items():
        mean, deviation = x.mean(axis=1), np.maximum(x.std(axis=1), 1e-6)
        channels = largest(deviation, count, turns[index])
        rest = without(x - mean[:, None], channels)
        ratio = (
            np.take_along_axis(deviation, channels, axis=1) / np.median(deviation, axis=1)[:, None]
        )
        rows.append((channels, mean, deviation, range_of(rest), ratio.min()))
    channels, mean, deviation, log_norm, threshold = (np.stack(c) for c in zip(*rows, strict=True))
    return Outliers(
        part=part,
        before_rope=stands,
        pairs=any(r is not None for r in turns.values()),
        bits=bits,
        outlier_bits=bits + more,
        channels=channels.astype(np.uint16),
        mean=mean.astype(np.float32),
        deviation=deviation.astype(np.float32),
        log_norm=log_norm.astype(np.float32),
        threshold=threshold.astype(np.float32),
        layers=tuple(xs),
    )


def largest(deviation: Array, count: int, turn: Turn) -> Array:
    """Channels int64 [H, count], ascending, of largest deviation [H, D]; in pairs with `turn`."""
    score = np.square(deviation)
    if turn is None:
        chosen = np.argsort(-score, axis=1, kind="stable")[:, :count]
        return np.sort(chosen, axis=1)
    dims, traditional = turn
    first, second = rope_pairs(dims, dims, traditional)
    if count % 2 or count > dims:
        raise CalibrationError(f"outliers: {count} channels are no whole pairs of {dims}")
    together = score[:, first] + score[:, second]
    best = np.argsort(-together, axis=1, kind="stable")[:, : count // 2]
    return np.sort(np.concatenate([first[best], second[best]], axis=1), axis=1)


def without(x: Array, channels: Array) -> Array:
    """Vectors [H, N, D] without channels [H, K], in order: [H, N, D - K]."""
    return np.stack([np.delete(v, c, axis=1) for v, c in zip(x, channels, strict=True)])


def decoded(artifact: Outliers, row: int, x: Array) -> Array:
    """Vectors [H, N, D] through both streams, float64."""
    channels = np.asarray(artifact.channels[row]).astype(np.int64)
    mean, deviation = (np.asarray(a[row], np.float64) for a in (artifact.mean, artifact.deviation))
    centred = np.asarray(x, np.float64) - mean[:, None]
    rest = without(centred, channels)
    code = RotatedCode(rest.shape[2], artifact.bits, artifact.log_norm[row])
    rest = code.decode(*code.encode(rest))
    out = np.empty_like(centred)
    for h, at in enumerate(channels):
        apart = gaussian(centred[h][:, at] / deviation[h, at], artifact.outlier_bits)
        out[h][:, at] = apart * deviation[h, at]
        out[h][:, np.delete(np.arange(x.shape[2]), at)] = rest[h]
    result: Array = out + mean[:, None]
    return result


def bits_per_element(artifact: Outliers) -> float:
    """Bits of a number, scales included."""
    count, dim = artifact.channels.shape[2], artifact.mean.shape[2]
    apart = count / dim
    return float(artifact.bits * (1 - apart) + artifact.outlier_bits * apart + norm_bits(dim))
