"""What a measurement ran on, and the dtype in which this machine's backend is fast."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import mlx.core as mx

from velox_pack.blas import is_preloaded

PACKAGES = ("velox-pack", "mlx", "mlx-lm", "numpy")


def on_cpu() -> bool:
    """Whether MLX computes on its CPU backend."""
    return bool(mx.default_device() == mx.cpu)


def fast_dtype() -> mx.Dtype:
    """float32 on the CPU backend, whose 16-bit products are slow; bfloat16 on a GPU."""
    return mx.float32 if on_cpu() else mx.bfloat16


def versions(packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Installed versions of packages."""
    found = {}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def describe() -> dict[str, str]:
    """Device, system and versions, without anything that names the machine or its user."""
    device = "CPU" if on_cpu() else str(mx.device_info().get("device_name", "GPU"))
    blas = "preloaded BLAS" if is_preloaded() else "default BLAS"
    return {
        "device": f"{device} ({platform.machine()}, {os.cpu_count()} cores)",
        "system": f"{platform.system()}, Python {platform.python_version()}, {blas}",
        "versions": ", ".join(f"{k} {v}" for k, v in versions().items()),
    }
