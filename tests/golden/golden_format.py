"""What the golden files of the bundle format hold. They change only with the format's version.

`python tests/golden/golden_format.py` writes them anew.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "manifests"))  # bundles.py

import mlx.core as mx
import numpy as np
from bundles import DIGEST, make_artifacts, make_manifest

from velox_pack.manifests.aligned import write_arrays
from velox_pack.manifests.manifest import ArtifactRecord, FileRecord, Manifest

HERE = Path(__file__).parent
ALIGNED = HERE / "aligned.safetensors"
MANIFEST = HERE / "velox.json"
METADATA = {"format": "mlx", "über": "ß"}


def arrays() -> dict[str, mx.array | np.ndarray]:
    """Small tensors of several types with gaps between them, an empty one, a big one."""
    return {
        "z.small": np.array([1, 2, 3], np.uint8),
        "a.codes": mx.array([[0, 1], [2**32 - 1, 7]], dtype=mx.uint32),
        "m.half": mx.array([1.5, -2.0, 65504.0], dtype=mx.float16),
        "m.brain": mx.array([1.0, -3.0], dtype=mx.bfloat16),
        "n.scalar": np.array(0.1, np.float32),
        "o.empty": np.zeros((0, 4), np.int64),
        "p.flag": np.array([True, False, True]),
        "b.big": np.arange(4100, dtype=np.int32).reshape(41, 100),
    }


def write_aligned(path: Path) -> None:
    """The golden safetensors file."""
    write_arrays(path, arrays(), METADATA)


def manifest() -> Manifest:
    """The golden manifest."""
    records = [
        ArtifactRecord(
            id=key,
            kind=artifact.kind,
            kind_version=artifact.kind_version,
            parameters=artifact.parameters(),
            tensors={role: f"velox.{key}.{role}" for role in artifact.to_tensors()},
            layers=list(artifact.layers),
        )
        for key, artifact in sorted(make_artifacts().items())
    ]
    names = ("README.md", "config.json", "model-velox-cache.safetensors", "plots/bits.png")
    files = {
        name: FileRecord(bytes=len(name), sha256=DIGEST, optional=name[0] in "Rp") for name in names
    }
    return make_manifest(records).model_copy(update={"files": files})


if __name__ == "__main__":
    ALIGNED.unlink(missing_ok=True)
    write_aligned(ALIGNED)
    MANIFEST.write_bytes(manifest().to_bytes())
