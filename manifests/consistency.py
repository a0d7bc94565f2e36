"""What the fields of a manifest must say of each other, beyond their types."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .names import CACHE_FILE, MANIFEST_NAME, check_id, check_name, is_optional

if TYPE_CHECKING:
    from .manifest import Manifest


def inconsistencies(manifest: Manifest) -> list[str]:
    """One line for each contradiction: ids, names of tensors and files, references to nowhere."""
    return [
        *_artifact_problems(manifest),
        *_cache_problems(manifest),
        *_weight_problems(manifest),
        *_file_problems(manifest),
    ]


def _artifact_problems(manifest: Manifest) -> list[str]:
    found: list[str] = []
    count = len(manifest.model.layers)
    if [layer.index for layer in manifest.model.layers] != list(range(count)):
        found.append("model.layers are not numbered 0, 1, 2, ...")
    if _repeats([artifact.id for artifact in manifest.artifacts]):
        found.append("two artifacts have the same id")
    for artifact in manifest.artifacts:
        found += check_id(artifact.id)
        found += _tensor_problems(f"velox.{artifact.id}", artifact.tensors)
        if any(n >= count for n in artifact.layers) or _repeats(artifact.layers):
            found.append(f"artifact {artifact.id!r} names layers that the model does not have")
    ropes = {artifact.id for artifact in manifest.artifacts if artifact.kind == "rope"}
    found += [
        f"layer {layer.index} names the rope {layer.rope!r}, which is no artifact of kind rope"
        for layer in manifest.model.layers
        if layer.rope is not None and layer.rope not in ropes
    ]
    return found


def _cache_problems(manifest: Manifest) -> list[str]:
    found: list[str] = []
    ids = {artifact.id for artifact in manifest.artifacts}
    names = [plan.name for plan in manifest.caches]
    if _repeats(names):
        found.append("two caches have the same name")
    for plan in manifest.caches:
        missing = [i for i in plan.artifacts if i not in ids]
        found += [f"cache {plan.name!r} needs the artifact {i!r}, which is absent" for i in missing]
    if manifest.default_cache is not None and manifest.default_cache not in names:
        found.append(f"default_cache {manifest.default_cache!r} is none of the caches")
    return found


def _weight_problems(manifest: Manifest) -> list[str]:
    found: list[str] = []
    weights = manifest.weights
    for key, rotation in weights.rotations.items():
        found += check_id(key)
        found += _tensor_problems(f"velox.rotation.{key}", rotation.tensors)
    for path, layer in weights.packed.items():
        if layer.rotation is None:
            continue
        used = weights.rotations.get(layer.rotation)
        if used is None:
            found.append(f"packed layer {path!r} needs the rotation {layer.rotation!r}: absent")
        elif used.width != layer.in_features:
            found.append(f"packed layer {path!r} has {layer.in_features} inputs, its rotation not")
    return found


def _file_problems(manifest: Manifest) -> list[str]:
    found: list[str] = []
    folded: set[str] = set()
    for name, file in manifest.files.items():
        found += check_name(name)
        if file.optional and not is_optional(name):
            found.append(
                f"file {name!r} is marked optional, which only card, plots and licences are"
            )
        if name == MANIFEST_NAME:
            found.append(f"files lists {MANIFEST_NAME} itself")
        if name.casefold() in folded:
            found.append(f"two files differ from {name!r} in case only")
        folded.add(name.casefold())
    if (
        manifest.files
        and (manifest.artifacts or manifest.weights.rotations)
        and CACHE_FILE not in manifest.files
    ):
        found.append(f"files does not list {CACHE_FILE}, which holds the artifacts")
    return found


def _tensor_problems(prefix: str, tensors: dict[str, str]) -> list[str]:
    return [
        f"tensor of role {role!r} is called {name!r}, not {prefix + '.' + role!r}"
        for role, name in tensors.items()
        if name != f"{prefix}.{role}"
    ]


def _repeats(values: list[Any]) -> bool:
    return len(set(values)) != len(values)
