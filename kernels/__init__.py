"""Numeric hot operations, each defined once as an MLX reference, for converter and caches."""

from velox_pack.kernels.hadamard import hadamard, is_power_of_two, largest_power_of_two
from velox_pack.kernels.levels import midpoints, nearest_centroid, quantize_levels
from velox_pack.kernels.lookup import level_table, unpack_levels
from velox_pack.kernels.packing import (
    mixed_words,
    pack,
    pack_mixed,
    packed_words,
    unpack,
    unpack_mixed,
)
from velox_pack.kernels.rope import apply_rope, rope_angles, undo_rope
from velox_pack.kernels.rotation import (
    StructuredRotation,
    make_rotation,
    mix_size,
    rotate,
    rotate_transpose,
)

__all__ = [
    "StructuredRotation",
    "apply_rope",
    "hadamard",
    "is_power_of_two",
    "largest_power_of_two",
    "level_table",
    "make_rotation",
    "midpoints",
    "mix_size",
    "mixed_words",
    "nearest_centroid",
    "pack",
    "pack_mixed",
    "packed_words",
    "quantize_levels",
    "rope_angles",
    "rotate",
    "rotate_transpose",
    "undo_rope",
    "unpack",
    "unpack_levels",
    "unpack_mixed",
]
