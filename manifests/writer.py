"""Writing a bundle so that it appears whole or not at all.

Everything is built in a sibling folder `.NAME.velox-tmp-<pid>`; velox.json comes last, all is
flushed to disk, then the folder is renamed into place. A run that fails, is interrupted or gets
SIGTERM removes its own folder and nothing else; a run that is killed outright leaves a hidden
folder that nobody ever reads.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import mlx.core as mx
import numpy as np

from .aligned import AlignedWriter, TensorSpec, layout, spec_of
from .artifact import Artifact
from .checks import problems
from .errors import BundleError
from .files import require_space, sha256_file, sync
from .manifest import (
    ArtifactRecord,
    FileRecord,
    Manifest,
    parse,
)
from .names import CACHE_FILE, MANIFEST_NAME, check_name, is_optional
from .place import check_destination, new_sibling, put_in_place
from .shards import INDEX_NAME, MAX_SHARD_BYTES, index_json, plan_shards, planned_bytes


class WeightWriter:
    """The weight files of a bundle: tensors planned beforehand, written in any order.

    All files are open at once, so a layer can be written as soon as it is packed.
    """

    def __init__(self, folder: Path, specs: Mapping[str, TensorSpec], max_bytes: float) -> None:
        shards = plan_shards(specs, max_bytes)
        require_space(folder, planned_bytes(shards))
        self._writers: list[AlignedWriter] = []
        self._home: dict[str, AlignedWriter] = {}
        try:
            for file, part in shards:
                writer = AlignedWriter(folder / file, part, {"format": "mlx"})
                self._writers.append(writer)
                self._home.update(dict.fromkeys(part, writer))
            (folder / INDEX_NAME).write_bytes(index_json(shards))
        except BaseException:
            self.abandon()
            raise

    def write(self, name: str, data: mx.array | np.ndarray | bytes) -> None:
        """Write one tensor, once. Raises ValueError if it is unknown, written or does not fit."""
        if name not in self._home:
            raise ValueError(f"tensor {name!r} was not planned")
        self._home[name].write(name, data)

    def close(self) -> None:
        """Flush all files; ValueError if a tensor never came."""
        for writer in self._writers:
            writer.close()

    def abandon(self) -> None:
        """Release the files as they are."""
        for writer in self._writers:
            writer.abandon()


class BundleWriter:
    """Context manager that builds a bundle; without `finish` nothing is left behind.

    with BundleWriter(out) as writer:
        (writer.path("config.json")).write_bytes(...)
        records = writer.artifacts({"spectral-keys": spectral}, {"velox.rotation.r.signs": signs})
        weights = writer.weights(specs)
        for name, array in packed_layers(): weights.write(name, array)
        manifest = writer.finish(manifest)

    Raises BundleError if the destination exists (unless `overwrite` and it is a bundle), or if
    its parent does not exist.
    """

    def __init__(self, out: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        self.out = Path(out).resolve()
        self.overwrite = overwrite
        self._folder: Path | None = None
        self._weights: WeightWriter | None = None
        self._old_handler: Any = None

    @property
    def folder(self) -> Path:
        """The temporary folder, while the bundle is being built."""
        if self._folder is None:
            raise ValueError("the bundle writer is not open")
        return self._folder

    def __enter__(self) -> BundleWriter:
        check_destination(self.out, overwrite=self.overwrite)
        self._catch_sigterm()
        try:
            self._folder = new_sibling(self.out, "tmp")
        except BaseException:
            self._release_sigterm()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self._weights is not None:
                self._weights.abandon()
        finally:
            try:
                if self._folder is not None:
                    shutil.rmtree(self._folder, ignore_errors=True)
                    self._folder = None
            finally:
                self._release_sigterm()

    def path(self, name: str) -> Path:
        """Where to put a plain file (`config.json`, `plots/x.png`); its folder is made."""
        found = check_name(name)
        if found or name == MANIFEST_NAME:
            raise BundleError(found[0] if found else f"{MANIFEST_NAME} is written by finish()")
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        return path

    def weights(
        self, specs: Mapping[str, TensorSpec], max_bytes: float = MAX_SHARD_BYTES
    ) -> WeightWriter:
        """Plan and preallocate the weight files and their index; once per bundle.

        Raises BundleError, with both numbers, if the disk is too small.
        """
        if self._weights is not None:
            raise ValueError("the weights of this bundle are already planned")
        self._weights = WeightWriter(self.folder, specs, max_bytes)
        return self._weights

    def artifacts(
        self,
        artifacts: Mapping[str, Artifact],
        extra: Mapping[str, mx.array | np.ndarray] | None = None,
        fingerprints: Mapping[str, str] | None = None,
    ) -> list[ArtifactRecord]:
        """Write the file of artifacts (id -> artifact) and return their manifest entries by id.

        `extra` are further tensors for that file, such as `velox.rotation.<id>.signs`;
        `fingerprints` say, by id, what artifacts were made from. Raises
        ValueError for values that their kind forbids (NaN, unsorted levels, ...).
        """
        tensors: dict[str, mx.array | np.ndarray] = dict(extra or {})
        records = []
        for key, artifact in sorted(artifacts.items()):
            arrays = artifact.to_tensors()
            names = {role: f"velox.{key}.{role}" for role in arrays}
            tensors.update({names[role]: array for role, array in arrays.items()})
            records.append(
                ArtifactRecord(
                    id=key,
                    kind=artifact.kind,
                    kind_version=artifact.kind_version,
                    parameters=artifact.parameters(),
                    tensors=names,
                    layers=list(artifact.layers),
                    fingerprint=(fingerprints or {}).get(key),
                )
            )
        stray = next((name for name in tensors if not name.startswith("velox.")), None)
        if stray is not None:
            raise ValueError(f"tensor {stray!r} must start with 'velox.'")
        if tensors:
            specs = {name: spec_of(array) for name, array in tensors.items()}
            require_space(self.folder, layout(specs).size)
            with AlignedWriter(self.folder / CACHE_FILE, specs, {"format": "mlx"}) as writer:
                for name, array in tensors.items():
                    writer.write(name, array)
        return records

    def finish(self, manifest: Manifest) -> Manifest:
        """Complete `manifest` with every file's size and hash, write it, and put all in place.

        Returns the manifest as written. Raises ValueError if a planned tensor never came,
        BundleError if the manifest is inconsistent or the destination cannot be replaced.
        """
        if self._weights is not None:
            self._weights.close()
        files = {name: _record(self.folder, name) for name in _names(self.folder)}
        data = manifest.model_copy(update={"files": files}).to_bytes()
        result = parse(data)
        problem = next(problems(self.folder, result, "size"), None)
        if problem is not None:
            raise BundleError(f"the bundle would be damaged: {problem}")
        (self.folder / MANIFEST_NAME).write_bytes(data)
        for name in [*files, MANIFEST_NAME]:
            sync(self.folder / name)
        for parent in sorted({(self.folder / name).parent for name in files} | {self.folder}):
            sync(parent)
        check_destination(self.out, overwrite=self.overwrite)
        put_in_place(self.folder, self.out)
        self._folder = None
        return result

    def _catch_sigterm(self) -> None:
        # SIGTERM ends a Python process without cleaning up, unless somebody handles it.
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._old_handler = signal.signal(signal.SIGTERM, _terminate)

    def _release_sigterm(self) -> None:
        if self._old_handler is not None:
            signal.signal(signal.SIGTERM, self._old_handler)
            self._old_handler = None


def _terminate(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _names(folder: Path) -> list[str]:
    names = []
    for path in sorted(folder.rglob("*")):
        if path.is_dir() and not path.is_symlink():
            continue
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or not path.is_file():
            raise BundleError(f"{name}: is not a regular file and cannot be part of a bundle")
        names.append(name)
    return names


def _record(folder: Path, name: str) -> FileRecord:
    path = folder / name
    return FileRecord(
        bytes=path.stat().st_size, sha256=sha256_file(path), optional=is_optional(name)
    )
