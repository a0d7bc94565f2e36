from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # golden_format.py

import mlx.core as mx
import numpy as np
from golden_format import ALIGNED, MANIFEST, METADATA, arrays, manifest, write_aligned
from safetensors import safe_open

from velox_pack.manifests.aligned import read_arrays, read_header, read_metadata
from velox_pack.manifests.manifest import parse


def test_writer_makes_the_golden_file(tmp_path: Path) -> None:
    write_aligned(tmp_path / "new.safetensors")
    assert (tmp_path / "new.safetensors").read_bytes() == ALIGNED.read_bytes()


def test_golden_file_reads_as_it_was_written() -> None:
    found = read_arrays(ALIGNED)
    assert found.keys() == arrays().keys()
    for name, array in arrays().items():
        expected = array if isinstance(array, mx.array) else mx.array(array)
        assert found[name].dtype == expected.dtype
        assert found[name].shape == expected.shape
        assert mx.array_equal(found[name], expected)
    assert read_metadata(ALIGNED) == METADATA
    with safe_open(ALIGNED, "np") as opened:
        assert np.array_equal(opened.get_tensor("b.big"), arrays()["b.big"])
        assert opened.metadata() == METADATA


def test_golden_layout() -> None:
    starts = {name: entry.start for name, entry in read_header(ALIGNED).items()}
    assert starts == {
        "a.codes": 16384,
        "m.brain": 16400,
        "m.half": 16404,
        "n.scalar": 16412,  # after two bytes of padding
        "o.empty": 16416,
        "p.flag": 16416,
        "z.small": 16419,
        "b.big": 32768,
    }
    assert ALIGNED.stat().st_size == 32768 + 2 * 16384


def test_golden_manifest() -> None:
    data = MANIFEST.read_bytes()
    assert manifest().to_bytes() == data
    assert parse(data) == manifest()
