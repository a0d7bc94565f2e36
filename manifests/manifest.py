"""The model of `velox.json`, the manifest of a bundle in format 1.

Every field is documented here and thereby in `schema.json`. Validation is strict (no number
from a string) and unknown fields are errors, except that a reader ignores them in a bundle of a
higher minor version (`parse`).
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from . import strict_json
from .consistency import inconsistencies
from .errors import BundleError
from .names import MANIFEST_NAME

VERSION = (1, 0)
MAX_MANIFEST_BYTES = 16 * 2**20

Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Bits = Annotated[int, Field(ge=1, le=8)]
Label = Annotated[str, Field(min_length=1, max_length=1000)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Source(_Model):
    """The model that was converted."""

    kind: Literal["hub", "local", "demo"] = Field(
        description="Where it came from: a Hugging Face repository, a folder, or the built-in demo."
    )
    repo: str | None = Field(description="Repository id, for a hub source.")
    revision: str | None = Field(description="The resolved commit, for a hub source.")
    name: Label = Field(description="What to call the model: repository id or folder name.")
    files: dict[str, Sha256] = Field(
        description="SHA-256 of the source's config, tokenizer and weight files, by name."
    )


class Calibration(_Model):
    """The text that was run through the model, and how."""

    text: Label = Field(description="Name of the built-in text, or of the file that was given.")
    text_sha256: Sha256 = Field(description="SHA-256 of the text as bytes.")
    tokens: Count = Field(description="Number of tokens that were run.")
    sequence_length: Count = Field(description="Tokens in a sequence.")
    sequences: Count = Field(description="Number of sequences.")
    seed: int = Field(description="Seed of every random choice of the conversion.")
    options: dict[str, JsonValue] = Field(description="Other options that change the result.")


class Layer(_Model):
    """What a layer of the model does, as far as caches need to know."""

    index: Count = Field(description="Position in the model's list of layers.")
    attention: Literal["full", "sliding", "none", "other"] = Field(
        description="Full or windowed softmax attention, no attention, or something else."
    )
    heads: Count = Field(description="Query heads; 0 without attention.")
    kv_heads: Count = Field(description="Key and value heads.")
    k_dim: Count = Field(description="Dimension of a key head.")
    v_dim: Count = Field(description="Dimension of a value head.")
    window: Count | None = Field(description="Tokens that a sliding layer sees, else null.")
    rope: str | None = Field(description="Id of the artifact with its rotary embedding, or null.")
    routed: bool = Field(
        description="True if it calls scaled_dot_product_attention, so that a router sees the "
        "true queries."
    )
    covered: bool = Field(description="True if caches of this bundle can serve the layer.")
    cache_index: Count | None = Field(
        description="Place of the layer's cache in the list that the model makes, or null."
    )
    reason: str | None = Field(description="Why it is not covered, else null.")


class Model(_Model):
    """The shape of the model."""

    model_type: Label = Field(description="`model_type` of config.json.")
    vocab_size: Count = Field(description="Rows of the embedding.")
    hidden_size: Count = Field(description="Width of the residual stream.")
    layers: list[Layer] = Field(description="Every layer, in order.")


class ArtifactRecord(_Model):
    """A calibrated artifact; its tensors lie in model-velox-cache.safetensors."""

    id: str = Field(description="Name of this artifact within the bundle.")
    kind: Label = Field(description="Kind of artifact, such as spectral or qfilters.")
    kind_version: Count = Field(description="Version of the kind's layout.")
    parameters: dict[str, JsonValue] = Field(description="Parameters of the kind.")
    tensors: dict[str, str] = Field(description="Role -> tensor name `velox.<id>.<role>`.")
    layers: list[Count] = Field(
        description="Layers of the model that axis 0 of each tensor stacks; empty: all alike."
    )
    fingerprint: Sha256 | None = Field(
        default=None,
        description="SHA-256 of what it was made from (source, text, seed, options), so that "
        "another conversion can take it over; null if unknown.",
    )


class CachePlan(_Model):
    """A cache that the bundle is prepared for."""

    name: Label = Field(description="Name to load it by.")
    recipe: Label = Field(description="The canonical recipe, such as `spectral:bits=3`.")
    artifacts: list[str] = Field(description="Ids of the artifacts that the recipe reads.")


class Rotation(_Model):
    """A structured rotation of one width, shared by packed layers."""

    width: Count = Field(description="Length of the vectors that it rotates.")
    tensors: dict[str, str] = Field(
        description="Role (signs, mix, ...) -> tensor name `velox.rotation.<id>.<role>`."
    )


class PackedLayer(_Model):
    """A linear layer stored as codes."""

    encoding: Literal["lloyd", "affine"] = Field(
        description="Codebook levels per row, or MLX's affine groups."
    )
    bits: Bits = Field(description="Bits of a code.")
    group: Count | None = Field(description="Inputs that share a scale (affine), else null.")
    rotation: str | None = Field(description="Id of the rotation of its input, or null.")
    in_features: Count = Field(description="Inputs.")
    out_features: Count = Field(description="Outputs.")
    bias: bool = Field(description="True if it adds a bias.")


class KeptLayer(_Model):
    """Something that was not packed."""

    path: Label = Field(description="Module or parameter path.")
    reason: Label = Field(description="Why it was kept as it is.")


class Weights(_Model):
    """How the parameters are stored."""

    encoding: Literal["keep", "overlay", "lloyd", "affine"] = Field(
        description="As in the source, not at all (the source's own are fetched), or packed."
    )
    parameters: dict[str, JsonValue] = Field(description="Parameters of the encoding.")
    rotations: dict[str, Rotation] = Field(description="Rotations by id.")
    packed: dict[str, PackedLayer] = Field(description="Packed layers by module path.")
    kept: list[KeptLayer] = Field(description="Layers that could have been packed but were not.")
    parameters_packed: Count = Field(description="Number of parameters in packed layers.")
    parameters_total: Count = Field(description="Number of parameters of the model.")


class FileRecord(_Model):
    """A file of the bundle."""

    bytes: Count = Field(description="Size in bytes.")
    sha256: Sha256 = Field(description="SHA-256 of its content.")
    optional: bool = Field(
        description="True if the bundle works without it (README.md, plots, licences); such a "
        "file may be absent or edited."
    )


class Manifest(_Model):
    """velox.json: what a velox-pack bundle holds and how it was made."""

    format: Literal["velox-pack"] = Field(description="Always `velox-pack`.")
    version: tuple[Count, Count] = Field(
        description="Major and minor version of the format. A reader refuses a higher major; of "
        "a higher minor it ignores the fields that it does not know."
    )
    producer: dict[str, str] = Field(description="Package -> version, of what wrote the bundle.")
    source: Source = Field(description="Where the model came from.")
    calibration: Calibration | None = Field(description="Null if nothing needed calibration.")
    model: Model = Field(description="What the model is made of.")
    artifacts: list[ArtifactRecord] = Field(description="Calibrated artifacts.")
    caches: list[CachePlan] = Field(description="Caches that the bundle is prepared for.")
    default_cache: str | None = Field(description="Name of the cache to use when none is named.")
    weights: Weights = Field(description="Encoding, rotations and packed layers.")
    files: dict[str, FileRecord] = Field(
        default_factory=dict, description="Every file of the bundle but velox.json, by name."
    )
    measured: dict[str, JsonValue] | None = Field(
        default=None, description="Results of `velox-pack eval`; null after `convert`."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Manifest:
        problem = next(iter(inconsistencies(self)), None)
        if problem:
            raise ValueError(problem)
        return self

    def to_bytes(self) -> bytes:
        """Canonical JSON; BundleError if a free-form part holds NaN or infinity."""
        try:
            return strict_json.dumps(self.model_dump(mode="json"))
        except ValueError as error:
            raise BundleError(f"{MANIFEST_NAME}: cannot be written: {error}") from None


def parse(data: bytes) -> Manifest:
    """Read the bytes of velox.json.

    Raises BundleError with the first problem; for a higher major version it says which one this
    velox-pack reads.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise BundleError(f"{MANIFEST_NAME}: is larger than {MAX_MANIFEST_BYTES} bytes")
    try:
        value = strict_json.loads(data)
    except ValueError as error:
        raise BundleError(f"{MANIFEST_NAME}: {error}; get the bundle again") from None
    newer = _check_version(value)
    try:
        return Manifest.model_validate_json(json.dumps(value))
    except ValidationError as error:
        if not newer:
            raise _one_line(error) from None
        _drop_unknown(value, error)
    try:
        return Manifest.model_validate_json(json.dumps(value))
    except ValidationError as error:
        raise _one_line(error) from None


def _check_version(value: Any) -> bool:
    """True if `value` is of a higher minor version; BundleError if it cannot be read at all."""
    if not isinstance(value, dict) or value.get("format") != "velox-pack":
        raise BundleError(f"{MANIFEST_NAME}: is not the manifest of a velox-pack bundle")
    version = value.get("version")
    if (
        not isinstance(version, list)
        or len(version) != 2
        or not all(type(n) is int and n >= 0 for n in version)
    ):
        raise BundleError(f"{MANIFEST_NAME}: version is not [major, minor]")
    major, minor = version
    if major > VERSION[0]:
        raise BundleError(
            f"{MANIFEST_NAME}: the bundle has format {major}.{minor}, this velox-pack reads "
            f"{VERSION[0]}.x; upgrade velox-pack"
        )
    if major < VERSION[0]:
        raise BundleError(f"{MANIFEST_NAME}: format {major}.{minor} was never released")
    return bool(minor > VERSION[1])


def _drop_unknown(value: Any, error: ValidationError) -> None:
    for problem in error.errors(include_url=False, include_input=False):
        if problem["type"] == "extra_forbidden":
            holder = value
            for step in problem["loc"][:-1]:
                holder = holder[step]
            del holder[problem["loc"][-1]]


def _one_line(error: ValidationError) -> BundleError:
    first = error.errors(include_url=False, include_input=False)[0]
    where = ".".join(str(step) for step in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    message = " ".join(message.split())[:400]
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    place = f"{strict_json.shorten(where)}: " if where else ""
    return BundleError(f"{MANIFEST_NAME}: {place}{message}{more}")


def json_schema() -> bytes:
    """The JSON Schema of velox.json, as shipped in `schema.json`."""
    schema = Manifest.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = f"velox.json, format {VERSION[0]}.{VERSION[1]}"
    return strict_json.dumps(schema)
