"""A small but complete bundle: every kind of artifact, both encodings, a kept layer, plots."""

from __future__ import annotations

import hashlib
from pathlib import Path

import mlx.core as mx
import numpy as np

from velox_pack.manifests.aligned import TensorSpec, spec_of
from velox_pack.manifests.artifacts import (
    Allocation,
    Artifact,
    Center,
    Codebook,
    QFilters,
    Rope,
    Spectral,
    Widths,
)
from velox_pack.manifests.artifacts import (
    Rotation as RotationArtifact,
)
from velox_pack.manifests.manifest import (
    ArtifactRecord,
    CachePlan,
    Calibration,
    KeptLayer,
    Layer,
    Manifest,
    Model,
    PackedLayer,
    Rotation,
    Source,
    Weights,
)
from velox_pack.manifests.writer import BundleWriter

LAYERS, HEADS, KV_HEADS, DIM, WIDTH, VOCAB = 2, 4, 2, 16, 64, 320
DIGEST = hashlib.sha256(b"").hexdigest()


def make_artifacts(seed: int = 0) -> dict[str, Artifact]:
    rng = np.random.default_rng(seed)
    layers = tuple(range(LAYERS))
    basis = np.linalg.qr(rng.normal(size=(LAYERS, KV_HEADS, DIM, DIM)))[0]
    filters = rng.normal(size=(LAYERS, KV_HEADS, DIM))
    ones = np.ones((LAYERS, KV_HEADS), np.float32)
    return {
        "codebook-gaussian": Codebook(
            "gaussian", {b: np.linspace(-2, 2, 2**b, dtype=np.float32) for b in range(1, 9)}
        ),
        "rope-0": Rope(
            dims=DIM,
            traditional=False,
            inv_freq=np.full((LAYERS, DIM // 2), 0.5, np.float32),
            layers=layers,
        ),
        "spectral-keys": Spectral(
            part="keys",
            before_rope=True,
            mean=rng.normal(size=(LAYERS, KV_HEADS, DIM)).astype(np.float32),
            basis=basis.astype(np.float16),
            variance=np.sort(rng.random((LAYERS, KV_HEADS, DIM)).astype(np.float32))[..., ::-1],
            log_norm=np.array([[-3, 0.02]] * LAYERS, np.float32),
            layers=layers,
        ),
        "center-values": Center(
            part="values",
            before_rope=False,
            mean=rng.normal(size=(LAYERS, KV_HEADS, DIM)).astype(np.float32),
            log_norm=np.array([[-3, 0.02]] * LAYERS, np.float32),
            layers=layers,
        ),
        "rotation-12": RotationArtifact(
            width=12,
            block=4,
            signs=np.array([1, -1] * 6, np.int8),
            mix=np.linalg.qr(rng.normal(size=(3, 3)))[0].astype(np.float32),
        ),
        "widths-3": Widths(
            plan="waterfill",
            bits=3.0,
            keys=np.full((LAYERS, DIM), 3, np.uint8),
            values=np.full((LAYERS, DIM), 3, np.uint8),
            layers=layers,
        ),
        "qfilters": QFilters(
            filters=(filters / np.linalg.norm(filters, axis=-1, keepdims=True)).astype(np.float32),
            layers=layers,
        ),
        "allocation-3": Allocation(
            target=3.0,
            achieved=2.98,
            keys=np.full(LAYERS, 3, np.float32),
            values=np.full(LAYERS, 3, np.float32),
            sensitivity_keys=ones,
            sensitivity_values=ones,
            details={"rounds": 3},
            layers=layers,
        ),
    }


def make_weights(seed: int = 0) -> dict[str, mx.array]:
    rng = np.random.default_rng(seed)

    def floats(*shape: int) -> mx.array:
        return mx.array(rng.normal(size=shape).astype(np.float32))

    weights = {
        "model.embed_tokens.weight": floats(VOCAB, WIDTH).astype(mx.bfloat16),
        "model.norm.weight": floats(WIDTH).astype(mx.bfloat16),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}.mlp"
        codes = rng.integers(0, 2**32, size=(WIDTH, WIDTH // 8), dtype=np.uint32)
        weights |= {
            f"{prefix}.up_proj.codes": mx.array(codes),
            f"{prefix}.up_proj.scales": floats(WIDTH, 1).astype(mx.float16),
            f"{prefix}.up_proj.levels": mx.array(np.linspace(-2, 2, 16, dtype=np.float32)),
            f"{prefix}.up_proj.bias": floats(WIDTH).astype(mx.float16),
            f"{prefix}.down_proj.codes": mx.array(codes),
            f"{prefix}.down_proj.scales": floats(WIDTH, 2).astype(mx.float16),
            f"{prefix}.down_proj.biases": floats(WIDTH, 2).astype(mx.float16),
        }
    return weights


def make_rotations() -> dict[str, np.ndarray]:
    return {
        "velox.rotation.w64.signs": np.ones(WIDTH, np.float32),
        "velox.rotation.w64.mix": np.eye(1, dtype=np.float32),
    }


def make_manifest(artifacts: list[ArtifactRecord]) -> Manifest:
    def layer(index: int) -> Layer:
        return Layer(
            index=index,
            attention="full",
            heads=HEADS,
            kv_heads=KV_HEADS,
            k_dim=DIM,
            v_dim=DIM,
            window=None,
            rope="rope-0",
            routed=True,
            covered=True,
            cache_index=index,
            reason=None,
        )

    def packed(encoding: str, bias: bool) -> PackedLayer:
        return PackedLayer(
            encoding=encoding,  # type: ignore[arg-type]
            bits=4,
            group=None if encoding == "lloyd" else 32,
            rotation="w64",
            in_features=WIDTH,
            out_features=WIDTH,
            bias=bias,
        )

    paths = {}
    for index in range(LAYERS):
        paths[f"model.layers.{index}.mlp.up_proj"] = packed("lloyd", True)
        paths[f"model.layers.{index}.mlp.down_proj"] = packed("affine", False)
    values: dict[str, object] = {
        "format": "velox-pack",
        "version": (1, 0),
        "producer": {"velox-pack": "0.1.0"},
        "source": Source(
            kind="local", repo=None, revision=None, name="tiny", files={"config.json": DIGEST}
        ),
        "calibration": Calibration(
            text="austen",
            text_sha256=DIGEST,
            tokens=1024,
            sequence_length=512,
            sequences=2,
            seed=0,
            options={},
        ),
        "model": Model(
            model_type="llama",
            vocab_size=VOCAB,
            hidden_size=WIDTH,
            layers=[layer(i) for i in range(LAYERS)],
        ),
        "artifacts": artifacts,
        "caches": [
            CachePlan(
                name="spectral:bits=3",
                recipe="spectral:bits=3",
                artifacts=["codebook-gaussian", "rope-0", "spectral-keys", "widths-3"],
            ),
            CachePlan(name="qfilters", recipe="qfilters:budget=256", artifacts=["qfilters"]),
        ],
        "default_cache": "spectral:bits=3",
        "weights": Weights(
            encoding="lloyd",
            parameters={"bits": 4},
            rotations={
                "w64": Rotation(
                    width=WIDTH,
                    tensors={r: f"velox.rotation.w64.{r}" for r in ("signs", "mix")},
                )
            },
            packed=paths,
            kept=[KeptLayer(path="model.embed_tokens", reason="embedding")],
            parameters_packed=4 * WIDTH * WIDTH,
            parameters_total=4 * WIDTH * WIDTH + VOCAB * WIDTH + WIDTH,
        ),
    }
    return Manifest(**values)  # type: ignore[arg-type]


def fill(writer: BundleWriter, order: int = 1) -> Manifest:
    """Everything but finish(): plain files, artifacts, weights (in sorted or reverse order)."""
    writer.path("config.json").write_text('{"model_type": "llama"}')
    writer.path("README.md").write_text("# tiny\n")
    writer.path("plots/bits.png").write_bytes(b"no real picture")
    records = writer.artifacts(make_artifacts(), make_rotations())
    arrays = make_weights()
    specs: dict[str, TensorSpec] = {name: spec_of(array) for name, array in arrays.items()}
    weights = writer.weights(specs)
    for name in sorted(arrays)[::order]:
        weights.write(name, arrays[name])
    return make_manifest(artifacts=records)


def make_bundle(out: Path, order: int = 1, overwrite: bool = False) -> Manifest:
    with BundleWriter(out, overwrite=overwrite) as writer:
        return writer.finish(fill(writer, order))
