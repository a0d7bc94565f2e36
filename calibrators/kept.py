"""Activations set aside on disk: those of all layers together are larger than a layer's weights."""

import math
import tempfile

import mlx.core as mx
import numpy as np

_SIZE = 4  # bytes of a float32


class Kept:
    """A stack of float32 arrays in a temporary file without a name; use it in a `with` block."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the stack is used
        self._shapes: list[tuple[int, ...]] = []

    def __enter__(self) -> "Kept":
        return self

    def __exit__(self, *_error: object) -> None:
        self._file.close()

    def append(self, x: mx.array) -> None:
        """Evaluate and write x; raises OSError if the disk is full."""
        array = np.array(x.astype(mx.float32), copy=False)
        self._file.write(np.ascontiguousarray(array).data.cast("B"))
        self._shapes.append(x.shape)

    def pop(self) -> mx.array:
        """Read and remove what was written last."""
        shape = self._shapes.pop()
        size = _SIZE * math.prod(shape)
        start = self._file.seek(-size, 2)
        array = np.frombuffer(self._file.read(size), np.float32).reshape(shape)
        self._file.seek(start)
        self._file.truncate()
        return mx.array(array)
