"""mlx_lm.server on a bundle, through `--trust-remote-code`."""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest

import velox_pack
from velox_pack.conversion import convert
from velox_pack.source import resolve

PROMPTS = [
    "She opened the door, and",
    "Emma was not",
    "In the beginning God created the heaven and the earth. " * 6,
    "The file system is " * 30,
]
TOKENS = 40
# Before MLX is imported, as `velox-pack` itself does it.
START = (
    "from velox_pack import blas; blas.preload(); import runpy; "
    "runpy.run_module('mlx_lm.server', run_name='__main__')"
)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo in float32, so that a batch's last digits tip no token."""
    folder = tmp_path_factory.mktemp("server")
    source = folder / "model"
    shutil.copytree(resolve("demo").path, source)
    weights = mx.load(str(source / "model.safetensors"))
    assert isinstance(weights, dict)
    wide = {name: a.astype(mx.float32) for name, a in weights.items()}
    mx.eval(wide)
    (source / "model.safetensors").unlink()
    mx.save_safetensors(str(source / "model.safetensors"), wide, metadata={"format": "mlx"})
    return convert(source, folder / "bundle", weights="keep", calibration_tokens=1024)


@pytest.fixture
def server(bundle: Path, tmp_path: Path) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = ["--model", str(bundle), "--trust-remote-code", "--port", str(port)]
    with (tmp_path / "log").open("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", START, *arguments],
            stdout=log,
            stderr=log,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )
        try:
            address = f"http://127.0.0.1:{port}"
            for _ in range(240):
                try:
                    urllib.request.urlopen(f"{address}/v1/models", timeout=5).close()
                    break
                except urllib.error.URLError:
                    log.seek(0)
                    assert process.poll() is None, log.read()
                    time.sleep(0.25)
            yield address
        finally:
            process.terminate()
            process.wait(30)


def complete(address: str, prompt: str) -> str:
    body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "model": "default_model"}
    request = urllib.request.Request(
        f"{address}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=200) as answer:
        text: str = json.load(answer)["choices"][0]["text"]
    return text


def test_four_at_once_get_what_each_gets_alone(bundle: Path, server: str) -> None:
    model, tokenizer = velox_pack.load(bundle)
    alone = [mlx_lm.generate(model, tokenizer, prompt=p, max_tokens=TOKENS) for p in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        together = list(pool.map(lambda prompt: complete(server, prompt), PROMPTS))
    assert [t.strip() for t in together] == [t.strip() for t in alone]
