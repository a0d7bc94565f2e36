"""Pictures of a bundle: which there are, the same bytes again, nothing of others overwritten."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commands import velox
from velox_pack.manifests.artifact import Artifact
from velox_pack.manifests.artifacts import Allocation, QFilters, Spectral, Widths
from velox_pack.manifests.artifacts_attention import Budgets, FilterReport
from velox_pack.manifests.artifacts_scalar import LowRank
from velox_pack.manifests.errors import BundleError
from velox_pack.plots import allocations, budgets, canvas, draw, filters, spectra

matplotlib = pytest.importorskip("matplotlib")

NAMES = {"bits-allocation-0.png", "bits-widths-0.png", "bytes.png"} | {
    f"spectrum-joint-spectral-{part}-window-28.png" for part in ("keys", "values")
}
Shape = tuple[int, int, int]


@pytest.fixture(scope="session")
def pictures(demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plots") / "new" / "folder"
    draw(demo_bundle, folder)
    return folder


def test_a_picture_for_each_artifact_that_has_one(pictures: Path) -> None:
    found = {path.name for path in pictures.iterdir()}
    assert found >= NAMES
    assert all(name.partition("-")[0] in ("bits", "bytes.png", "filters", "spectrum")
               for name in found)  # fmt: skip
    for path in pictures.iterdir():
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG\r\n\x1a\n")
        assert int.from_bytes(data[16:20], "big") == round(canvas.WIDTH * canvas.DPI)
        assert canvas.MARK in data[:256]


def test_same_bytes_again_whatever_the_users_style(
    demo_bundle: Path, pictures: Path, tmp_path: Path
) -> None:
    with matplotlib.rc_context({"font.size": 23, "axes.grid": True, "savefig.dpi": 30}):
        again = draw(demo_bundle, tmp_path)
        assert matplotlib.rcParams["font.size"] == 23
    assert {path.name for path in again} == {path.name for path in pictures.iterdir()}
    for path in again:
        assert path.read_bytes() == (pictures / path.name).read_bytes()
    assert not any(word in path.read_bytes() for path in again
                   for word in (matplotlib.__version__.encode(), b"tIME"))  # fmt: skip


def test_our_own_pictures_are_replaced_and_nothing_else(demo_bundle: Path, tmp_path: Path) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("mine")
    first = draw(demo_bundle, tmp_path)
    assert draw(demo_bundle, tmp_path) == first
    assert {path.name for path in tmp_path.iterdir()} == {p.name for p in first} | {"notes.txt"}
    taken = tmp_path / "bytes.png"
    taken.write_bytes(b"\x89PNG\r\n\x1a\n of someone else")
    before = first[0].stat().st_mtime_ns
    with pytest.raises(BundleError, match=r"bytes\.png: exists and is no plot"):
        draw(demo_bundle, tmp_path)
    assert taken.read_bytes().endswith(b"someone else")
    assert first[0].stat().st_mtime_ns == before
    assert other.read_text() == "mine"
    with pytest.raises(BundleError, match=r"notes\.txt: is not a folder"):
        draw(demo_bundle, other)


def test_the_command_says_what_it_wrote(demo_bundle: Path, tmp_path: Path) -> None:
    done = velox("inspect", demo_bundle, "--plots", tmp_path / "a")
    assert done.code == 0, done.err
    files = [str(path) for path in sorted((tmp_path / "a").iterdir())]
    written = [line for line in done.out.splitlines() if line.startswith("wrote ")]
    assert sorted(written) == [f"wrote {path}" for path in files]
    assert "drawing bytes.png" in done.err
    done = velox("inspect", demo_bundle, "--plots", tmp_path / "a", "--json")
    assert sorted(json.loads(done.out)["plots"]) == files
    assert "plots" not in json.loads(velox("inspect", demo_bundle, "--json").out)


def test_without_matplotlib(
    demo_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = velox("inspect", demo_bundle, "--plots", tmp_path / "a")
    assert done.code == 1
    assert done.error.endswith('inspect --plots needs matplotlib: pip install "velox-pack[plots]"')
    assert not (tmp_path / "a").exists()
    assert velox("inspect", demo_bundle).code == 0


def test_matplotlib_is_loaded_late_and_pyplot_never(demo_bundle: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from velox_pack.plots import draw; assert 'matplotlib' not in sys.modules; "
        f"draw({str(demo_bundle)!r}, {str(tmp_path)!r}); "
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def _random(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def _spectral(layers: int, heads: int, dim: int) -> Spectral:
    falling = np.sort(np.abs(_random(layers, heads, dim)) ** 3)[..., ::-1].copy()
    falling[..., -1] = 0
    return Spectral(
        part="keys", before_rope=True, mean=_random(layers, heads, dim),
        basis=np.broadcast_to(np.eye(dim), (layers, heads, dim, dim)).astype(np.float16),
        variance=falling, log_norm=_random(layers, 2), layers=tuple(range(3, 3 + layers)),
    )  # fmt: skip


def _lowrank(layers: int, heads: int, dim: int) -> LowRank:
    own = _spectral(layers, heads, dim)
    return LowRank(
        part="keys", before_rope=True, group=1, mean=own.mean, basis=own.basis,
        variance=own.variance, widths=np.ones((layers, heads, dim), np.uint8),
        log_norm=own.log_norm, layers=own.layers,
    )  # fmt: skip


def _filters(layers: int, heads: int, dim: int) -> QFilters:
    found = _random(layers, heads, dim)
    found /= np.linalg.norm(found, axis=-1, keepdims=True)
    return QFilters(filters=found, layers=tuple(range(layers)))


def _allocation(layers: int, heads: int, dim: int) -> Allocation:
    bits, zero = np.zeros(layers, np.float32), np.zeros((layers, heads), np.float32)
    return Allocation(
        target=3.0, achieved=3.0, keys=bits, values=bits, sensitivity_keys=zero,
        sensitivity_values=np.abs(_random(layers, heads)), layers=tuple(range(layers)),
    )  # fmt: skip


def _widths(layers: int, heads: int, dim: int) -> Widths:
    table = np.full((layers, dim), 3, np.uint8)
    return Widths(plan="x", bits=3.0, keys=table, values=table, layers=tuple(range(layers)))


def _report(layers: int, heads: int, dim: int) -> FilterReport:
    found = {role: np.tanh(_random(layers, heads)) for role in FilterReport.forms}
    found["positive"] = np.ones((layers, heads), np.float32)  # one value everywhere
    return FilterReport(**found, layers=tuple(range(layers)))


def _budgets(layers: int, heads: int, dim: int) -> Budgets:
    ratios = np.array([0.05, 0.1, 0.2, 0.3, 0.5], np.float32)
    shares = 1 + 0.5 * np.tanh(_random(layers, heads, len(ratios)))
    shares /= shares.mean(axis=(0, 1))
    return Budgets("ada", shares, ratios, layers=tuple(range(layers)))


@pytest.mark.parametrize("shape", [(1, 1, 2), (2, 3, 8), (80, 32, 16)])
@pytest.mark.parametrize(
    ("panels", "make", "count"),
    [
        (spectra.spectral, _spectral, 3),
        (spectra.lowrank, _lowrank, 4),
        (filters.directions, _filters, 2),
        (filters.report, _report, 7),
        (allocations.allocation, _allocation, 3),
        (allocations.widths, _widths, 3),
        (budgets.budgets, _budgets, None),  # a map of heads, if there are any
    ],
)
def test_any_size_can_be_drawn(
    panels: Callable[[canvas.Page, Any], None],
    make: Callable[[int, int, int], Artifact],
    count: int | None,
    shape: Shape,
) -> None:
    page = canvas.Page()
    panels(page, make(*shape))
    assert len(page.panels) == (count or (1 if shape[1] == 1 else 2))
    if shape[0] < 80 or panels is spectra.spectral:
        data = canvas.to_png(lambda page: panels(page, make(*shape)))
        height = int.from_bytes(data[20:24], "big") / canvas.DPI
        assert 2 < height < 24
