"""Low-rank latents of KV heads, a group of heads together, with more bits for stronger latents.

Sources: SVDq, 2502.15304 (abstract and introduction read): keys without their mean are turned into
the latent channels of an SVD, which get bits by importance, down to none; there the SVD is made of
the prompt, here of the calibration, once. PALU, 2407.21118 (abstract and the official code,
shadowpa0327/Palu, read): bases for groups of heads, from weights whitened by the second moment of
their inputs, which is the eigenbasis of the outputs' own second moment and taken as such here; and
ranks that follow the Fisher information (`palu_ranks`).

Heads of a group share a basis because they repeat each other in part (`joint`). This is the papers'
way with them, kept for comparison; `spectral_metric` goes further.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from velox_pack.calibrators import waterfill
from velox_pack.calibrators.codebooks import MAX_BITS, lloyd_max
from velox_pack.calibrators.joint import Joint, by_shape, grouped, ungrouped
from velox_pack.calibrators.spectral import NORM_CODES, eigenbasis, norm_range
from velox_pack.manifests.artifacts_scalar import LowRank
from velox_pack.manifests.errors import CalibrationError

Array = np.ndarray


def ranks_by_energy(variance: Array, energy: float) -> Array:
    """Least ranks [G] that keep this share of the variance; `variance` [G, C] descending."""
    if not 0 < energy <= 1:
        raise ValueError(f"energy is {energy}, not above 0 and at most 1")
    table = np.atleast_2d(variance)
    kept = np.cumsum(table, axis=1) / np.maximum(table.sum(axis=1, keepdims=True), 1e-300)
    ranks: Array = np.minimum((kept < energy - 1e-12).sum(axis=1) + 1, table.shape[1])
    return ranks


def ranks_by_budget(variances: Sequence[Array], total: int, *, block: int = 1) -> list[int]:
    """Ranks of units whose sum is at most `total`, losing the least variance altogether.

    `variances[u]` [C_u] descending, times whatever an error of the unit costs. A rank is a
    multiple of `block`, at least one block. Since gains fall along a unit, giving every next block
    to the unit that gains most is the optimum. Raises ValueError if the budget has no room.
    """
    gains = []
    for u, variance in enumerate(variances):
        whole = len(variance) // block
        if whole < 1:
            raise ValueError(f"unit {u} has {len(variance)} coordinates, less than a block")
        sums = np.asarray(variance, np.float64)[: whole * block].reshape(whole, block).sum(axis=1)
        gains += [(-gain, n, u) for n, gain in enumerate(sums)]
    if total < block * len(variances):
        raise ValueError(f"a budget of {total} for {len(variances)} units of {block} at least")
    ranks = [block] * len(variances)
    left = total // block - len(variances)
    for _, n, u in sorted(gain for gain in gains if gain[1] > 0)[:left]:
        ranks[u] = (n + 1) * block
    return ranks


def palu_ranks(fisher: Sequence[float], sizes: Sequence[int], ratio: float) -> list[int]:
    """PALU's rule: ranks in proportion to each unit's Fisher information, none above its size.

    What does not fit into a unit goes to the others in proportion; the sum is `ratio` of all sizes
    rounded down.
    """
    weight, size = np.asarray(fisher, np.float64), np.asarray(sizes, np.float64)
    if not 0 < ratio <= 1 or weight.min() < 0 or not weight.sum() > 0:
        raise ValueError(f"ratio {ratio} must be above 0 and at most 1, and Fisher not negative")
    target = ratio * size.sum()
    real = np.zeros_like(size)
    while target - real.sum() > 1e-9 and np.any(open_ := (real < size) & (weight > 0)):
        share = np.where(open_, weight, 0.0)
        real = np.minimum(size, real + (target - real.sum()) * share / share.sum())
    ranks = np.maximum(np.floor(real + 1e-9), 1).astype(np.int64)
    for u in np.argsort(ranks - real, kind="stable")[: max(0, int(target - ranks.sum()))]:
        ranks[u] = min(ranks[u] + 1, int(size[u]))
    return [int(rank) for rank in ranks]


def schedule_widths(count: int, schedule: Sequence[int]) -> Array:
    """SVDq's allocation: latents in equal parts, one width for each, such as (8, 4, 2, 0)."""
    if not schedule or count % len(schedule) or min(schedule) < 0 or max(schedule) > 8:
        raise ValueError(f"{schedule} is no schedule of 0 to 8 bits for {count} latents")
    return np.repeat(np.asarray(schedule, np.uint8), count // len(schedule))


def fit(
    joint: Mapping[int, Joint],
    part: str,
    bits: float,
    *,
    energy: float = 1.0,
    ranks: Mapping[int, Sequence[int]] | None = None,
    schedule: Sequence[int] | None = None,
) -> tuple[LowRank, ...]:
    """Bases and widths of all layers given, `bits` per coordinate of the original vectors.

    Latents beyond a group's rank (by `energy`, or `ranks[layer]` by group) are dropped; the others
    share the bits of the whole vector by water-filling, or follow `schedule`, and those that get
    none are dropped as well. Layers that agree in shape and in standing before RoPE are stacked.
    Raises CalibrationError for moments that are not finite, ValueError for bits out of 0 to 8.
    """
    artifacts = []
    for (before, group, _), layers in by_shape(joint).items():
        rows = []
        for i in layers:
            moments = joint[i].moments
            if not np.all(np.isfinite(moments.second)):
                raise CalibrationError(f"layer {i}: {part} have no finite second moments")
            basis, variance = eigenbasis(moments.covariance)
            wanted = None if ranks is None else ranks[i]
            given = _widths(variance, bits, energy, wanted, schedule)
            kept = basis * (given[:, None, :] > 0)
            latents = (joint[i].sample - moments.mean[:, None, :]) @ kept
            rows.append((moments.mean, kept, variance, given, norm_range(latents)))
        mean, basis, variance, given, log_norm = (np.stack(a) for a in zip(*rows, strict=True))
        most = max(1, int((given > 0).sum(axis=-1).max()))
        artifacts.append(
            LowRank(
                part=part,
                before_rope=before,
                group=group,
                mean=mean.astype(np.float32),
                basis=basis[..., :most].astype(np.float16),
                variance=variance[..., :most].astype(np.float32),
                widths=given[..., :most],
                log_norm=log_norm.astype(np.float32),
                layers=tuple(layers),
            )
        )
    return tuple(artifacts)


def _widths(
    variance: Array,
    bits: float,
    energy: float,
    ranks: Sequence[int] | None,
    schedule: Sequence[int] | None,
) -> Array:
    """Widths uint8 [G, C] of the latents of one layer."""
    groups, count = variance.shape
    total = waterfill.WORD * round(bits * count / waterfill.WORD)
    kept = ranks_by_energy(variance, energy) if ranks is None else np.asarray(ranks)
    result = np.zeros((groups, count), np.uint8)
    for g in range(groups):
        if schedule is not None:
            row = schedule_widths(count, schedule)
        else:
            most = MAX_BITS * int(kept[g])
            row = waterfill.spend(variance[g, : kept[g]], min(total, most))
        result[g, : kept[g]] = row[: kept[g]]
    return result


def encode(artifact: LowRank, row: int, x: Array) -> tuple[Array, Array]:
    """Codes uint8 [G, N, R] of vectors [H, N, D], and the 8-bit codes uint8 [G, N] of their scale.

    As in the rotated scalar codec, the scale is what brings the decoded latents closest.
    """
    centred = grouped(np.asarray(x, np.float64), artifact.group) - artifact.mean[row][:, None, :]
    y = centred @ artifact.basis[row].astype(np.float64)
    size = np.maximum(np.linalg.norm(y, axis=-1, keepdims=True), 1e-20)
    unit = y / (size * _sigma(artifact, row))
    codes = np.zeros(y.shape, np.uint8)
    for g, width, at in _runs(artifact.widths[row]):
        levels, _ = lloyd_max(width)
        codes[g][:, at] = np.searchsorted((levels[1:] + levels[:-1]) / 2, unit[g][:, at])
    shape = _shape(artifact, row, codes)
    fitted = (y * shape).sum(axis=-1) / np.maximum(np.square(shape).sum(axis=-1), 1e-20)
    low, step = (float(v) for v in artifact.log_norm[row])
    scale = np.rint((np.log(np.maximum(fitted, 1e-30)) - low) / step)
    return codes, np.clip(scale, 0, NORM_CODES - 1).astype(np.uint8)


def decode(artifact: LowRank, row: int, codes: Array, scale: Array) -> Array:
    """Vectors float32 [H, N, D] of what `encode` gives."""
    low, step = (float(v) for v in artifact.log_norm[row])
    y = _shape(artifact, row, codes) * np.exp(low + scale[..., None].astype(np.float64) * step)
    basis = artifact.basis[row].astype(np.float64)
    x = y @ np.swapaxes(basis, 1, 2) + artifact.mean[row][:, None, :]
    return ungrouped(x.astype(np.float32), artifact.group)


def bits_per_element(artifact: LowRank, row: int) -> float:
    """Bits of a number of the original vectors: codes in whole words, a scale for each group."""
    groups, width = artifact.mean.shape[1:]
    codes = artifact.widths[row].astype(np.int64).sum(axis=-1)
    words = -(-codes // waterfill.WORD) * waterfill.WORD
    return float((words.sum() + 8 * groups) / (groups * width))


def _sigma(artifact: LowRank, row: int) -> Array:
    """Deviation [G, 1, R] of each latent of a vector of norm 1."""
    variance = artifact.variance[row].astype(np.float64) * (artifact.widths[row] > 0)
    whole = variance.sum(axis=-1, keepdims=True)
    share: Array = np.sqrt(np.maximum(variance / np.maximum(whole, 1e-30), 1e-12))
    return share[:, None, :]


def _runs(widths: Array) -> list[tuple[int, int, Array]]:
    """(group, width, mask of latents) for every width above 0 in use."""
    return [(g, w, row == w) for g, row in enumerate(widths) for w in sorted({*row.tolist()} - {0})]


def _shape(artifact: LowRank, row: int, codes: Array) -> Array:
    """Latents [G, N, R] of codes at scale 1."""
    shape: Array = np.zeros(codes.shape)
    for g, width, at in _runs(artifact.widths[row]):
        shape[g][:, at] = lloyd_max(width)[0][codes[g][:, at]]
    shape *= _sigma(artifact, row)
    return shape
