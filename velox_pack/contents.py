"""What is in a bundle, where its bytes go, and what context fits into a given memory."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from velox_pack.door import NO_CACHE, cache_plan
from velox_pack.manifests.aligned import read_header
from velox_pack.manifests.bundle import Bundle, open_bundle
from velox_pack.manifests.manifest import Layer
from velox_pack.sizes import cache_bytes


def inspect(path: str | Path, *, memory: int | None = None) -> dict[str, Any]:
    """Describe a bundle folder as plain data; `memory` in bytes asks what context fits.

    Raises BundleError.
    """
    bundle = open_bundle(path)
    manifest = bundle.manifest
    tensors = _tensor_bytes(bundle)
    weights = sum(tensors.values())
    caches = {}
    for record in manifest.caches:
        plan = cache_plan(bundle, record.name)
        if plan is not None:
            found = cache_bytes(manifest.model.layers, plan)
            caches[record.name] = {
                "recipe": record.recipe,
                "artifacts": list(record.artifacts),
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
        "file_bytes": {name: record.bytes for name, record in sorted(manifest.files.items())},
        "total_bytes": sum(record.bytes for record in manifest.files.values()),
        "weights": {
            "encoding": manifest.weights.encoding,
            "parameters": dict(manifest.weights.parameters),
            "bytes": weights,
            "packed_layers": len(manifest.weights.packed),
            "parameters_packed": manifest.weights.parameters_packed,
            "parameters_total": manifest.weights.parameters_total,
            "kept": [kept.model_dump() for kept in manifest.weights.kept],
        },
        "artifacts": [
            {"id": a.id, "kind": a.kind, "layers": len(a.layers)} for a in manifest.artifacts
        ],
        "default_cache": manifest.default_cache,
        "caches": caches,
        "layers": [_layer(layer, tensors) for layer in manifest.model.layers],
        "measured": manifest.measured,
    }
    if memory is not None:
        result["memory"] = {"bytes": memory, "context": _contexts(result, bundle, memory)}
    return result


def _tensor_bytes(bundle: Bundle) -> dict[str, int]:
    """Bytes of every stored parameter, padding aside."""
    found = {}
    for file in bundle.weight_files:
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
    room = memory - result["weights"]["bytes"] - bounded
    found = {NO_CACHE: max(0, room // max(1, covered + plain))}
    for name, cache in result["caches"].items():
        left = room - cache["constant_bytes"]
        found[name] = max(0, int(left / max(1.0, cache["bytes_per_token"] + plain)))
    return found
