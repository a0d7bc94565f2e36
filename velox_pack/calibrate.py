"""From a job to artifacts: run the model over the text once, then fit what the plans need."""

from collections.abc import Callable, Iterable
from typing import TypeVar

import numpy as np

from velox_pack.caches import recipes
from velox_pack.calibrators import (
    center,
    codebooks,
    qfilters,
    ratequant,
    sensitivity,
    spectral,
    waterfill,
)
from velox_pack.calibrators.capture import LayerStatistics, capture
from velox_pack.calibrators.sensitivity import Sensitivity
from velox_pack.calibrators.stream import StreamingForward
from velox_pack.job import Job, rope_groups
from velox_pack.kernels.rotation import make_rotation
from velox_pack.manifests.artifacts import Artifact, Rope, Rotation, Spectral, Widths
from velox_pack.manifests.manifest import Layer

Report = Callable[[str], None]
A = TypeVar("A", bound=Artifact)
SENSITIVITY_SEQUENCES = 8  # a backward pass costs more than a forward one and needs fewer tokens


def calibrate(job: Job, report: Report) -> tuple[dict[str, Artifact], dict[str, list[str]]]:
    """All artifacts of the job by id, and the ids that each cache plan reads."""
    covered = [layer for layer in job.layers if layer.covered]
    artifacts: dict[str, Artifact] = {**_ropes(job)}
    statistics: dict[int, LayerStatistics] = {}
    if job.text is not None:
        report(f"capturing attention over {job.text.tokens.size} tokens")
        indices = {layer.index for layer in covered}
        traces = [t for t in job.traces if t.index in indices]
        streaming = StreamingForward(job.source.skeleton(), job.source.weights)
        statistics = capture(streaming, job.text.tokens, traces, seed=job.seed)
        artifacts |= _named("qfilters", qfilters.fit(statistics))
    needs = job.needs
    measured: Sensitivity | None = None
    if job.text is not None and "allocation" in needs:
        report("measuring sensitivities")
        few = job.text.tokens[:SENSITIVITY_SEQUENCES]
        streaming = StreamingForward(job.source.skeleton(), job.source.weights)
        window = min(p.recipe.window + p.recipe.flush // 2 for _, p in job.caches if p.ratequant)
        measured = sensitivity.measure(
            streaming, few, traces, statistics, window=window, seed=job.seed
        )
    if "codebook" in needs or not (artifacts or job.specs):  # mlx-lm wants some model*.safetensors
        artifacts["codebook-gaussian"] = codebooks.fit()
    if "rotation" in needs:
        for width in sorted({d for layer in covered for d in (layer.k_dim, layer.v_dim)}):
            artifacts[f"rotation-{width}"] = _rotation(width, job.seed)
    if "spectral-keys" in needs:
        report("fitting spectral bases")
        artifacts |= _named("spectral-keys", spectral.fit(statistics, "keys"))
    if "center-values" in needs:
        artifacts |= _named("center-values", center.fit(statistics, "values"))
    plans = {}
    for number, (name, plan) in enumerate(job.caches):
        own = _bits(number, plan, artifacts, covered, measured)
        artifacts |= own
        plans[name] = sorted([*own, *_shared(plan, artifacts)])
    return artifacts, plans


def _shared(plan: recipes.Plan, artifacts: Iterable[str]) -> list[str]:
    """Ids of the artifacts that serve every plan with this recipe's needs."""
    wanted = tuple(need for need in plan.recipe.needs if need != "widths")
    return [i for i in artifacts if i.startswith(wanted)] if wanted else []


def _named(stem: str, fitted: Iterable[A]) -> dict[str, A]:
    """Ids for the artifacts of one kind: the stem, then stem-2, ... for layers of other shapes."""
    return {stem if n == 0 else f"{stem}-{n + 1}": a for n, a in enumerate(fitted)}


def _ropes(job: Job) -> dict[str, Artifact]:
    covered = {layer.index for layer in job.layers if layer.covered}
    found: dict[str, Artifact] = {}
    for name, group in rope_groups([t for t in job.traces if t.index in covered]).items():
        specs = [t.rope for t in group if t.rope is not None]
        found[name] = Rope(
            dims=specs[0].dims,
            traditional=specs[0].traditional,
            inv_freq=np.array([s.inv_freq for s in specs], dtype=np.float32),
            layers=tuple(t.index for t in group),
        )
    return found


def _rotation(width: int, seed: int) -> Rotation:
    made = make_rotation(width, seed)
    mix = np.ones((1, 1), np.float32) if made.mix is None else np.array(made.mix)
    signs = np.array(made.signs).astype(np.int8)
    return Rotation(width=width, block=made.block, signs=signs, mix=mix)


def _bits(
    number: int,
    plan: recipes.Plan,
    artifacts: dict[str, Artifact],
    covered: list[Layer],
    measured: Sensitivity | None,
) -> dict[str, Artifact]:
    """The widths of a plan, and the allocation that they follow if RateQuant spreads its bits."""
    wanted = plan.recipe.bits_of()
    if wanted is None:
        return {}
    found: dict[str, Artifact] = {}
    bits = {layer.index: wanted for layer in covered}
    if plan.ratequant and measured is not None:
        found, bits = _allocate(number, plan, artifacts, covered, measured)
    groups: dict[tuple[int, int], list[Layer]] = {}
    for layer in covered:
        groups.setdefault((layer.k_dim, layer.v_dim), []).append(layer)
    for n, layers in enumerate(groups.values()):
        rows: dict[str, list[np.ndarray]] = {"keys": [], "values": []}
        for layer in layers:
            for part, given in zip(rows, bits[layer.index], strict=True):
                variances = _variances(plan, part, layer, artifacts)
                rows[part].append(waterfill.widths(variances, given)[0])
        widths = Widths(
            plan=plan.canonical,
            bits=_average(wanted, covered),
            keys=np.stack(rows["keys"]),
            values=np.stack(rows["values"]),
            layers=tuple(layer.index for layer in layers),
        )
        found[f"widths-{number}" if n == 0 else f"widths-{number}-{n + 1}"] = widths
    return found


def _average(wanted: tuple[float, float], covered: list[Layer]) -> float:
    """Average bits per element of all covered layers."""
    keys = sum(layer.kv_heads * layer.k_dim for layer in covered)
    values = sum(layer.kv_heads * layer.v_dim for layer in covered)
    return (wanted[0] * keys + wanted[1] * values) / (keys + values)


def _allocate(
    number: int,
    plan: recipes.Plan,
    artifacts: dict[str, Artifact],
    covered: list[Layer],
    measured: Sensitivity,
) -> tuple[dict[str, Artifact], dict[int, tuple[float, float]]]:
    """RateQuant's bits for keys and values of each layer, from this plan's own distortion."""
    curves = {
        part: {
            layer.index: ratequant.lloyd_distortion(
                _variances(plan, part, layer, artifacts), getattr(measured, part)[layer.index]
            )
            for layer in covered
        }
        for part in ("keys", "values")
    }
    dims = {layer.index: (layer.k_dim, layer.v_dim) for layer in covered}
    target = _average(plan.recipe.bits_of(), covered)
    # Down to 1 bit: with sensitivities of what is coded alone that wins (benchmarks/cache_quality).
    found = ratequant.allocate(measured, curves["keys"], curves["values"], target, dims, lowest=1.0)
    bits = {
        layer: (float(a.keys[row]), float(a.values[row]))
        for a in found
        for row, layer in enumerate(a.layers)
    }
    named: dict[str, Artifact] = {**_named(f"allocation-{number}", found)}
    return named, bits


def _variances(
    plan: recipes.Plan, part: str, layer: Layer, artifacts: dict[str, Artifact]
) -> np.ndarray:
    """Variances [H, D] of the coordinates that the plan codes; equal after a random rotation."""
    if part in plan.recipe.spectral_parts:
        for a in artifacts.values():
            if isinstance(a, Spectral) and a.part == part and layer.index in a.layers:
                row: np.ndarray = a.variance[a.layers.index(layer.index)]
                shares: np.ndarray = row / row.sum(axis=-1, keepdims=True)
                return shares
    return np.ones((layer.kv_heads, layer.k_dim if part == "keys" else layer.v_dim))
