"""GEAR: what rounding leaves over, from a fixed basis, and what to do instead.

Read: the authors' code (opengear-project/GEAR, GEARLM/Simulated/compress_function.py) and the
abstract of 2403.05527: affine rounding in groups (keys along tokens, values along channels); a low
rank part of the error of each head by power iteration, in 16 bits; the smallest and largest numbers
(1 to 5 %) kept apart in 16 bits.

`fit` finds beforehand what a run would iterate for: a basis of the error for each head, the share
of the error that is in it, and the share of outliers that is worth its bytes. Measured on trained
models, a rounding error has hardly a direction: r of D directions hold r / D of it and a little
more (8 of 64: 0.17 to 0.3), for 16 r / D bits, which spent on plain rounding leave 4^-(16 r / D); a
fixed basis or the exact one lose alike, and outliers (22 bits each) lose too. The tables are in
the benchmark.

`correct` is what gains: the error cannot be seen in the error, but it can be told in part from the
decoded numbers, since channels and heads depend on each other. The best linear estimate of x from
its decoded self costs no byte of a token: at 2 bits it leaves 0.6 of the error, at 3 bits 0.85. In
KL at equal bits that is 1.7 times better than KIVI's rounding by MLX on SmolLM2-135M, and no better
at 2 bits on the two smaller models, where the offsets that MLX chooses are worth as much.
"""

from collections.abc import Mapping

import numpy as np

from velox_pack.calibrators import affine_rounding, linear_maps
from velox_pack.calibrators.affine_rounding import (
    GROUP,
    interpolated,
    join,
    relative_error,
    rounded,
    split,
)
from velox_pack.calibrators.joint import group_of, grouped, ungrouped
from velox_pack.calibrators.linear_maps import LinearMap
from velox_pack.calibrators.neighbours import LayerTokens
from velox_pack.calibrators.spectral import eigenbasis
from velox_pack.manifests.artifacts_channels import Gear
from velox_pack.manifests.artifacts_sharing import Correction

Array = np.ndarray

OUTLIER_SHARES = (0.0, 0.02, 0.05)
OUTLIER_BITS = 16 + 6  # a float16 and its place among 64
LATENT_BITS = 16
WIDEST = 256


def fit(
    tokens: Mapping[int, LayerTokens],
    part: str,
    bits: int,
    *,
    rank: int = 4,
    before_rope: bool = False,
    outliers: float | None = None,
) -> tuple[Gear, ...]:
    """A basis of `rank` directions of each head's rounding error, for "keys" or "values".

    `outliers` is chosen by error at equal bytes unless given.
    """
    axis = _axis(part)
    made = []
    for stands, indices in _alike(tokens, part, before_rope).items():
        xs = [tokens[i].part(part, before_rope=stands[0]).astype(np.float64) for i in indices]
        share = best_share(xs, bits, axis) if outliers is None else outliers
        bases, captured = [], []
        for x in xs:
            error = x - sparse_rounded(x, bits, axis, share)[0]
            moment = np.swapaxes(error, 1, 2) @ error
            basis, energy = eigenbasis(moment)
            bases.append(basis[:, :, :rank])
            captured.append(energy[:, :rank].sum(axis=1) / np.maximum(energy.sum(axis=1), 1e-300))
        made.append(
            Gear(
                part=part,
                before_rope=stands[0],
                axis=axis,
                bits=bits,
                group=GROUP,
                outliers=float(share),
                basis=np.stack(bases).astype(np.float16),
                captured=np.stack(captured).astype(np.float32),
                layers=tuple(indices),
            )
        )
    return tuple(made)


def best_share(xs: list[Array], bits: int, axis: str) -> float:
    """The share of outliers that leaves least error against plain rounding of the same bytes."""
    curve = {
        affine_rounding.bits_per_element(b): float(
            np.mean([relative_error(x, rounded(x, b, axis)) for x in xs])
        )
        for b in (bits, bits + 1)
    }
    gains = []
    for share in OUTLIER_SHARES:
        found = [sparse_rounded(x, bits, axis, share) for x in xs]
        error = np.mean([relative_error(x, d) for x, (d, _) in zip(xs, found, strict=True)])
        apart = float(np.mean([kept for _, kept in found]))
        at = affine_rounding.bits_per_element(bits) + apart * OUTLIER_BITS
        gains.append(float(error) / interpolated(curve, at))
    return OUTLIER_SHARES[int(np.argmin(gains))]


def sparse_rounded(x: Array, bits: int, axis: str, share: float) -> tuple[Array, float]:
    """Vectors [H, N, D] decoded, each group's smallest and largest kept, and the share kept."""
    if not share:
        return rounded(x, bits, axis), 0.0
    groups = split(np.asarray(x, np.float64), axis, GROUP)
    count = max(1, round(share * groups.shape[-1] / 2))
    order = np.argsort(groups, axis=-1, kind="stable")
    apart = np.zeros(groups.shape, bool)
    for ends in (order[..., :count], order[..., -count:]):
        np.put_along_axis(apart, ends, True, axis=-1)
    middle = np.mean(groups, axis=-1, keepdims=True, where=~apart)
    filled = join(np.where(apart, middle, groups), axis, x.shape)
    mask = join(apart, axis, x.shape)
    return np.where(mask, affine_rounding.half(x), rounded(filled, bits, axis)), float(mask.mean())


def decoded(artifact: Gear, row: int, x: Array) -> tuple[Array, float]:
    """Vectors [H, N, D] through rounding, outliers and the fixed basis; bits of each number."""
    out, apart = sparse_rounded(x, artifact.bits, artifact.axis, artifact.outliers)
    basis = np.asarray(artifact.basis[row], np.float64)
    latents = affine_rounding.half((np.asarray(x, np.float64) - out) @ basis)
    bits = affine_rounding.bits_per_element(artifact.bits, group=artifact.group)
    bits += apart * OUTLIER_BITS + LATENT_BITS * basis.shape[2] / basis.shape[1]
    return out + latents @ np.swapaxes(basis, 1, 2), bits


def correct(
    tokens: Mapping[int, LayerTokens], part: str, bits: int, *, before_rope: bool = True
) -> tuple[Correction, ...]:
    """The best linear estimate of "keys" or "values" from their rounded selves."""
    axis = _axis(part)
    made = []
    for (stands, (heads, dim)), indices in _alike(tokens, part, before_rope).items():
        group = group_of(heads, dim, WIDEST)
        rows = []
        for i in indices:
            x = tokens[i].part(part, before_rope=stands).astype(np.float64)
            out = rounded(x, bits, axis)
            middle = out.mean(axis=1, keepdims=True)
            rest = x - out
            sources, targets = grouped(out - middle, group), grouped(rest, group)
            targets = targets - targets.mean(axis=1, keepdims=True)
            pairs = zip(sources, targets, strict=True)
            maps = [linear_maps.fit(s, t, tokens[i].run)[0] for s, t in pairs]
            matrix = np.stack([m.matrix() for m in maps])
            bias = rest.mean(axis=1, keepdims=True)
            bias = bias - ungrouped(grouped(middle, group) @ matrix, group)
            better = out + bias + ungrouped(grouped(out, group) @ matrix, group)
            errors = relative_error(x, out), relative_error(x, better)
            fields = ((m.weights, m.inputs, m.outputs) for m in maps)
            stored = [np.stack(c) for c in zip(*fields, strict=True)]
            rows.append((*stored, bias[:, 0], *errors))
        weights, inputs, outputs, bias, plain, corrected = (
            np.stack(c) for c in zip(*rows, strict=True)
        )
        made.append(
            Correction(
                part=part,
                before_rope=stands,
                axis=axis,
                bits=bits,
                group_size=GROUP,
                group=group,
                weights=weights,
                inputs=inputs,
                outputs=outputs,
                bias=bias.astype(np.float32),
                plain=plain.astype(np.float32),
                corrected=corrected.astype(np.float32),
                layers=tuple(indices),
            )
        )
    return tuple(made)


def corrected(artifact: Correction, row: int, x: Array) -> Array:
    """Vectors [H, N, D] rounded and corrected, float64."""
    out = rounded(x, artifact.bits, artifact.axis, group=artifact.group_size)
    stored = (artifact.weights[row], artifact.inputs[row], artifact.outputs[row])
    matrix = np.stack([LinearMap(*g).matrix() for g in zip(*stored, strict=True)])
    bias = np.asarray(artifact.bias[row], np.float64)[:, None]
    better: Array = out + bias + ungrouped(grouped(out, artifact.group) @ matrix, artifact.group)
    return better


def _axis(part: str) -> str:
    return "channel" if part == "keys" else "token"


def _alike(
    tokens: Mapping[int, LayerTokens], part: str, before_rope: bool
) -> dict[tuple[bool, tuple[int, int]], list[int]]:
    groups: dict[tuple[bool, tuple[int, int]], list[int]] = {}
    for index, layer in sorted(tokens.items()):
        heads, _, dim = layer.part(part).shape
        stands = before_rope and part == "keys" and layer.rotated
        groups.setdefault((stands, (heads, dim)), []).append(index)
    return groups
