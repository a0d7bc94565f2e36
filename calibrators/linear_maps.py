"""Linear maps fitted by ridge regression and stored in 8 bits: y ~ bias + x @ matrix.

The strength of the ridge is chosen on runs of tokens that the fit has not seen, and a map that does
not help there is not used. What a code leaves over is computed with the stored map, so rounding the
map costs nothing but a little of its use.
"""

from dataclasses import dataclass

import numpy as np
from scipy.linalg import cho_factor, cho_solve
from threadpoolctl import threadpool_limits

Array = np.ndarray

RIDGES = (1e-3, 1e-2, 1e-1, 1.0)
HELD_OUT = 8  # every so manyth run judges
WORTH = 0.98  # a map has to bring the error below this share


@dataclass(frozen=True, eq=False)
class LinearMap:
    """matrix = weights / (inputs[:, None]) * outputs: int8 [S, C], float32 [S], float32 [C]."""

    weights: Array
    inputs: Array
    outputs: Array

    def matrix(self) -> Array:
        """Float64 [S, C]."""
        wide = self.weights.astype(np.float64) / self.inputs.astype(np.float64)[:, None]
        dense: Array = wide * self.outputs.astype(np.float64)
        return dense


def fit(sources: Array, targets: Array, run: int) -> tuple[LinearMap, float]:
    """The map from rows [N, S] to [N, C], both of mean about 0, and the error left over.

    `run` tokens in a row belong together. The error, 1 for a map of zeros, is that on held-out
    runs.
    """
    deviation = np.sqrt(np.mean(np.square(sources), axis=0))
    deviation = np.where(deviation > 0, deviation, 1.0)
    x = sources / deviation
    judges = (np.arange(len(x)) // run) % HELD_OUT == HELD_OUT - 1
    if not judges.any() or judges.all():
        judges = np.arange(len(x)) % HELD_OUT == HELD_OUT - 1
    with threadpool_limits(1):
        seen, asked = _sums(x[~judges], targets[~judges]), _sums(x[judges], targets[judges])
        gram, cross = seen[0] + asked[0], seen[1] + asked[1]
        total = float(np.sum(np.square(targets[judges]))) or 1.0
        errors = []
        for ridge in RIDGES:
            w = _solve(*seen, ridge)
            errors.append(float(np.sum(np.square(targets[judges] - x[judges] @ w))) / total)
        best = int(np.argmin(errors))
        if not errors[best] < WORTH:
            return _stored(np.zeros(cross.shape), deviation), 1.0
        return _stored(_solve(gram, cross, RIDGES[best]), deviation), errors[best]


def _sums(x: Array, y: Array) -> tuple[Array, Array]:
    return x.T @ x, x.T @ y


def _solve(gram: Array, cross: Array, ridge: float) -> Array:
    size = len(gram)
    strength = ridge * max(float(np.trace(gram)) / size, 1e-12)
    solved: Array = cho_solve(cho_factor(gram + strength * np.eye(size)), cross)
    return solved


def _stored(w: Array, deviation: Array) -> LinearMap:
    scale = np.abs(w).max(axis=0) / 127
    scale = np.where(scale > 0, scale, 1.0).astype(np.float32)
    weights = np.rint(w / scale.astype(np.float64)).astype(np.int8)
    return LinearMap(weights, deviation.astype(np.float32), scale)
