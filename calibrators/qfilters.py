"""Q-Filters: one direction per KV head along which keys are attended or ignored.

Source: Q-Filters, arXiv 2503.02812 (abstract read; section 3 as described in
DESIGN), and the calibration script of a fork of the authors' code. Queries after RoPE of each query
head, NOT centred, are decomposed by SVD; the first right vector is oriented by its left vector and
averaged over the query heads that share a KV head.

Sign: here + means attended, so a key's score is +(key . filter). The released filters carry the
opposite sign (code that uses them scores by the negative product), orient by the majority sign of
the left vector rather than its sum, and are not renormalized after averaging.
"""

from collections.abc import Mapping

import numpy as np
from threadpoolctl import threadpool_limits

from velox_pack.calibrators.capture import LayerStatistics, Moments
from velox_pack.manifests.artifacts import QFilters
from velox_pack.manifests.errors import CalibrationError

Array = np.ndarray


def fit(statistics: Mapping[int, LayerStatistics]) -> tuple[QFilters, ...]:
    """Unit filters for all layers given, one artifact for each shape of [KV heads, dimension]."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index in sorted(statistics):
        groups.setdefault(statistics[index].keys.total.shape, []).append(index)
    return tuple(
        QFilters(
            filters=np.stack([filters(statistics[i].queries, shape[0]) for i in layers]).astype(
                np.float32
            ),
            layers=tuple(layers),
        )
        for shape, layers in groups.items()
    )


def filters(queries: Moments, kv_heads: int) -> Array:
    """Filters float64 [kv_heads, D] of one layer from its query heads' moments.

    The right singular vector v of the stacked queries is the first eigenvector of their uncentred
    second moment, and the left vector's sum is sum_i(q_i . v) / s, so sums and moments suffice.
    Raises CalibrationError if a head's queries sum to nothing along v (no sign can be given).
    """
    with threadpool_limits(1):
        _, vectors = np.linalg.eigh(queries.second)
    first = vectors[:, :, -1]
    along = np.einsum("hd,hd->h", queries.total, first)
    oriented = first * np.where(along < 0, -1.0, 1.0)[:, None]
    grouped = oriented.reshape(kv_heads, -1, first.shape[1]).mean(axis=1)
    norms = np.linalg.norm(grouped, axis=1, keepdims=True)
    if not np.all(np.isfinite(norms)) or norms.min() < 1e-6:
        raise CalibrationError("the query directions of one KV head cancel: no filter can be given")
    unit: Array = grouped / norms
    return unit
