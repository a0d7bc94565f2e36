"""MiniCache: two layers in a row keep one direction of each token, and their own lengths.

Read: the abstract and reviews of 2405.14366 (section 3 as they give it): from the middle of the
model on, the directions of a pair of layers are merged by spherical interpolation, lengths are kept
for both, and tokens whose directions are far apart by angle stay unmerged.

What is calibrated: the cosine between neighbours, which pairs are worth merging, and the angular
distance beyond which a token is retained, for a wanted share of tokens. `align` turns a layer into
the coordinates of the one before (the orthogonal matrix that brings the directions nearest, all
heads of a group together, each layer's mean off) before merging. Measured on the trained models at
hand, plain directions of neighbours are at a right angle (mean cosine below 0.1), so that merging
leaves half of the square; aligned, cosines are 0.66 to 0.75 and it leaves 0.03 (keys) to 0.14
(values), which is worth it up to about 2 bits. Retaining tokens costs more than it gives there.
"""

from collections.abc import Mapping

import numpy as np
from threadpoolctl import threadpool_limits

from velox_pack.calibrators.affine_rounding import relative_error
from velox_pack.calibrators.joint import group_of, grouped, ungrouped
from velox_pack.calibrators.neighbours import LayerTokens
from velox_pack.calibrators.vector_tools import unit_rows
from velox_pack.manifests.artifacts_sharing import MiniCache
from velox_pack.manifests.errors import CalibrationError

Array = np.ndarray

RETAINED = 0.05
MIDDLE = 0.5
WIDEST = 256
TOLERATED = 0.25  # a pair whose merged directions lose more of the square is left alone
_PARALLEL = 1e-6


def fit(
    tokens: Mapping[int, LayerTokens],
    part: str,
    *,
    align: bool = True,
    before_rope: bool = True,
    t: float = MIDDLE,
    retained: float = RETAINED,
    start: float = MIDDLE,
    tolerated: float = TOLERATED,
) -> tuple[MiniCache, ...]:
    """Pairs of layers to merge, for "keys" or "values" of all layers of the sample.

    `start` is the share of layers, from the first on, that stays unmerged; of the others every two
    neighbours are a pair if merging leaves at most `tolerated` of their square. Raises
    CalibrationError for shares beyond 0 to 1.
    """
    for name, share in (("t", t), ("retained", retained), ("start", start)):
        if not 0 <= share <= 1:
            raise CalibrationError(f"minicache: {name} is {share}, not 0 to 1")
    groups: dict[tuple[bool, tuple[int, ...]], list[int]] = {}
    for index, layer in sorted(tokens.items()):
        stands = before_rope and part == "keys" and layer.rotated
        groups.setdefault((stands, layer.part(part).shape), []).append(index)
    first = sorted(tokens)[int(start * len(tokens)) :]
    made = []
    for (stands, shape), indices in groups.items():
        group = group_of(shape[0], shape[2], WIDEST) if align else 1
        xs = {i: tokens[i].part(part, before_rope=stands).astype(np.float64) for i in indices}
        rows = []
        free = -1  # the last layer that could be the first of a pair
        for n, index in enumerate(indices):
            follows = n > 0 and indices[n - 1] == index - 1
            row = _row(xs[index - 1] if follows else None, xs[index], group, align, t, retained)
            worth = follows and index - 1 in first and free == index - 1 and row[-1] <= tolerated
            free = index if not worth else -1
            rows.append((index - 1 if worth else -1, *row))
        partner, similarity, gamma, mean, turn, error = (
            np.stack(c) for c in zip(*rows, strict=True)
        )
        made.append(
            MiniCache(
                part=part,
                before_rope=stands,
                group=group,
                t=float(t),
                retained=float(retained),
                partner=partner.astype(np.int32),
                similarity=similarity.astype(np.float32),
                gamma=gamma.astype(np.float32),
                mean=mean.astype(np.float32),
                turn=turn.astype(np.float16),
                error=error.astype(np.float32),
                layers=tuple(indices),
            )
        )
    return tuple(made)


def _row(
    before: Array | None, x: Array, group: int, align: bool, t: float, retained: float
) -> tuple[Array, Array, Array, Array, Array]:
    """Similarity [G], gamma, mean [H, D], turn [G, E, E], error, against the layer before."""
    mean = x.mean(axis=1) if align else np.zeros(x.shape[::2])
    count, width = x.shape[0] // group, x.shape[2] * group
    turn = np.broadcast_to(np.eye(width if align else 1), (count, *(width if align else 1,) * 2))
    if before is None:
        return np.zeros(count), np.zeros(()), mean, turn, np.zeros(())
    origin = before.mean(axis=1) if align else np.zeros(x.shape[::2])
    a, b = grouped(before - origin[:, None], group), grouped(x - mean[:, None], group)
    if align:
        turn = alignment(a, b).astype(np.float16).astype(np.float64)
        b = b @ turn
    cosine = np.sum(unit_rows(a) * unit_rows(b), axis=-1)
    gamma = np.quantile(angular(cosine).mean(axis=0), 1 - retained)
    merged = merge(a, b, t)
    keep = (angular(cosine).mean(axis=0) > gamma)[None, :, None]
    rests = [np.where(keep, v, np.sum(v * merged, axis=-1, keepdims=True) * merged) for v in (a, b)]
    wrong = sum(float(np.sum(np.square(v - r))) for v, r in zip((a, b), rests, strict=True))
    square = float(np.sum(np.square(before)) + np.sum(np.square(x)))
    return (
        cosine.mean(axis=1),
        np.asarray(gamma),
        mean,
        turn,
        np.asarray(wrong / max(square, 1e-300)),
    )


def alignment(a: Array, b: Array) -> Array:
    """Orthogonal [G, C, C] that turn rows b [G, N, C] towards a: the directions' Procrustes."""
    with threadpool_limits(1):
        left, _, right = np.linalg.svd(np.swapaxes(unit_rows(b), 1, 2) @ unit_rows(a))
    turn: Array = left @ right
    return turn


def angular(cosine: Array) -> Array:
    """Angle over pi: 0 the same direction, 1 the opposite."""
    distance: Array = np.arccos(np.clip(cosine, -1, 1)) / np.pi
    return distance


def merge(a: Array, b: Array, t: float) -> Array:
    """Unit vectors between the directions of rows a and b [..., C] by spherical interpolation."""
    a, b = unit_rows(a), unit_rows(b)
    cosine = np.clip(np.sum(a * b, axis=-1, keepdims=True), -1, 1)
    angle = np.arccos(cosine)
    sine = np.sin(angle)
    near = sine < _PARALLEL
    safe = np.where(near, 1.0, sine)
    first = np.where(near, 1 - t, np.sin((1 - t) * angle) / safe)
    second = np.where(near, t, np.sin(t * angle) / safe)
    return unit_rows(first * a + second * b)


def encode(artifact: MiniCache, row: int, before: Array, x: Array) -> tuple[Array, Array, Array]:
    """What a pair keeps of vectors [H, N, D] of the layer before and of layer `row`.

    Directions [G, N, C] of unit length, signed lengths [2, G, N] along them, and a mask bool [N] of
    tokens to keep unmerged.
    """
    place = artifact.layers.index(int(artifact.partner[row]))
    a = grouped(before - np.asarray(artifact.mean[place], np.float64)[:, None], artifact.group)
    b = grouped(x - np.asarray(artifact.mean[row], np.float64)[:, None], artifact.group)
    b = _turned(artifact, row, b)
    merged = merge(a, b, artifact.t)
    lengths = np.stack([np.sum(v * merged, axis=-1) for v in (a, b)])
    distance = angular(np.sum(unit_rows(a) * unit_rows(b), axis=-1)).mean(axis=0)
    return merged, lengths, distance > float(artifact.gamma[row])


def decode(artifact: MiniCache, row: int, merged: Array, lengths: Array) -> tuple[Array, Array]:
    """Vectors float64 [H, N, D] of the layer before and of layer `row`, all merged."""
    place = artifact.layers.index(int(artifact.partner[row]))
    a, b = lengths[0][..., None] * merged, lengths[1][..., None] * merged
    b = _turned(artifact, row, b, back=True)
    means = [np.asarray(artifact.mean[n], np.float64)[:, None] for n in (place, row)]
    first, second = (ungrouped(v, artifact.group) + m for v, m in zip((a, b), means, strict=True))
    return first, second


def _turned(artifact: MiniCache, row: int, x: Array, *, back: bool = False) -> Array:
    turn = np.asarray(artifact.turn[row], np.float64)
    if turn.shape[-1] == 1:
        return x
    turned: Array = x @ (np.swapaxes(turn, 1, 2) if back else turn)
    return turned


def pair_error(pair: tuple[Array, Array], decoded: tuple[Array, Array]) -> float:
    """Relative squared error of two layers together."""
    return relative_error(np.stack(pair), np.stack(decoded))
