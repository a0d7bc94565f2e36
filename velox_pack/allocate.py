"""Bits of a plan: how many each coordinate gets, and how RateQuant spreads them over layers."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from velox_pack.caches import recipes
from velox_pack.calibrators import ratequant, spectral_metric, waterfill
from velox_pack.calibrators.sensitivity import Sensitivity
from velox_pack.manifests.artifacts import Artifact, Widths
from velox_pack.manifests.artifacts_scalar import JointSpectral
from velox_pack.manifests.manifest import Layer
from velox_pack.seen import Seen

Bits = dict[int, tuple[float, float]]


def fit(seen: Seen, options: Mapping[str, Any]) -> Iterable[Artifact]:
    """The widths of a plan's coding `options["plan"]`, and the allocation they follow, if any."""
    plan = recipes.parse(options["plan"])
    wanted = plan.recipe.bits_of()
    bits = {layer.index: wanted for layer in seen.covered}
    if plan.ratequant:
        found, bits = _allocate(plan, seen, seen.sensitivity(plan.behind or 0))
        yield from found
    groups: dict[tuple[int, ...], list[Layer]] = {}
    for layer in seen.covered:
        shapes = (_costs(plan, part, layer, seen).shape[1] for part in ("keys", "values"))
        groups.setdefault(tuple(shapes), []).append(layer)
    for layers in groups.values():
        rows: dict[str, list[np.ndarray]] = {"keys": [], "values": []}
        for layer in layers:
            for part, given in zip(rows, bits[layer.index], strict=True):
                rows[part].append(waterfill.widths(_costs(plan, part, layer, seen), given)[0])
        yield Widths(
            plan=plan.coding,
            bits=_average(wanted, seen.covered),
            keys=np.stack(rows["keys"]),
            values=np.stack(rows["values"]),
            layers=tuple(layer.index for layer in layers),
        )


def _average(wanted: tuple[float, float], covered: list[Layer]) -> float:
    """Average bits per element of all covered layers."""
    keys = sum(layer.kv_heads * layer.k_dim for layer in covered)
    values = sum(layer.kv_heads * layer.v_dim for layer in covered)
    return (wanted[0] * keys + wanted[1] * values) / (keys + values)


def _allocate(
    plan: recipes.Plan, seen: Seen, measured: Sensitivity
) -> tuple[Iterable[Artifact], Bits]:
    """RateQuant's bits for keys and values of each layer, from this plan's own distortion."""
    curves = {
        part: {
            layer.index: _curve(plan, part, layer, seen, getattr(measured, part)[layer.index])
            for layer in seen.covered
        }
        for part in ("keys", "values")
    }
    dims = {layer.index: (layer.k_dim, layer.v_dim) for layer in seen.covered}
    target = _average(plan.recipe.bits_of(), seen.covered)
    # Down to 1 bit: with sensitivities of what is coded alone that wins (benchmarks/cache_quality).
    found = ratequant.allocate(measured, curves["keys"], curves["values"], target, dims, lowest=1.0)
    bits = {
        layer: (float(a.keys[row]), float(a.values[row]))
        for a in found
        for row, layer in enumerate(a.layers)
    }
    return found, bits


def _basis(plan: recipes.Plan, part: str, layer: Layer, seen: Seen) -> tuple[Any, int] | None:
    """The artifact of the plan's calibrated basis for a layer, and its row; None without one."""
    if part in plan.recipe.bases:
        for artifact in seen.made(plan.recipe.bases[part]):
            if layer.index in artifact.layers:
                return artifact, artifact.layers.index(layer.index)
    return None


def _costs(plan: recipes.Plan, part: str, layer: Layer, seen: Seen) -> np.ndarray:
    """What errors of the coded coordinates cost, [H, D] or [G, C]; equal after a random rotation.

    In the order of the codes, which is that of falling cost.
    """
    found = _basis(plan, part, layer, seen)
    if found is None:
        return np.ones((layer.kv_heads, layer.k_dim if part == "keys" else layer.v_dim))
    artifact, row = found
    if isinstance(artifact, JointSpectral):
        cost: np.ndarray = artifact.cost[row]
        return cost
    variance: np.ndarray = artifact.variance[row]
    shares: np.ndarray = variance / variance.sum(axis=-1, keepdims=True)
    return shares


def _curve(
    plan: recipes.Plan, part: str, layer: Layer, seen: Seen, sensitivity: np.ndarray
) -> ratequant.Distortion:
    """How the error of this plan's codes falls with bits, in units of a layer's sensitivity [H]."""
    found = _basis(plan, part, layer, seen)
    if found is not None and isinstance(found[0], JointSpectral):
        return spectral_metric.distortion(*found)
    return ratequant.lloyd_distortion(_costs(plan, part, layer, seen), sensitivity)
