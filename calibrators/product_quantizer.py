"""k-means with k-means++ seeding, and codebooks for the sub vectors of a row.

k-means++: Arthur and Vassilvitskii 2007 (general knowledge, not read for this): each next centre is
drawn with probability proportional to the squared distance from the centres there are; here the
best of a few such draws is taken, as is usual. Product
quantization cuts a row of D into D / S sub vectors of S and codes each by the nearest of 2**bits
centroids: bits / S bits per element.
"""

from typing import Literal

import numpy as np
from threadpoolctl import threadpool_limits

from velox_pack.manifests.errors import CalibrationError

Array = np.ndarray
Sharing = Literal["layer", "head", "subspace"]

SUB_DIMS = (2, 4, 8)
BITS = (4, 5, 6, 7, 8)
ITERATIONS = 30

_POINTS_PER_CENTROID = 64  # more move the centroids by less than the noise of the sample
_BLOCK = 1 << 16  # distances held at once: what stays in a processor's cache is 6 times faster


def nearest(points: Array, centroids: Array) -> Array:
    """Index int64 [n] of the nearest of centroids [k, d] for points [n, d]; ties: the lower."""
    # |x - c|^2 / 2 less the same for all c, as one product: (x, 1) @ (-c, |c|^2 / 2).
    offset = np.square(centroids).sum(axis=1, keepdims=True) / 2
    table = np.concatenate([-centroids, offset], axis=1).T
    owner = np.empty(len(points), np.int64)
    rows = max(1, _BLOCK // len(centroids))
    for i in range(0, len(points), rows):
        part = points[i : i + rows]
        part = np.concatenate([part, np.ones((len(part), 1))], axis=1)
        np.argmin(part @ table, axis=1, out=owner[i : i + rows])
    return owner


def kmeans(points: Array, k: int, *, seed: int, iterations: int = ITERATIONS) -> Array:
    """Centroids float64 [k, d] of points [n, d]; the same bytes for the same arguments.

    A centroid that lost all its points moves to the point farthest from its own centroid. Raises
    CalibrationError if there are fewer points than centroids, or points that are not finite.
    """
    points = np.asarray(points, np.float64)
    if len(points) < k:
        raise CalibrationError(
            f"k-means of {k} centroids needs at least {k} vectors, got {len(points)}: "
            "calibrate on more tokens or take fewer bits"
        )
    if not np.all(np.isfinite(points)):
        raise CalibrationError("k-means: the vectors hold NaN or infinity")
    rng = np.random.Generator(np.random.PCG64(seed))
    with threadpool_limits(1):
        centroids = _plus_plus(points, k, rng)
        before = np.full(len(points), -1)
        for _ in range(iterations):
            owner = nearest(points, centroids)
            if np.array_equal(owner, before):
                break
            centroids, before = _means(points, owner, centroids), owner
    return centroids


def _plus_plus(points: Array, k: int, rng: np.random.Generator) -> Array:
    """Seeds [k, d]: of a few points drawn at each step, the one that lowers the error most."""
    trials = 2 + int(np.log(k))
    size = np.square(points).sum(axis=1)[:, None]
    one = np.ones_like(size)
    # |x - y|^2 as one product: (-2 x, 1, |x|^2) @ (y, |y|^2, 1).
    left = np.concatenate([-2 * points, one, size], axis=1)
    right = np.concatenate([points, size, one], axis=1).T.copy()
    chosen = np.empty((k, points.shape[1]))
    chosen[0] = points[rng.integers(len(points))]
    distance = np.square(points - chosen[0]).sum(axis=1)
    new = np.empty((trials, len(points)))
    for i in range(1, k):
        cumulated = np.cumsum(distance)
        at = np.searchsorted(cumulated, rng.random(trials) * cumulated[-1], side="right")
        at = np.minimum(at, len(points) - 1)
        np.matmul(left[at], right, out=new)
        np.maximum(new, 0, out=new)
        np.minimum(new, distance, out=new)
        best = int(new.sum(axis=1).argmin())
        chosen[i], distance = points[at[best]], new[best].copy()
    return chosen


def _means(points: Array, owner: Array, centroids: Array) -> Array:
    k = len(centroids)
    count = np.bincount(owner, minlength=k)
    sums = np.stack([np.bincount(owner, column, minlength=k) for column in points.T], axis=1)
    means = np.where(count[:, None] > 0, sums / np.maximum(count, 1)[:, None], centroids)
    empty = np.flatnonzero(count == 0)
    if len(empty):
        distance = np.square(points - means[owner]).sum(axis=1)
        means[empty] = points[np.argsort(-distance, kind="stable")[: len(empty)]]
    return means


def fit(rows: Array, sub: int, bits: int, sharing: Sharing, seed: int) -> Array:
    """Codebooks float64 [C, G, 2**bits, sub] for rows [H, N, D] of one layer.

    C is H, or 1 when the layer shares one; G is D / sub ("subspace"), or 1 when the sub vectors of
    a row share one. Raises CalibrationError for sizes that do not fit.
    """
    heads, count, width = rows.shape
    if sub not in SUB_DIMS or width % sub or bits not in BITS:
        raise CalibrationError(
            f"sub vectors of {sub} with {bits} bits: sizes are {SUB_DIMS} (dividing {width}) and "
            f"bits {BITS[0]} to {BITS[-1]}"
        )
    parts = rows.reshape(heads, count, width // sub, sub)
    if sharing == "layer":
        groups = parts.reshape(1, 1, -1, sub)
    elif sharing == "head":
        groups = parts.reshape(heads, 1, -1, sub)
    elif sharing == "subspace":
        groups = parts.transpose(0, 2, 1, 3)
    else:
        raise CalibrationError(f"sharing is {sharing!r}, not layer, head or subspace")
    k = 2**bits
    found = np.empty((*groups.shape[:2], k, sub))
    for c, g in np.ndindex(*groups.shape[:2]):
        points = groups[c, g]
        most = _POINTS_PER_CENTROID * k
        if len(points) > most:  # drawn, since a stride would favour some of the sub vectors
            rng = np.random.Generator(np.random.PCG64(seed))
            points = points[np.sort(rng.choice(len(points), most, replace=False))]
        found[c, g] = kmeans(points, k, seed=seed)
    return found


def encode(rows: Array, codebooks: Array) -> Array:
    """Codes uint8 [H, N, D / S] of rows [H, N, D] for codebooks [C, G, K, S]."""
    heads, count, width = rows.shape
    c, g, _, sub = codebooks.shape
    parts = rows.reshape(heads, count, width // sub, sub)
    codes = np.empty(parts.shape[:3], np.uint8)
    for h in range(heads):
        for j in range(parts.shape[2]):
            codes[h, :, j] = nearest(parts[h, :, j], codebooks[h % c, j % g])
    return codes


def decode(codes: Array, codebooks: Array) -> Array:
    """Rows [H, N, D] of codes made by `encode`."""
    c, g, _, sub = codebooks.shape
    heads, count, parts = codes.shape
    h = (np.arange(heads) % c)[:, None, None]
    j = (np.arange(parts) % g)[None, None, :]
    rows: Array = codebooks[h, j, codes].reshape(heads, count, parts * sub)
    return rows
