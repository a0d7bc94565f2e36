"""Conversion: a checked job becomes a bundle, or nothing at all."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub.repocard import metadata_load
from threadpoolctl import threadpool_limits

from velox_pack import weights as weight_plans
from velox_pack.calibrate import calibrate
from velox_pack.card import card
from velox_pack.door import DOOR
from velox_pack.environment import versions
from velox_pack.job import Job, plan
from velox_pack.kernels.rotation import StructuredRotation
from velox_pack.known_sources import remember
from velox_pack.manifests.manifest import (
    VERSION,
    ArtifactRecord,
    CachePlan,
    Calibration,
    Manifest,
    Model,
    Source,
)
from velox_pack.manifests.writer import BundleWriter

Report = Callable[[str], None]
PRODUCERS = ("velox-pack", "mlx", "mlx-lm", "numpy", "scipy", "safetensors")
MODEL_FILE = "velox_model.py"


def convert(
    source: str | Path, out: str | Path, *, report: Report | None = None, **options: Any
) -> Path:
    """Calibrate, pack and write the bundle of `source` at `out`.

    Takes the options of `velox_pack.job.plan`. `report` is told what is going on, a line at a
    time. Returns the bundle's folder. Raises a VeloxError, and then nothing has changed.
    """
    job = plan(source, out, report=report, **options)
    if report is not None:
        for line in job.warnings:
            report(line)
    return run(job, report)


def run(job: Job, report: Report | None = None) -> Path:
    """Do a checked job. The bundle appears whole at the end, or not at all."""
    say = report or (lambda line: None)
    with BundleWriter(job.out, overwrite=job.overwrite) as writer:
        say(f"hashing {job.source.name}")
        hashes = job.source.hashes()
        if job.captures or not job.specs:  # otherwise every weight is checked as it is written
            say("checking weights")
            job.source.check_finite()
        # On some processors OpenBLAS's sums depend on how many threads share them.
        with threadpool_limits(1):
            done = calibrate(job, hashes, say)
        rotations, tensors = weight_plans.rotations_of(job.packing, job.seed)
        records = writer.artifacts(done.artifacts, tensors, done.fingerprints)
        if job.specs:
            say(f"writing {len(job.specs)} tensors, {job.weight_bytes / 1e6:.1f} MB")
            weight_plans.write(writer.weights(job.specs), job.source, job.packing, rotations, say)
        _plain_files(writer, job)
        manifest = _manifest(job, hashes, records, done.plans, rotations)
        text = card(manifest, _licence(job.source.path / "README.md"))
        writer.path("README.md").write_text(text, encoding="utf-8")
        writer.finish(manifest)
    remember(job.source, hashes)
    return job.out


def _plain_files(writer: BundleWriter, job: Job) -> None:
    for file in job.source.copy_list():
        writer.path(file.name).write_bytes(file.read_bytes())
    config = (
        dict(job.source.mlx_config()) if job.source.native_quantized else dict(job.source.config)
    )
    config["model_file"] = MODEL_FILE
    text = json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    writer.path("config.json").write_text(text, encoding="utf-8")
    writer.path(MODEL_FILE).write_text(DOOR, encoding="utf-8")


def _licence(readme: Path) -> dict[str, str]:
    """The licence fields of the source's own card, as far as it has any."""
    try:
        front = metadata_load(readme) or {}
    except Exception:  # not ours to judge: a card without front matter, or with broken YAML
        return {}
    wanted = ("license", "license_name", "license_link")
    return {key: front[key] for key in wanted if isinstance(front.get(key), str)}


def _manifest(
    job: Job,
    hashes: dict[str, str],
    records: list[ArtifactRecord],
    used: dict[str, list[str]],
    rotations: Mapping[str, StructuredRotation],
) -> Manifest:
    source, text, config = job.source, job.text, job.source.config
    inner = config.get("text_config") or {}
    return Manifest(
        format="velox-pack",
        version=VERSION,
        producer=versions(PRODUCERS),
        source=Source(
            kind=source.kind,
            repo=source.repo,
            revision=source.revision,
            name=source.name,
            files=hashes,
        ),
        calibration=None
        if text is None
        else Calibration(
            text=text.name,
            text_sha256=text.sha256,
            tokens=int(text.tokens.size),
            sequence_length=int(text.tokens.shape[1]),
            sequences=int(text.tokens.shape[0]),
            seed=job.seed,
            options={},
        ),
        model=Model(
            model_type=str(config["model_type"]),
            vocab_size=int(config.get("vocab_size") or inner.get("vocab_size") or 0),
            hidden_size=int(config.get("hidden_size") or inner.get("hidden_size") or 0),
            layers=list(job.layers),
        ),
        artifacts=records,
        caches=[
            CachePlan(name=name, recipe=plan.canonical, artifacts=used[name])
            for name, plan in job.caches
        ],
        default_cache=job.caches[0][0] if job.caches else None,
        weights=weight_plans.record(job.packing, rotations, job.source_bytes),
    )
