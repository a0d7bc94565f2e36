"""How many keys each layer and head may keep, from true attention: PyramidKV, AdaKV, measured.

All fits return shares of a common budget, mean 1, at each of RATIOS (budget as a share of the keys
that compete: older than the recent window, without sinks).

pyramid   PyramidKV (2406.02069, code read): an arithmetic sequence from the first layer to the
          last, cut off at what there is. The code's slope is fixed (beta = 20); `slope=None` takes
          the slope, steep or inverted, that costs least on the calibration text.
ada       AdaKV (2407.11550, code read): heads of a layer compete for the best keys, with the share
          `safeguard` given to each. The code does so on every prompt; here budgets are the mean
          over observations of the calibration text. No smoothing of mass along positions.
measured  the least loss on the measured curves of all heads, by water-filling their convex hulls.
          Output error of the selector that will be used is the default; weights of layers are
          left to the caller, since those tried (how far attention moves the hidden state) gained
          on one model and lost on another.
"""

from collections.abc import Mapping

import numpy as np
from scipy.interpolate import PchipInterpolator

from velox_pack.calibrators.attention_mass import ORACLE, RATIOS, AttentionMass
from velox_pack.calibrators.budget_shares import Shapes, by_shape
from velox_pack.manifests.artifacts_attention import Budgets
from velox_pack.manifests.errors import CalibrationError

Array = np.ndarray
LOSSES = ("lost", "error")
_BETWEEN = 6  # points for each step of RATIOS
_SLOPES = np.linspace(-0.95, 0.95, 39)


def uniform(shapes: Shapes) -> tuple[Budgets, ...]:
    """The same for all: what the others have to beat."""
    return by_shape(shapes, "uniform", {}, lambda n: np.ones((len(n), 1, len(RATIOS))))


def pyramid(
    shapes: Shapes,
    mass: Mapping[int, AttentionMass] | None = None,
    slope: float | None = None,
    loss: str = "error",
) -> tuple[Budgets, ...]:
    """Budgets falling (or rising) from layer to layer; a slope of 0.95 is the code's beta of 20.

    `loss` is what a measured slope saves: "error" (of outputs) or "lost" (attention).
    """
    if loss not in LOSSES:
        raise CalibrationError(f"loss is {loss!r}, not one of {LOSSES}")
    if slope is None and mass is None:
        raise CalibrationError("a pyramid needs a slope, or measured attention to find it")

    def make(layers: list[int]) -> Array:
        if slope is not None or mass is None:
            return pyramid_shares(len(layers), slope or 0.0)[:, None]
        options = np.stack([pyramid_shares(len(layers), s) for s in _SLOPES])
        curves = np.stack([getattr(mass[i], loss)[ORACLE].mean(axis=0) for i in layers])
        costs = np.stack([loss_at(curves, option) for option in options])  # [slopes, K]
        best = costs.argmin(axis=0)
        return np.stack([options[s, :, k] for k, s in enumerate(best)], axis=-1)[:, None]

    return by_shape(shapes, "pyramid", {"slope": slope}, make)


def pyramid_shares(layers: int, slope: float) -> Array:
    """[L, K]: 1 + slope in the first layer down to 1 - slope in the last, within what there is."""
    steps = np.zeros(1) if layers == 1 else np.linspace(1, -1, layers)
    room = 1 / np.array(RATIOS) - 1  # nothing may exceed all keys
    tilt = np.sign(slope) * np.minimum(abs(slope), room)
    line: Array = 1 + steps[:, None] * tilt
    return line


def ada(
    shapes: Shapes, mass: Mapping[int, AttentionMass], safeguard: float = 0.2
) -> tuple[Budgets, ...]:
    """Budgets of the heads of a layer, by the best keys of all of them; mean 1 in every layer."""
    if not 0 <= safeguard <= 1:
        raise CalibrationError(f"a safeguard of {safeguard} is no share")
    return by_shape(
        shapes,
        "ada",
        {"safeguard": safeguard},
        lambda layers: np.stack([safeguard + (1 - safeguard) * mass[i].pooled for i in layers]),
    )


def measured(
    shapes: Shapes,
    mass: Mapping[int, AttentionMass],
    *,
    selector: str = ORACLE,
    loss: str = "error",
    weights: Mapping[int, float] | None = None,
    safeguard: float = 0.2,
) -> tuple[Budgets, ...]:
    """Budgets of all heads of all layers of a shape that lose least in sum.

    `loss` is "lost" (attention mass) or "error" (relative output error), of keys chosen by
    `selector`; `weights` says what a layer's loss counts (1). Each head keeps `safeguard` of an
    even share.
    """
    if loss not in LOSSES:
        raise CalibrationError(f"loss is {loss!r}, not one of {LOSSES}")

    def make(layers: list[int]) -> Array:
        curves = np.stack(
            [getattr(mass[i], loss)[selector] * (weights or {}).get(i, 1.0) for i in layers]
        )
        x, fine = refined(curves.reshape(-1, len(RATIOS)))
        given = np.stack([water_fill(x, fine, r, safeguard) for r in RATIOS], axis=-1)
        return given.reshape(curves.shape)

    details = {
        "selector": selector,
        "loss": loss,
        "safeguard": safeguard,
        "weighted": weights is not None,
    }
    return by_shape(shapes, "measured", details, make)


def refined(curves: Array) -> tuple[Array, Array]:
    """Budgets [n] from the least of RATIOS to 1, and curves [.., n] read off between RATIOS.

    Monotone cubic over the logarithm of the budget. On the few points alone, filled in straight
    lines, heads would jump from one of RATIOS to another.
    """
    known = np.log(np.array(RATIOS)[::-1])
    x = np.linspace(known[0], 0, _BETWEEN * (len(RATIOS) - 1) + 1)
    return np.exp(x), PchipInterpolator(known, curves[:, ::-1], axis=1)(x)


def water_fill(x: Array, curves: Array, ratio: float, safeguard: float = 0.0) -> Array:
    """Shares [n] of mean 1 of the budget `ratio` that minimize the sum of losses.

    `curves` [n, K] are losses at budgets `x` [K], rising. Curves are taken as their lower convex
    hulls, linear in between and down to a budget of 0; so filling segments in the order of their
    gain is optimal. At least `safeguard` each, at most x[-1].
    """
    floor = safeguard * ratio
    pieces = []  # (gain per key, head, width)
    for head, curve in enumerate(curves):
        at, y = convex_hull(x, curve)
        first = y[0] + (y[0] - y[1]) / (at[1] - at[0]) * at[0] if len(at) > 1 else y[0]
        at, y = np.append(0.0, at), np.append(first, y)
        for a, b, ya, yb in zip(at[:-1], at[1:], y[:-1], y[1:], strict=True):
            width = b - max(a, floor)
            if width > 0:
                pieces.append(((ya - yb) / (b - a), head, width))
    shares = np.full(len(curves), floor)
    left = (ratio - floor) * len(curves)
    for _gain, head, width in sorted(pieces, key=lambda piece: (-piece[0], piece[1])):
        given = min(width, left)
        shares[head] += given
        left -= given
    return shares / ratio


def convex_hull(x: Array, y: Array) -> tuple[Array, Array]:
    """The lower convex hull of points with rising x: those corners that lie on it."""
    kept: list[int] = []
    for i in range(len(x)):
        while len(kept) > 1:
            a, b = kept[-2], kept[-1]
            if (y[b] - y[a]) * (x[i] - x[a]) < (y[i] - y[a]) * (x[b] - x[a]):
                break
            kept.pop()
        kept.append(i)
    return x[kept], y[kept]


def loss_at(curves: Array, shares: Array) -> Array:
    """Sum of losses [K] when unit n gets shares[n, k] of budget RATIOS[k]; curves [n, K]."""
    x, fine = refined(curves)
    total = np.zeros(len(RATIOS))
    for curve, share in zip(fine, shares, strict=True):
        slope = (curve[0] - curve[1]) / (x[1] - x[0])
        at, y = np.append(0.0, x), np.append(curve[0] + slope * x[0], curve)
        total += np.interp(share * np.array(RATIOS), at, y)
    return total
