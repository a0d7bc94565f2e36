import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # bundles.py

import pytest
from bundles import make_bundle


@pytest.fixture
def bundle_path(tmp_path: Path) -> Path:
    path = tmp_path / "bundle"
    make_bundle(path)
    return path
