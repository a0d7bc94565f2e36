"""RateQuant: how many bits each layer's keys and values get, from measured sensitivities.

Source: RateQuant, arXiv 2605.06675 (abstract read; the rest as described in
DESIGN): each quantizer has a distortion curve of its own, D(b) = alpha * beta^-b, to be fitted and
never borrowed; bits follow in closed form by reverse water-filling. Here a unit is the keys or the
values of one layer (its heads share widths), and bits come in steps that fill whole 32-bit words of
a row. The loss is sum_u s_u * D_u(b_u) + c_u * D_u(b_u)^2 in nats of KL, measured (see
`sensitivity`); the paper has the first term alone, the second is ours.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from velox_pack.calibrators.sensitivity import Sensitivity
from velox_pack.calibrators.waterfill import WORD, error, widths
from velox_pack.manifests.artifacts import Allocation

Array = np.ndarray

# Bits at which curves are fitted: where allocations end up. Below, the exponential is no good fit.
FIT_FROM, FIT_TO = 1.5, 5.0
# Errors of a third of the signal are no small perturbation. Measured on a model of 12 layers: at 3
# bits on average, with layers down to 1 bit, the first term alone loses to uniform bits (KL 0.052
# against 0.032); from 2 bits on, and with both terms, it wins (0.030).
LOWEST = 2.0


@dataclass(frozen=True)
class Distortion:
    """Relative error of one quantizer on one unit at b bits per element: alpha * beta^-b."""

    alpha: float
    beta: float

    def __post_init__(self) -> None:
        if not (self.alpha > 0 and self.beta > 1):
            raise ValueError(f"alpha {self.alpha} must be above 0 and beta {self.beta} above 1")

    def at(self, bits: Array | float) -> Array:
        """alpha * beta^-bits."""
        result: Array = self.alpha * np.power(self.beta, -np.asarray(bits, dtype=np.float64))
        return result


def fit_distortion(bits: Array, errors: Array) -> Distortion:
    """Least squares on the logarithm of errors [n], measured or predicted at bits [n].

    Raises ValueError for fewer than two points or errors that are not above 0.
    """
    bits, errors = np.asarray(bits, np.float64), np.asarray(errors, np.float64)
    if bits.shape != errors.shape or bits.size < 2 or not np.all(errors > 0):
        raise ValueError(f"a curve needs two points above 0, got {errors.tolist()} at {bits}")
    slope, start = np.polyfit(bits, np.log(errors), 1)
    return Distortion(float(np.exp(start)), float(np.exp(-slope)))


def lloyd_distortion(variances: Array, weights: Array | None = None) -> Distortion:
    """Curve of Lloyd-Max codes with water-filled widths on coordinates of these variances [H, D].

    Equal variances stand for a random rotation. Heads share widths and are weighted by `weights`
    [H], their sensitivities, since they share bits too.
    """
    table = np.atleast_2d(np.asarray(variances, np.float64))
    table = table / table.sum(axis=1, keepdims=True)
    share = np.full(len(table), 1.0 / len(table)) if weights is None else weights / weights.sum()
    step = WORD / table.shape[1]
    grid = step * np.arange(int(np.ceil(FIT_FROM / step)), int(FIT_TO / step) + 1)
    errors = [share @ error(table, widths(table, b)[0]) for b in grid]
    return fit_distortion(grid, np.array(errors))


def reverse_waterfill(
    noise: Array,
    shrink: Array,
    curves: Sequence[Distortion],
    target: float,
    elements: Array,
    lowest: float,
    highest: float,
) -> Array:
    """Real-valued bits [U] that minimize sum(noise * D + shrink * D^2), averaging `target`.

    `elements` says how many numbers a unit holds per token. Where no bound binds, what more bits
    would save per element, (noise * D + 2 * shrink * D^2) * ln(beta) / elements, is the same for
    all units: the water level, found by bisection. Without `shrink` this is the closed form
    D = level * elements / (noise * ln(beta)).
    """
    alpha, beta = (np.array([getattr(c, name) for c in curves]) for name in ("alpha", "beta"))
    rate, share = np.log(beta), elements / elements.sum()
    noise = np.maximum(noise, 1e-300)

    def bits_at(log_level: float) -> Array:
        saved = np.exp(log_level) * elements / rate
        error = 2 * saved / (noise + np.sqrt(noise**2 + 8 * shrink * saved))
        result: Array = np.clip(np.log(alpha / error) / rate, lowest, highest)
        return result

    low, high = -600.0, 600.0
    for _ in range(200):  # the average falls as the level rises
        middle = (low + high) / 2
        low, high = (middle, high) if share @ bits_at(middle) > target else (low, middle)
    return bits_at(high)


def spread(
    noise: Array,
    curves: Sequence[Distortion],
    target: float,
    elements: Array,
    steps: Array,
    *,
    shrink: Array | None = None,
    lowest: float = 1.0,
    highest: float = 8.0,
) -> Array:
    """Bits [U], multiples of `steps` [U], whose average over elements is at most `target`.

    Reverse water-filling, rounded down to steps; then every next step goes to the unit that gains
    most for its bits, as long as one fits. Raises ValueError if `target` is out of the bounds.
    """
    if not lowest <= target <= highest:
        raise ValueError(f"{target} bits on average are not within {lowest} and {highest}")
    noise = np.asarray(noise, np.float64)
    shrink = np.zeros_like(noise) if shrink is None else np.asarray(shrink, np.float64)
    if not all(np.all(np.isfinite(s)) and s.min() >= 0 for s in (noise, shrink)):
        raise ValueError("sensitivities must be finite and not negative")
    real = reverse_waterfill(noise, shrink, curves, target, elements, lowest, highest)
    # The bounds in whole steps.
    floor, ceiling = np.ceil(lowest / steps - 1e-9), np.floor(highest / steps + 1e-9)
    units = np.clip(np.floor(real / steps + 1e-9), floor, ceiling)
    cost = elements * steps
    left = target * elements.sum() - units @ cost
    while True:
        fits = (units < ceiling) & (cost <= left + 1e-6)
        if not fits.any():
            return np.asarray(units * steps)
        now, then = (_losses(noise, shrink, curves, n * steps) for n in (units, units + 1))
        best = int(np.argmax(np.where(fits, (now - then) / cost, -np.inf)))  # first of equals
        units[best] += 1
        left -= cost[best]


def _losses(noise: Array, shrink: Array, curves: Sequence[Distortion], bits: Array) -> Array:
    """Nats of KL that each unit costs at its bits, [U]."""
    errors = np.array([float(c.at(b)) for c, b in zip(curves, bits, strict=True)])
    losses: Array = noise * errors + shrink * errors**2
    return losses


def allocate(
    sensitivity: Sensitivity,
    keys: Mapping[int, Distortion],
    values: Mapping[int, Distortion],
    target: float,
    dims: Mapping[int, tuple[int, int]],
    *,
    lowest: float = LOWEST,
    highest: float = 8.0,
) -> tuple[Allocation, ...]:
    """Bits for the keys and values of all layers in `sensitivity`, averaging `target`.

    `keys` and `values` hold each layer's distortion curve, `dims` its (k_dim, v_dim). All layers
    compete for the same bits, but none gets fewer than `lowest` (or `target`, if that is less). One
    artifact is made for each number of KV heads. Its `achieved` is the average over all layers; its
    details hold the curves, the predicted KL in nats beside that of uniform bits, and the ratio of
    the most sensitive head to the median one (0: the median is 0).
    """
    layers = sorted(sensitivity.keys)
    units = [(i, 0, sensitivity.keys[i], keys[i]) for i in layers]
    units += [(i, 1, sensitivity.values[i], values[i]) for i in layers]
    dim = np.array([dims[i][part] for i, part, _, _ in units], dtype=np.float64)
    elements = dim * np.array([len(s) for _, _, s, _ in units])
    noise = np.array([s.sum() for _, _, s, _ in units])
    both = (sensitivity.shrink_keys, sensitivity.shrink_values)
    shrink = np.array([both[part].get(i, 0.0) for i, part, _, _ in units])
    curves = [c for _, _, _, c in units]
    bits = spread(
        noise,
        curves,
        target,
        elements,
        WORD / dim,
        shrink=shrink,
        lowest=min(lowest, target),
        highest=highest,
    )
    achieved = float(bits @ elements / elements.sum())

    def predicted(given: Array) -> float:
        return float(_losses(noise, shrink, curves, given).sum())

    groups: dict[int, list[int]] = {}
    for place, i in enumerate(layers):
        groups.setdefault(len(sensitivity.keys[i]), []).append(place)
    half = len(layers)
    return tuple(
        Allocation(
            target=float(target),
            achieved=achieved,
            keys=bits[places].astype(np.float32),
            values=bits[half:][places].astype(np.float32),
            sensitivity_keys=_stack(sensitivity.keys, layers, places),
            sensitivity_values=_stack(sensitivity.values, layers, places),
            details={
                "fisher": "labels drawn from the model",
                "tokens": sensitivity.tokens,
                "ratio_keys": _ratio([sensitivity.keys[i] for i in layers]),
                "ratio_values": _ratio([sensitivity.values[i] for i in layers]),
                "shrink_keys": [float(shrink[p]) for p in places],
                "shrink_values": [float(shrink[half + p]) for p in places],
                "alpha_keys": [curves[p].alpha for p in places],
                "beta_keys": [curves[p].beta for p in places],
                "alpha_values": [curves[half + p].alpha for p in places],
                "beta_values": [curves[half + p].beta for p in places],
                "predicted_kl": predicted(bits),
                "predicted_kl_uniform": predicted(np.full(len(bits), achieved)),
            },
            layers=tuple(layers[p] for p in places),
        )
        for places in groups.values()
    )


def _ratio(found: Sequence[Array]) -> float:
    heads = np.concatenate(found)
    middle = float(np.median(heads))
    return float(heads.max()) / middle if middle > 0 else 0.0


def _stack(found: Mapping[int, Array], layers: list[int], places: list[int]) -> Array:
    return np.stack([found[layers[p]] for p in places]).astype(np.float32)
