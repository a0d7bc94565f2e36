"""The checks of a bundle against its manifest; `level="size"` reads headers only.

Each check yields one-line problems, so that `verify` can list all and `open_bundle` raise the
first. A line begins with the name of a file in the bundle; whoever raises it adds the folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from . import strict_json
from .artifact import HasForm
from .artifacts import KINDS
from .dtypes import MLX_TYPES
from .errors import BundleError
from .files import locate, read_bounded, sha256_file
from .header import PAD_PREFIX, PAGE, Entry, read_full_header
from .manifest import ArtifactRecord, Manifest, PackedLayer
from .names import CACHE_FILE, MANIFEST_NAME
from .shards import INDEX_NAME

Level = Literal["size", "sha256"]
Progress = Callable[[str, int], None]
_MAX_INDEX_BYTES = 16 * 2**20
_FLOATS = ("F16", "BF16", "F32")
_WEIGHT_FILES = "model*.safetensors"


def is_weight_file(name: str) -> bool:
    """True for the files that mlx-lm's own loader takes for weights, our artifacts apart."""
    return (
        name.startswith("model")
        and name.endswith(".safetensors")
        and "/" not in name
        and name != CACHE_FILE
    )


def problems(
    folder: Path, manifest: Manifest, level: Level, progress: Progress | None = None
) -> Iterator[str]:
    """Everything that is wrong with a bundle whose manifest is valid, one line each."""
    tensors: dict[str, dict[str, Entry]] = {}
    for name, record in sorted(manifest.files.items()):
        if record.optional and not os.path.lexists(folder / name):
            continue
        try:
            path = locate(folder, name)
            if record.optional:
                continue  # may be edited, but not lead out of the bundle: a push would upload it
            size = path.stat().st_size
            if size != record.bytes:
                fault = "is truncated" if size < record.bytes else "is too long"
                raise BundleError(
                    f"{name}: {fault}: {size} bytes, expected {record.bytes}; get it again"
                )
            if name.endswith(".safetensors"):
                tensors[name] = read_full_header(path).entries
        except BundleError as error:
            yield str(error)
            continue
        except OSError as error:
            yield f"{name}: cannot be read ({error.strerror})"
            continue
        if level == "sha256":
            yield from _digest_problems(path, name, record.sha256, progress)
    if all(n in tensors for n, r in manifest.files.items() if n.endswith(".safetensors")):
        yield from _tensor_problems(manifest, tensors)
        if level == "sha256":
            yield from _strict_problems(folder, manifest, tensors)


def _digest_problems(
    path: Path, name: str, expected: str, progress: Progress | None
) -> Iterator[str]:
    try:
        found = sha256_file(path, None if progress is None else lambda n: progress(name, n))
    except BundleError as error:
        yield str(error)
        return
    if found != expected:
        yield f"{name}: is damaged: sha256 {found[:12]}, expected {expected[:12]}; get it again"


def _tensor_problems(manifest: Manifest, files: dict[str, dict[str, Entry]]) -> Iterator[str]:
    artifacts = files.get(CACHE_FILE, {})
    yield from _name_problems(files)
    for record in manifest.artifacts:
        yield from _artifact_problems(record, artifacts)
    for key, rotation in manifest.weights.rotations.items():
        for name in rotation.tensors.values():
            if name not in artifacts:
                yield f"{CACHE_FILE}: has no tensor {name!r}, which rotation {key!r} needs"
    weights: dict[str, Entry] = {}
    for file, entries in files.items():
        if is_weight_file(file):
            for name, entry in entries.items():
                if name in weights and not name.startswith(PAD_PREFIX):
                    yield f"{file}: tensor {name!r} is in another file too"
                weights[name] = entry
    if manifest.weights.encoding != "overlay" and not any(map(is_weight_file, files)):
        yield f"{MANIFEST_NAME}: lists no weight file, and the encoding is not overlay"
    for path, layer in manifest.weights.packed.items():
        yield from _packed_problems(path, layer, weights)


def _name_problems(files: dict[str, dict[str, Entry]]) -> Iterator[str]:
    # mlx-lm reads all model*.safetensors into one table: ours must not pose as weights.
    for file, entries in files.items():
        for name, entry in entries.items():
            if entry.dtype not in MLX_TYPES:
                yield f"{file}: tensor {name!r} has type {entry.dtype}, which no bundle holds"
            if not name.startswith(PAD_PREFIX) and name.startswith("velox.") != (
                file == CACHE_FILE
            ):
                yield f"{file}: tensor {name!r} does not belong there"


def _artifact_problems(record: ArtifactRecord, found: dict[str, Entry]) -> Iterator[str]:
    missing = [name for name in record.tensors.values() if name not in found]
    if missing:
        yield f"{CACHE_FILE}: has no tensor {missing[0]!r}, which artifact {record.id!r} needs"
        return
    kind = KINDS.get(record.kind)
    if kind is None or record.kind_version > kind.kind_version:
        return  # from a newer minor version; whoever asks for it is told to upgrade
    forms: dict[str, HasForm] = {role: found[name] for role, name in record.tensors.items()}
    try:
        kind.check_keys(record.parameters, forms)
        kind.check_forms(record.parameters, tuple(record.layers), forms)
    except (ValueError, TypeError) as error:
        yield f"{CACHE_FILE}: artifact {record.id!r}: {error}"


def packed_forms(layer: PackedLayer) -> dict[str, tuple[tuple[str, ...], tuple[int, ...]]]:
    """Name within the module -> (allowed types, shape) of what a packed layer must have."""
    rows, words = layer.out_features, -(-layer.in_features * layer.bits // 32)
    forms: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {}
    forms["codes"] = (("U32",), (rows, words))
    if layer.encoding == "lloyd":
        forms["scales"] = (_FLOATS, (rows, 1))
        forms["levels"] = (("F32",), (2**layer.bits,))
    else:
        groups = layer.in_features // (layer.group or layer.in_features or 1)
        forms["scales"] = forms["biases"] = (_FLOATS, (rows, groups))
    if layer.bias:
        forms["bias"] = (_FLOATS, (rows,))
    return forms


def _packed_problems(path: str, layer: PackedLayer, found: dict[str, Entry]) -> Iterator[str]:
    for role, (dtypes, shape) in packed_forms(layer).items():
        name = f"{path}.{role}"
        entry = found.get(name)
        if entry is None:
            yield f"{_WEIGHT_FILES}: has no tensor {name!r}, which packed layer {path!r} needs"
        elif entry.dtype not in dtypes or entry.shape != shape:
            yield (
                f"{_WEIGHT_FILES}: tensor {name!r} is {entry.dtype} {list(entry.shape)}, "
                f"the manifest needs {' or '.join(dtypes)} {list(shape)}"
            )


def _strict_problems(
    folder: Path, manifest: Manifest, files: dict[str, dict[str, Entry]]
) -> Iterator[str]:
    """What does not stop a load: alignment, the shard index, values, files that nobody lists."""
    for file, entries in files.items():
        for name, entry in entries.items():
            if entry.nbytes >= PAGE and entry.start % PAGE:
                yield f"{file}: tensor {name!r} does not start on a page of {PAGE} bytes"
    if INDEX_NAME in manifest.files:
        yield from _index_problems(folder, files)
    listed = set(manifest.files)
    for path in sorted(folder.iterdir()):
        stray = is_weight_file(path.name) or path.suffix == ".py" or path.name == CACHE_FILE
        if stray and path.name not in listed:
            yield f"{path.name}: is not listed in {MANIFEST_NAME}; remove it"


def _index_problems(folder: Path, files: dict[str, dict[str, Entry]]) -> Iterator[str]:
    try:
        index = strict_json.loads(read_bounded(locate(folder, INDEX_NAME), _MAX_INDEX_BYTES))
        weight_map = index["weight_map"]
        wrong = next((n for n, file in weight_map.items() if n not in files.get(file, {})), None)
    except (BundleError, ValueError, TypeError, KeyError, AttributeError):
        yield f"{INDEX_NAME}: is not an index of weight files"
        return
    if wrong is not None:
        yield f"{INDEX_NAME}: tensor {wrong!r} is not in the file that it names"
