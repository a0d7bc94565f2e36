"""Memory that is free goes back to the system, not only to the process."""

import ctypes
from contextlib import suppress

import mlx.core as mx


def give_back() -> None:
    """Empty MLX's cache of buffers and, where the C library can (glibc), trim its heap.

    Statistics that stay are scattered among activations that went; without this, half a gigabyte
    of holes between them stays resident (measured on 36 layers of Qwen3-4B's shapes).
    """
    mx.clear_cache()
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
