"""A fast BLAS for MLX's CPU backend on Linux, whose wheel brings the reference one."""

import ctypes
import os
import sys
from contextlib import suppress

_loaded = False


def preload() -> None:
    """Load OpenBLAS with its symbols global, if it is there; only before MLX is imported.

    MLX then multiplies float32 matrices some 50 to 75 times faster, equal to rounding. Elsewhere,
    or without OpenBLAS, nothing changes.
    """
    if sys.platform == "linux" and "mlx.core" not in sys.modules:
        with suppress(OSError):
            ctypes.CDLL("libopenblas.so.0", mode=ctypes.RTLD_GLOBAL)
            global _loaded
            _loaded = True


def is_preloaded() -> bool:
    """Whether a BLAS came before MLX's own: loaded here, or by LD_PRELOAD."""
    return _loaded or "blas" in os.environ.get("LD_PRELOAD", "").lower()
