from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from bundles import DIGEST, make_artifacts, make_manifest

from velox_pack.manifests.errors import BundleError
from velox_pack.manifests.manifest import ArtifactRecord, Manifest, json_schema, parse
from velox_pack.manifests.schema import shipped_schema


def record(key: str) -> ArtifactRecord:
    artifact = make_artifacts()[key]
    return ArtifactRecord(
        id=key,
        kind=artifact.kind,
        kind_version=1,
        parameters=artifact.parameters(),
        tensors={role: f"velox.{key}.{role}" for role in artifact.to_tensors()},
        layers=list(artifact.layers),
    )


@pytest.fixture
def manifest() -> Manifest:
    return make_manifest(artifacts=[record(key) for key in sorted(make_artifacts())])


@pytest.fixture
def value(manifest: Manifest) -> Any:
    return json.loads(manifest.to_bytes())


def refused(value: Any) -> str:
    with pytest.raises(BundleError) as caught:
        parse(json.dumps(value).encode())
    message = str(caught.value)
    assert message.startswith("velox.json: ")
    assert "\n" not in message
    return message


def test_round_trip_is_canonical(manifest: Manifest) -> None:
    data = manifest.to_bytes()
    assert parse(data) == manifest
    assert parse(data).to_bytes() == data
    shuffled = json.dumps(dict(reversed(json.loads(data).items()))).encode()
    assert parse(shuffled).to_bytes() == data


def test_shipped_schema_is_current_and_documents_every_field() -> None:
    schema = shipped_schema()
    assert schema == json_schema(), "run python -m velox_pack.manifests.schema"
    parsed = json.loads(schema)
    jsonschema.Draft202012Validator.check_schema(parsed)
    for model in [parsed, *parsed["$defs"].values()]:
        if "properties" in model:
            assert all("description" in field for field in model["properties"].values())


def test_schema_accepts_a_real_manifest_and_refuses_a_wrong_one(value: Any) -> None:
    validator = jsonschema.Draft202012Validator(json.loads(shipped_schema()))
    validator.validate(value)
    for damage in ({"surplus": 1}, {"version": [1]}, {"format": "other"}, {"files": {"a": {}}}):
        assert not validator.is_valid(value | damage)


def test_higher_major_says_what_to_do(value: Any) -> None:
    message = refused({"format": "velox-pack", "version": [2, 0], "all": "different"})
    assert "format 2.0" in message
    assert "reads 1.x; upgrade velox-pack" in message
    assert "never released" in refused(value | {"version": [0, 9]})


def test_higher_minor_is_read_and_new_fields_ignored(value: Any, manifest: Manifest) -> None:
    value["version"] = [1, 7]
    value["novel"] = {"deep": [1, 2]}
    value["source"]["novel"] = 1
    value["model"]["layers"][1]["novel"] = "x"
    value["weights"]["packed"]["model.layers.0.mlp.up_proj"]["novel"] = 2
    value["artifacts"][0]["novel"] = None
    assert parse(json.dumps(value).encode()) == manifest.model_copy(update={"version": (1, 7)})
    value["default_cache"] = 5  # but what is known must still be right
    assert "default_cache" in refused(value)


@pytest.mark.parametrize("place", [(), ("source",), ("model", "layers", 0), ("weights",)])
def test_unknown_field_at_our_own_version(value: Any, place: tuple[Any, ...]) -> None:
    holder = value
    for step in place:
        holder = holder[step]
    holder["surplus"] = 1
    assert "surplus" in refused(value)


@pytest.mark.parametrize(
    "version", [None, "1.0", [1], [1, 0, 0], [1.0, 0], [True, 0], [-1, 0], ["1", "0"], {}]
)
def test_odd_versions(value: Any, version: Any) -> None:
    assert "version is not [major, minor]" in refused(value | {"version": version})


@pytest.mark.parametrize("other", [[], 1, "velox-pack", {}, {"format": "gguf"}])
def test_other_json_is_no_manifest(other: Any) -> None:
    assert "is not the manifest of a velox-pack bundle" in refused(other)


FILE = {"bytes": 1, "sha256": DIGEST, "optional": False}
CACHE_FILE = {"model-velox-cache.safetensors": FILE}


@pytest.mark.parametrize(
    ("path", "new", "message"),
    [
        ("default_cache", "none", "none of the caches"),
        ("caches.0.artifacts", ["nowhere"], "needs the artifact 'nowhere'"),
        ("caches.1.name", "spectral:bits=3", "same name"),
        ("artifacts.0.id", "qfilters", "same id"),
        ("artifacts.0.id", "../x", "id '../x'"),
        ("artifacts.0.id", "rotation", "id 'rotation'"),
        ("artifacts.0.tensors.keys", "model.norm.weight", "is called 'model.norm.weight'"),
        ("artifacts.0.layers", [0, 2], "layers that the model does not have"),
        ("artifacts.0.layers", [0, 0], "layers that the model does not have"),
        ("artifacts.0.layers", [0, True], "artifacts.0.layers.1"),
        ("model.layers.0.index", 1, "not numbered"),
        ("model.layers.0.rope", "qfilters", "no artifact of kind rope"),
        ("model.vocab_size", "320", "model.vocab_size"),
        ("model.vocab_size", -1, "model.vocab_size"),
        ("model.vocab_size", 2**63, "model.vocab_size"),
        ("weights.packed.model/up.rotation", "r2", "needs the rotation 'r2'"),
        ("weights.packed.model/up.in_features", 32, "32 inputs"),
        ("weights.packed.model/up.bits", 9, "bits"),
        ("weights.rotations.w64.tensors.signs", "velox.w64.signs", "is called"),
        ("weights.encoding", "gptq", "encoding"),
        ("source.files", {"config.json": "ABC"}, "source.files"),
        ("files", {"config.json": FILE}, "does not list model-velox-cache.safetensors"),
        ("files", CACHE_FILE | {"velox.json": FILE}, "lists velox.json itself"),
        ("files", CACHE_FILE | {"a": FILE, "A": FILE}, "in case only"),
        ("files", CACHE_FILE | {"a": FILE | {"optional": True}}, "is marked optional"),
    ],
)
def test_contradictions(value: Any, path: str, new: Any, message: str) -> None:
    steps: list[Any] = [int(s) if s.isdigit() else s for s in path.split(".")]
    holder = value
    for step in steps[:-1]:
        holder = holder["model.layers.0.mlp.up_proj" if step == "model/up" else step]
    holder[steps[-1]] = new
    assert message in refused(value)


@pytest.mark.parametrize(
    "name",
    [
        "/etc/passwd",
        "../up",
        "a/../b",
        "a/b/c",
        "./a",
        "a//b",
        "a/",
        "",
        ".",
        "..",
        ".hidden",
        "plots/.hidden",
        "C:\\x",
        "C:x",
        "a\\b",
        "a\nb",
        "a\0b",
        "~root",
        "a.",
        "a ",
        "-rf",
        "ä",
        "x" * 300,
    ],
)
def test_names_that_could_lead_out(value: Any, name: str) -> None:
    message = refused(value | {"files": CACHE_FILE | {name: FILE}})
    assert "is not a plain name inside the bundle" in message
    assert len(message) < 300


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "plots/bits per layer.png",
        "LICENSE",
        "LICENSE-2.0+x",
        "tokenizer.model",
        "_x",
    ],
)
def test_plain_names(value: Any, name: str) -> None:
    parse(json.dumps(value | {"files": CACHE_FILE | {name: FILE}}).encode())


def test_nan_is_never_written(manifest: Manifest) -> None:
    with pytest.raises(BundleError, match="cannot be written"):
        manifest.model_copy(update={"measured": {"kl": float("nan")}}).to_bytes()
