"""The wheel: what is in it, and that it works far from any checkout."""

import os
import shutil
import subprocess
import sys
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("velox_pack", "calibrators", "kernels", "manifests", "reservoir")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel from a copy of the checkout, with the setuptools that are installed."""
    copy = tmp_path_factory.mktemp("wheel") / "checkout"
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
    for room in ROOMS:
        shutil.copytree(ROOT / room, copy / room, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    out = copy.parent / "dist"
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out)]
    done = subprocess.run([*build, str(copy)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel alone into an empty folder."""
    target = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, "--target", str(target), str(wheel)], check=True)
    return target


def run(installed: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in `folder` with the installed copy first on its path and the Hub out of reach."""
    environment = os.environ | {"PYTHONPATH": str(installed), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def sources() -> dict[str, Path]:
    """Map each file's name in the wheel to its place in the checkout: all Python of the rooms."""
    found = {}
    for room in ROOMS:
        inside = "velox_pack" if room == "velox_pack" else f"velox_pack/{room}"
        for path in (ROOT / room).rglob("*.py"):
            found[f"{inside}/{path.relative_to(ROOT / room).as_posix()}"] = path
    return found


def test_every_module_and_all_data_are_in_the_wheel(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        names = set(archive.namelist())
        for name, path in sources().items():
            assert name in names, f"{name}: is its package listed in pyproject.toml?"
            assert archive.read(name) == path.read_bytes()
    for path in (ROOT / "velox_pack/data").rglob("*"):
        assert path.is_dir() or path.relative_to(ROOT).as_posix() in names
    assert {"velox_pack/py.typed", "velox_pack/manifests/schema.json"} <= names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_nothing_else_is_in_the_wheel(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    assert len(tops) == 2
    assert all(top == "velox_pack" or top.endswith(".dist-info") for top in tops)
    parts = {part for name in names for part in name.split("/")}
    assert not [p for p in parts if p == "tests" or p.startswith("test_") or p.endswith(".pyc")]
    assert wheel.stat().st_size < 10_000_000


def test_metadata(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = Parser().parsestr(archive.read(name).decode())
        (name,) = (n for n in archive.namelist() if n.endswith("entry_points.txt"))
        assert "velox-pack = velox_pack.cli:main" in archive.read(name).decode()
    assert metadata["License-Expression"] == "MIT"
    assert metadata["Requires-Python"] == ">=3.11"
    required = metadata.get_all("Requires-Dist")
    # Plain mlx has no backend on Linux and must not be pulled in there beside one of the extras.
    assert [r for r in required if r.startswith("mlx>=")] == [
        'mlx>=0.32.2; platform_system == "Darwin"'
    ]
    assert {"cpu", "cuda12", "cuda13", "plots"} <= set(metadata.get_all("Provides-Extra"))


def test_it_works_from_another_folder(installed: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import importlib, pkgutil, sys, velox_pack\n"
        "from velox_pack.source import data_folder, resolve\n"
        "resolve('demo').check_weights()\n"
        "assert (data_folder() / 'text' / 'calibration.txt').is_file()\n"
        "for module in pkgutil.walk_packages(velox_pack.__path__, 'velox_pack.'):\n"
        "    if not module.name.endswith('__main__'):\n"
        "        importlib.import_module(module.name)\n"
        "for name, module in sys.modules.items():\n"
        "    if name.split('.')[0] == 'velox_pack':\n"
        "        print(module.__file__)\n"
    )
    done = run(installed, tmp_path, str(script))
    assert done.returncode == 0, done.stderr
    files = done.stdout.splitlines()
    assert len(files) == len([n for n in sources() if not n.endswith("__main__.py")])
    assert all(Path(f).is_relative_to(installed) for f in files)


def test_the_command_works_from_another_folder(installed: Path, tmp_path: Path) -> None:
    command = "import sys; from velox_pack.cli import main; sys.exit(main())"
    convert = ["convert", "demo", "--out", "bundle", "--dry-run"]
    done = run(installed, tmp_path, "-c", command, *convert)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
