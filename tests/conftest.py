"""What all tests share: a fast BLAS, tiny models, a Hub on loopback, real models where given."""

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

if sys.platform == "linux":
    # MLX's CPU wheel brings the reference BLAS, some 50 times slower. One that is loaded before
    # MLX, with its symbols global, is used instead; results agree to about 1e-4.
    with suppress(OSError):
        ctypes.CDLL("libopenblas.so.0", mode=ctypes.RTLD_GLOBAL)

import pytest

from hub import Hub
from models import make_model

# Folders (several with `:` between them) that hold real models in the Hub's layout, one subfolder
# each, e.g. SmolLM2-135M-Instruct.
MODELS_VARIABLE = "VELOX_MODELS"

MakeModel = Callable[..., Path]


@pytest.fixture(scope="session")
def demo_path() -> Path:
    """The folder of the really trained tiny Llama that ships with the package."""
    from velox_pack.source import data_folder

    return data_folder() / "demo"


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    """Random numbers that a test draws without a key are the same in every run and order."""
    import mlx.core as mx

    mx.random.seed(0)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Where converted local sources are remembered: a folder of the tests' own."""
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def demo_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model converted with no options but few tokens; tests must not write to it."""
    from velox_pack import convert

    return convert("demo", tmp_path_factory.mktemp("demo") / "bundle", calibration_tokens=1024)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """`tiny_model("qwen3", seed=1, ...)`: `models.make_model` in a folder that tests share.

    The same arguments give the same folder, so tests must not write to it.
    """
    made: dict[str, Path] = {}

    def make(architecture: str = "llama", **options: Any) -> Path:
        key = repr((architecture, sorted(options.items())))
        if key not in made:
            made[key] = make_model(
                tmp_path_factory.mktemp(architecture) / architecture, architecture, **options
            )
        return made[key]

    return make


@pytest.fixture
def own_model(tmp_path: Path) -> MakeModel:
    """`own_model("llama", ...)`: a folder of the test's own, to damage as it likes."""

    def make(architecture: str = "llama", **options: Any) -> Path:
        return make_model(tmp_path / architecture, architecture, **options)

    return make


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub on loopback that the unchanged client talks to, with an empty cache and no login."""
    from huggingface_hub import constants

    with Hub() as server:
        home = tmp_path / "hf"
        settings = {
            "ENDPOINT": server.url,
            "HUGGINGFACE_CO_URL_TEMPLATE": server.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HOME": str(home),
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_TOKEN_PATH": str(home / "token"),
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_OFFLINE": False,
        }
        for name, value in settings.items():
            monkeypatch.setattr(constants, name, value)
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.setenv(name, "127.0.0.1,localhost")
        yield server


def real_model(name: str) -> Path:
    """Find a real model by the name of its folder under VELOX_MODELS, or skip the test."""
    roots = [r for r in os.environ.get(MODELS_VARIABLE, "").split(os.pathsep) if r]
    for folder in (Path(root) / name for root in roots):
        if (folder / "config.json").is_file():
            return folder
    where = f"not in {roots}" if roots else "name folders of models"
    pytest.skip(f"needs the real model {name}: {MODELS_VARIABLE}: {where}")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct: Llama, 30 layers; its weights were 4-bit once."""
    return real_model("SmolLM2-135M-Instruct")


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """Gemma-3-270M: sliding and full layers, head dim 256; its weights were 4-bit once."""
    return real_model("gemma-3-270m")


@pytest.fixture(scope="session")
def small() -> Path:
    """`small`: Llama, 43.8 M parameters, never quantized."""
    return real_model("small")
