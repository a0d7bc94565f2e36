"""From a job to artifacts: what can be taken over is, and the rest is fitted."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from velox_pack.caches import grammar
from velox_pack.caches.needs import Need
from velox_pack.fits import FITS
from velox_pack.job import Job
from velox_pack.manifests.artifacts import Artifact, Codebook, Rope, Rotation
from velox_pack.manifests.errors import CalibrationError
from velox_pack.reuse import fingerprint
from velox_pack.seen import PassError, Seen

Report = Callable[[str], None]
GAUSSIAN = Need.of("codebook", distribution="gaussian")


@dataclass(frozen=True)
class Calibrated:
    """Artifacts by id, what each came from (a fingerprint), and the ids that each plan reads."""

    artifacts: dict[str, Artifact]
    fingerprints: dict[str, str]
    plans: dict[str, list[str]]


def calibrate(job: Job, hashes: dict[str, str], report: Report) -> Calibrated:
    """All artifacts of the job; `hashes` are the source's, by file.

    Nothing is run if all can be taken over. Raises CalibrationError.
    """
    needs = job.needs
    prints = {need: fingerprint(need, job, hashes) for need in needs}
    made: dict[Need, Sequence[Artifact]] = {}
    if job.old is not None:
        made = {need: job.old.find(prints[need]) for need in needs}
        made = {need: found for need, found in made.items() if found}
        report(job.old.told([n.id for n in made], [n.id for n in needs if n not in made], hashes))
    wanted = {name for need in needs if need not in made for name in FITS[need.name].reads}
    seen = Seen(job, report, wanted, _fit, made)
    ids: dict[Need, list[str]] = {}
    artifacts: dict[str, Artifact] = {}
    numbers: dict[str, int] = {}
    for n, (_, plan) in enumerate(job.caches):
        numbers.setdefault(plan.coding, n)
    for need in needs:
        if need not in made and FITS[need.name].reads:
            report(f"fitting {need.id}")
        try:
            found = seen.made(need)
        except PassError:  # no recipe's fault
            raise
        except CalibrationError as error:
            raise CalibrationError(f"{_wanting(job, need)}{error}") from error
        ids[need] = _place(artifacts, need, found, numbers)
    if not (artifacts or job.specs):  # mlx-lm wants some model*.safetensors
        prints[GAUSSIAN] = fingerprint(GAUSSIAN, job, hashes)
        ids[GAUSSIAN] = _place(artifacts, GAUSSIAN, seen.made(GAUSSIAN), numbers)
    return Calibrated(
        artifacts,
        {one: prints[need] for need, own in ids.items() for one in own},
        {name: sorted({i for n in plan.needs for i in ids[n]}) for name, plan in job.caches},
    )


def _wanting(job: Job, need: Need) -> str:
    """`--cache NAME and NAME: `, the recipes that want something; empty for what all jobs make."""
    names = [grammar.short(name) for name, plan in job.caches if need in plan.needs]
    return f"--cache {' and '.join(names)}: " if names else ""


def _fit(seen: Seen, need: Need) -> Iterable[Artifact]:
    try:
        return tuple(FITS[need.name].make(seen, dict(need.options)))
    except ValueError as error:  # a text too short, or one that says always the same
        why = " ".join(str(error).split())[:200]
        raise CalibrationError(
            f"{need.name} cannot be fitted: {why}; calibrate on more tokens, "
            "with a smaller window, or on a text that is more varied"
        ) from error


def _place(
    into: dict[str, Artifact], need: Need, found: Sequence[Artifact], numbers: dict[str, int]
) -> list[str]:
    """Give ids: a stem, then stem-2, ... for layers of other shapes."""
    counts: dict[str, int] = {}
    own = []
    for artifact in found:
        stem = _stem(need, artifact, numbers)
        counts[stem] = counts.get(stem, 0) + 1
        own.append(stem if counts[stem] == 1 else f"{stem}-{counts[stem]}")
        into[own[-1]] = artifact
    return own


def _stem(need: Need, artifact: Artifact, numbers: dict[str, int]) -> str:
    if isinstance(artifact, Rope):
        return f"rope-{artifact.dims}{'-traditional' if artifact.traditional else ''}"
    if isinstance(artifact, Rotation):
        return f"rotation-{artifact.width}"
    if isinstance(artifact, Codebook):
        return f"codebook-{artifact.distribution}"
    if need.name == "widths":
        return f"{artifact.kind}-{numbers[str(dict(need.options)['plan'])]}"
    part = getattr(artifact, "part", None)
    if part and part not in need.name.split("-"):  # one fit of both
        return replace(need, name=f"{need.name}-{part}").id
    return need.id
