"""The element types of safetensors that a bundle may hold, with their sizes and MLX names.

Sub-byte types (F4, F6_*) are refused everywhere: neither MLX nor NumPy can hold them. Float8 and
float64 may be read as headers (a source may have them), never written: `mx.load` turns the
former into uint8 and refuses the latter.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

# Bytes of one element, for every type whose header entries we understand.
ITEM_BYTES: dict[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}

# The types that a bundle may hold: a round trip through MLX keeps every bit and the type.
MLX_TYPES: dict[str, mx.Dtype] = {
    "BOOL": mx.bool_,
    "U8": mx.uint8,
    "I8": mx.int8,
    "U16": mx.uint16,
    "I16": mx.int16,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "U32": mx.uint32,
    "I32": mx.int32,
    "F32": mx.float32,
    "U64": mx.uint64,
    "I64": mx.int64,
}

# What `mx.load` can open; F8_E4M3 and F8_E8M0 come out as uint8.
LOADABLE: frozenset[str] = frozenset(MLX_TYPES) | {"C64", "F8_E4M3", "F8_E8M0"}

_OF_MLX: dict[mx.Dtype, str] = {dtype: name for name, dtype in MLX_TYPES.items()}
_OF_NUMPY: dict[np.dtype[np.generic], str] = {
    np.dtype(np.bool_): "BOOL",
    np.dtype(np.uint8): "U8",
    np.dtype(np.int8): "I8",
    np.dtype(np.uint16): "U16",
    np.dtype(np.int16): "I16",
    np.dtype(np.float16): "F16",
    np.dtype(np.uint32): "U32",
    np.dtype(np.int32): "I32",
    np.dtype(np.float32): "F32",
    np.dtype(np.uint64): "U64",
    np.dtype(np.int64): "I64",
}


def dtype_name(array: mx.array | np.ndarray) -> str:
    """The safetensors name of an array's type ("BF16", "U32", ...).

    Raises ValueError for a type that a bundle does not hold (float64, complex, objects, ...).
    """
    found = (
        _OF_MLX.get(array.dtype)
        if isinstance(array, mx.array)
        else _OF_NUMPY.get(array.dtype.newbyteorder("="))
    )
    if found is None:
        raise ValueError(f"type {array.dtype} cannot be stored; allowed: {', '.join(MLX_TYPES)}")
    return found
