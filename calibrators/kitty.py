"""Kitty: key channels that matter more get more bits, and which ones is known beforehand.

Read: the abstract of 2511.18643 and the authors' code (Summer-Summer/Kitty, kitty_sim/
utils_quant.py, kitty_simulate.py): keys after RoPE, affine rounding at 2 bits in groups of 128
tokens of a channel; in each page the 12.5 to 25 % of a head's channels with the largest mean
magnitude (or variance) get 4 bits; the first 32 tokens exact.

Here order and bits come from the calibration text, and so do mean and deviation of each channel:
levels of a Gaussian stand at fixed places, and neither ranges (half a bit of each number) nor the
choice of channels are stored. Sensitivity is a channel's variance, times the power of the queries
that meet it if given. "water" gives every bit where it gains most; "boost" is the paper's two
steps. Measured: with ranges found at run time the boost is worth 0.75 to 0.9 of its bytes spent on
all channels alike (1.25 on Gemma, whose keys are normalized by channel); with fixed levels 2 bits
of water-filled keys have half the squared error of 2.5 bits of plain rounding, or less. In KL they
beat the rotated code on some models and lose on others: short tokens (sinks) have no scale of their
own here. Values want one for each token anyway: rotate them.
"""

from collections.abc import Mapping

import numpy as np

from velox_pack.calibrators.codebooks import MAX_BITS
from velox_pack.calibrators.neighbours import LayerTokens
from velox_pack.calibrators.rotated_code import gaussian
from velox_pack.calibrators.waterfill import spend
from velox_pack.manifests.artifacts_channels import Kitty
from velox_pack.manifests.errors import CalibrationError

Array = np.ndarray

BOOST = 2  # bits more


def fit(
    tokens: Mapping[int, LayerTokens],
    part: str,
    bits: float,
    *,
    rule: str = "water",
    before_rope: bool = True,
    power: Mapping[int, Array] | None = None,
) -> tuple[Kitty, ...]:
    """Channel order and widths for "keys" or "values" of all layers of the sample.

    `bits` is the average; "boost" takes its whole part for all channels and spends the rest on the
    first of the order. `power` [H, D] by layer: mean square of the queries at each channel. Raises
    CalibrationError for an unknown rule or impossible bits.
    """
    if rule not in ("water", "boost") or not 0 < bits <= MAX_BITS:
        raise CalibrationError(f"kitty: rule {rule!r} with {bits} bits")
    groups: dict[tuple[bool, tuple[int, int]], list[int]] = {}
    for index, layer in sorted(tokens.items()):
        heads, _, dim = layer.part(part).shape
        stands = before_rope and part == "keys" and layer.rotated
        groups.setdefault((stands, (heads, dim)), []).append(index)
    made = []
    for (stands, _), indices in groups.items():
        rows = []
        for i in indices:
            x = tokens[i].part(part, before_rope=stands).astype(np.float64)
            mean, deviation = x.mean(axis=1), np.maximum(x.std(axis=1), 1e-6)
            cost = np.square(deviation) * (1.0 if power is None else power[i])
            order = np.argsort(-cost, axis=1, kind="stable")
            rows.append((order, widths(cost, order, bits, rule), cost, mean, deviation))
        order, given, cost, mean, deviation = (np.stack(c) for c in zip(*rows, strict=True))
        made.append(
            Kitty(
                part=part,
                before_rope=stands,
                rule=rule,
                bits=float(bits),
                order=order.astype(np.uint16),
                widths=given.astype(np.uint8),
                sensitivity=cost.astype(np.float32),
                mean=mean.astype(np.float32),
                deviation=deviation.astype(np.float32),
                layers=tuple(indices),
            )
        )
    return tuple(made)


def widths(cost: Array, order: Array, bits: float, rule: str) -> Array:
    """Bits by channel, uint8 [H, D], of the same sum in each head."""
    heads, dim = cost.shape
    given = np.zeros((heads, dim), np.uint8)
    for h in range(heads):
        if rule == "water":
            along = spend(cost[h, order[h]], round(bits * dim))
        else:
            base = int(bits)
            along = np.full(dim, base, np.uint8)
            along[: round((bits - base) * dim / BOOST)] += BOOST
        given[h, order[h]] = along
    return given


def decoded(artifact: Kitty, row: int, x: Array) -> Array:
    """Vectors [H, N, D] through their codes, float64: each channel at its fixed levels."""
    mean, deviation = (
        np.asarray(a[row], np.float64)[:, None] for a in (artifact.mean, artifact.deviation)
    )
    given = np.asarray(artifact.widths[row])[:, None]
    unit = (np.asarray(x, np.float64) - mean) / deviation
    out = np.zeros_like(unit)
    for bits in sorted(set(given.ravel().tolist()) - {0}):
        out = np.where(given == bits, gaussian(unit, bits), out)
    result: Array = mean + deviation * out
    return result


def bits_per_element(artifact: Kitty) -> float:
    """Bits of a number; there is nothing else to store."""
    return float(np.mean(artifact.widths))
