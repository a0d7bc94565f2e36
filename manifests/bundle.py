"""Opening a bundle: manifest validated, sizes and headers checked, artifacts handed out lazily."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx

from .aligned import read_arrays
from .artifacts import KINDS, Artifact
from .checks import Level, Progress, is_weight_file, problems
from .errors import BundleError, RecipeError
from .files import locate, read_bounded, replace_file
from .manifest import (
    MAX_MANIFEST_BYTES,
    VERSION,
    ArtifactRecord,
    CachePlan,
    FileRecord,
    Manifest,
    parse,
)
from .names import CACHE_FILE, MANIFEST_NAME, check_name, may_change

_MAX_LINE = 400  # a hostile name may be as long as the header


@dataclass(frozen=True)
class Bundle:
    """An opened bundle. Arrays are lazy: nothing is read from a tensor before it is evaluated."""

    path: Path
    manifest: Manifest
    _opened: dict[str, Artifact] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def fingerprint(self) -> str:
        """Hex SHA-256 of all that shapes results: the manifest less measurements and plots."""
        required = {n: f for n, f in self.manifest.files.items() if not f.optional}
        bare = self.manifest.model_copy(update={"measured": None, "files": required})
        return hashlib.sha256(bare.to_bytes()).hexdigest()

    @cached_property
    def weight_files(self) -> tuple[Path, ...]:
        """The safetensors files that hold parameters, sorted; () for an overlay."""
        return tuple(self.path / n for n in sorted(self.manifest.files) if is_weight_file(n))

    def weights(self) -> dict[str, mx.array]:
        """All stored parameters by name, lazy; {} for an overlay."""
        arrays: dict[str, mx.array] = {}
        with _full_paths(self.path):
            for path in self.weight_files:
                arrays.update(read_arrays(path))
        return arrays

    @cached_property
    def _tensors(self) -> dict[str, mx.array]:
        return read_arrays(self.path / CACHE_FILE) if CACHE_FILE in self.manifest.files else {}

    def artifact_record(self, artifact_id: str) -> ArtifactRecord:
        """The manifest's entry of an artifact; BundleError if there is none."""
        with _full_paths(self.path):
            return self._record(artifact_id)

    def artifact(self, artifact_id: str) -> Artifact:
        """An artifact by id, its tensors lazy MLX arrays; the same object each time.

        Raises BundleError if it is absent or of a kind that this velox-pack does not know.
        """
        if artifact_id not in self._opened:
            with _full_paths(self.path):
                self._opened[artifact_id] = self._open(self._record(artifact_id))
        return self._opened[artifact_id]

    def tensors(self, artifact_id: str) -> dict[str, mx.array]:
        """Role -> lazy array of an artifact, as stored."""
        with _full_paths(self.path):
            return self._arrays(self._record(artifact_id).tensors)

    def cache_plan(self, name: str | None = None) -> CachePlan:
        """A cache plan by name, or the default one; RecipeError, listing the names, if absent."""
        wanted = self.manifest.default_cache if name is None else name
        for plan in self.manifest.caches:
            if plan.name == wanted:
                return plan
        known = ", ".join(plan.name for plan in self.manifest.caches) or "none"
        what = "no default cache" if wanted is None else f"no cache {wanted!r}"
        raise RecipeError(f"the bundle has {what}; it has: {known}")

    def artifacts_for(self, plan: str | CachePlan | None = None) -> dict[str, Artifact]:
        """Id -> artifact of everything that a cache plan reads."""
        chosen = plan if isinstance(plan, CachePlan) else self.cache_plan(plan)
        return {artifact_id: self.artifact(artifact_id) for artifact_id in chosen.artifacts}

    def rotation(self, rotation_id: str) -> dict[str, mx.array]:
        """Role (signs, mix, ...) -> lazy array of a rotation of packed weights."""
        with _full_paths(self.path):
            record = self.manifest.weights.rotations.get(rotation_id)
            if record is None:
                raise BundleError(f"{MANIFEST_NAME}: has no rotation {rotation_id!r}")
            return self._arrays(record.tensors)

    # What these raise begins with the name of a file in the bundle, as in `checks`.

    def _record(self, artifact_id: str) -> ArtifactRecord:
        for record in self.manifest.artifacts:
            if record.id == artifact_id:
                return record
        known = ", ".join(record.id for record in self.manifest.artifacts) or "none"
        raise BundleError(f"{MANIFEST_NAME}: has no artifact {artifact_id!r}; it has: {known}")

    def _open(self, record: ArtifactRecord) -> Artifact:
        kind = KINDS.get(record.kind)
        if kind is None or record.kind_version > kind.kind_version:
            raise BundleError(
                f"{MANIFEST_NAME}: artifact {record.id!r} is of kind {record.kind} "
                f"{record.kind_version}, which this velox-pack does not read; upgrade velox-pack"
            )
        tensors = self._arrays(record.tensors)
        try:
            return kind.from_tensors(record.parameters, tuple(record.layers), tensors)
        except BundleError as error:
            raise BundleError(f"{CACHE_FILE}: {record.id!r}: {error}") from None

    def _arrays(self, names: Mapping[str, str]) -> dict[str, mx.array]:
        missing = next((name for name in names.values() if name not in self._tensors), None)
        if missing is not None:
            raise BundleError(f"{CACHE_FILE}: has no tensor {missing!r}; get the bundle again")
        return {role: self._tensors[name] for role, name in names.items()}


@contextmanager
def _full_paths(folder: Path) -> Iterator[None]:
    """Put the bundle's folder before an error that begins with the name of a file in it."""
    try:
        yield
    except BundleError as error:
        raise BundleError(f"{folder}/{error}") from None


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """The validated manifest of a bundle folder; BundleError if it is none or of a newer major."""
    folder = Path(path)
    _check_folder(folder)
    with _full_paths(folder):
        return _parse_manifest(folder)


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise BundleError(f"{folder}: no such folder")
    if not os.path.lexists(folder / MANIFEST_NAME):
        raise BundleError(f"{folder}: is not a velox-pack bundle (it has no {MANIFEST_NAME})")


def _parse_manifest(folder: Path) -> Manifest:
    return parse(read_bounded(locate(folder, MANIFEST_NAME), MAX_MANIFEST_BYTES))


def open_bundle(path: str | os.PathLike[str], verify: Level = "size") -> Bundle:
    """Open a bundle after the cheap checks: manifest, confinement, sizes, safetensors headers.

    Nothing is hashed unless `verify` is "sha256", and no tensor is read. Raises BundleError with
    the first problem.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    problem = next(_all_problems(folder, manifest, verify, None), None)
    if problem is not None:
        raise BundleError(f"{folder}/{problem}")
    return Bundle(folder, manifest)


def verify(
    path: str | os.PathLike[str], level: Level = "sha256", progress: Progress | None = None
) -> list[str]:
    """Every problem of a bundle, one line each; [] if it is sound.

    A line begins with the name of a file in the bundle, or with `path` if that is no bundle.
    "size" checks what `open_bundle` checks. "sha256" also hashes every required file, reads the
    values of all artifacts, and checks page alignment, the shard index and stray files.
    `progress(file name, bytes)` is told of each block that is hashed. Optional files (the card,
    plots) may be absent or edited; only that they lie in the bundle is checked.
    """
    folder = Path(path)
    try:
        _check_folder(folder)
        manifest = _parse_manifest(folder)
    except BundleError as error:
        return [str(error)]
    return list(_all_problems(folder, manifest, level, progress))


def _all_problems(
    folder: Path, manifest: Manifest, level: Level, progress: Progress | None
) -> Iterator[str]:
    sound = True
    for problem in problems(folder, manifest, level, progress):
        sound = False
        yield problem if len(problem) <= _MAX_LINE else problem[:_MAX_LINE] + "..."
    if level == "sha256" and sound:
        yield from _value_problems(Bundle(folder, manifest))


def _value_problems(bundle: Bundle) -> list[str]:
    found: list[str] = []
    for record in bundle.manifest.artifacts:
        try:
            bundle.artifact(record.id).check_values()
        except BundleError as error:
            found.append(str(error).removeprefix(f"{bundle.path}/"))
        except ValueError as error:
            found.append(f"{CACHE_FILE}: artifact {record.id!r}: {error}")
    return found


def write_measured(
    path: str | os.PathLike[str],
    measured: Mapping[str, Any] | None,
    optional_files: Mapping[str, bytes] | None = None,
) -> Manifest:
    """Put results of `eval` into velox.json, and new versions of optional files (card, plots).

    Nothing else of the bundle changes, nor does its fingerprint. Each file is replaced
    atomically, velox.json last. Raises BundleError for another name.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    if manifest.version > VERSION:
        raise BundleError(f"{folder}: is of a newer format, only read here; upgrade velox-pack")
    files = dict(manifest.files)
    changed = dict(optional_files or {})
    for name, data in changed.items():
        if check_name(name) or not may_change(name):
            raise BundleError(
                f"{folder}: {name}: only README.md and plots/ may change after convert"
            )
        digest = hashlib.sha256(data).hexdigest()
        files[name] = FileRecord(bytes=len(data), sha256=digest, optional=True)
    update = {"measured": None if measured is None else dict(measured), "files": files}
    with _full_paths(folder):
        text = manifest.model_copy(update=update).to_bytes()
        result = parse(text)
    for name, data in changed.items():
        (folder / name).parent.mkdir(exist_ok=True)
        replace_file(folder / name, data)
    replace_file(folder / MANIFEST_NAME, text)
    return result


__all__ = ["Bundle", "open_bundle", "read_manifest", "verify", "write_measured"]
