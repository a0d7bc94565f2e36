"""What is in a bundle, where its bytes go, and what context fits into a given memory."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from velox_pack.architectures import positions
from velox_pack.caches import recipes
from velox_pack.door import NO_CACHE, cache_plan, load_config
from velox_pack.manifests.aligned import read_header
from velox_pack.manifests.bundle import Bundle, open_bundle
from velox_pack.manifests.manifest import Layer
from velox_pack.manifests.names import CACHE_FILE, MANIFEST_NAME
from velox_pack.sizes import cache_bytes


def inspect(path: str | Path, *, memory: int | None = None) -> dict[str, Any]:
    """Describe a bundle folder as plain data; `memory` in bytes asks what context fits.

    Raises BundleError.
    """
    bundle = open_bundle(path)
    manifest = bundle.manifest
    tensors = _tensor_bytes(bundle.weight_files)
    files = {name: (bundle.path / name).stat().st_size for name in _present(bundle)}
    weights = manifest.weights
    stored = sum(tensors.values())
    caches: dict[str, dict[str, Any]] = {}
    for record in manifest.caches:
        if recipes.parse(record.recipe).missing:
            own = {"recipe": record.recipe, "artifacts": list(record.artifacts), "ready": False}
            caches[record.name] = own
            continue
        plan = cache_plan(bundle, record.name)
        if plan is not None:
            found = cache_bytes(manifest.model.layers, plan)
            caches[record.name] = {
                "recipe": record.recipe,
                "artifacts": list(record.artifacts),
                "ready": True,
                "bits_per_element": found.bits_per_element,
                "bits_with_constants": found.bits_with_constants,
                "share_of_plain": found.state / found.plain,
                "bytes_per_token": found.per_token,
                "constant_bytes": found.constants,
            }
    result: dict[str, Any] = {
        "format": list(manifest.version),
        "source": manifest.source.model_dump(include={"kind", "repo", "revision", "name"}),
        "fingerprint": bundle.fingerprint[:16],
        "file_bytes": files,
        "total_bytes": sum(files.values()),
        "bytes_by_use": _by_use(bundle, tensors, files),
        "weights": {
            "encoding": weights.encoding,
            "parameters": dict(weights.parameters),
            "bytes": stored,
            "memory_bytes": weights.parameters.get("base_bytes", stored),
            "packed_layers": len(weights.packed),
            "parameters_packed": weights.parameters_packed,
            "parameters_total": weights.parameters_total,
            "kept": [kept.model_dump() for kept in weights.kept],
        },
        "artifacts": _artifacts(bundle),
        "default_cache": manifest.default_cache,
        "caches": caches,
        "layers": [_layer(layer, tensors) for layer in manifest.model.layers],
        "measured": manifest.measured,
    }
    if memory is not None:
        result["memory"] = {
            "bytes": memory,
            "context": _contexts(result, bundle, memory),
            "positions": positions(load_config(bundle)),
        }
    return result


def _artifacts(bundle: Bundle) -> list[dict[str, Any]]:
    sizes = _tensor_bytes([bundle.path / n for n in _present(bundle) if n == CACHE_FILE])
    return [
        {
            "id": a.id,
            "kind": a.kind,
            "layers": len(a.layers),
            "bytes": sum(sizes.get(name, 0) for name in a.tensors.values()),
            "parameters": dict(a.parameters),
        }
        for a in bundle.manifest.artifacts
    ]


def _present(bundle: Bundle) -> list[str]:
    """Names of the bundle's files, velox.json among them; optional ones may be absent."""
    names = sorted([*bundle.manifest.files, MANIFEST_NAME])
    return [name for name in names if (bundle.path / name).exists()]


def _by_use(bundle: Bundle, tensors: Mapping[str, int], files: Mapping[str, int]) -> dict[str, int]:
    """What the bytes are for; together they are all of the bundle."""
    packed = bundle.manifest.weights.packed
    codes = sum(size for name, size in tensors.items() if name.rpartition(".")[0] in packed)
    artifacts = sum(_tensor_bytes([bundle.path / n for n in files if n == CACHE_FILE]).values())
    stored = sum(size for name, size in files.items() if name.endswith(".safetensors"))
    kept = sum(tensors.values()) - codes
    return {
        "packed linears": codes,
        "other parameters": kept,
        "calibrated artifacts": artifacts,
        "headers and padding": stored - codes - kept - artifacts,
        "tokenizer, manifest and other files": sum(files.values()) - stored,
    }


def _tensor_bytes(files: Iterable[Path]) -> dict[str, int]:
    """Bytes of every tensor, padding aside."""
    found = {}
    for file in files:
        for name, entry in read_header(file).items():
            if not name.startswith("__pad__."):
                found[name] = entry.nbytes
    return found


def _layer(layer: Layer, tensors: Mapping[str, int]) -> dict[str, Any]:
    mark = f".layers.{layer.index}."
    return {
        "index": layer.index,
        "attention": layer.attention,
        "kv_heads": layer.kv_heads,
        "head_dim": [layer.k_dim, layer.v_dim],
        "window": layer.window,
        "covered": layer.covered,
        "reason": layer.reason,
        "weight_bytes": sum(size for name, size in tensors.items() if mark in f".{name}"),
    }


def _contexts(result: Mapping[str, Any], bundle: Bundle, memory: int) -> dict[str, int]:
    """Tokens that fit beside the weights, for each plan and for plain caches in 16 bits."""
    covered, plain, bounded = 0, 0, 0
    for layer in bundle.manifest.model.layers:
        token = 2 * layer.kv_heads * (layer.k_dim + layer.v_dim)
        if layer.covered:
            covered += token
        elif layer.attention == "sliding" and layer.window:
            bounded += token * layer.window
        else:
            plain += token
    room = memory - result["weights"]["memory_bytes"] - bounded
    found = {NO_CACHE: max(0, room // max(1, covered + plain))}
    for name, cache in result["caches"].items():
        if not cache["ready"]:
            continue
        left = room - cache["constant_bytes"]
        found[name] = max(0, int(left / max(1.0, cache["bytes_per_token"] + plain)))
    return found
