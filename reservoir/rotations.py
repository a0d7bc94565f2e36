"""Rotations of a model's packed layers: one for each input width, shared by all layers of it.

Stored once in the bundle as `velox.rotation.<id>.signs` (int8 +-1 [width]) and, where the rotation
mixes blocks, `velox.rotation.<id>.mix` (float32 [m, m]). The id is `w<width>`.
"""

from collections.abc import Iterable, Mapping

import mlx.core as mx
import numpy as np

from velox_pack.kernels import StructuredRotation, largest_power_of_two, make_rotation
from velox_pack.manifests.errors import PackError

_ORTHOGONAL = 1e-4


def rotation_id(width: int) -> str:
    """Id of the rotation for inputs of this width."""
    return f"w{width}"


def make_rotations(widths: Iterable[int], seed: int) -> dict[str, StructuredRotation]:
    """Id -> rotation for each width, drawn from (seed, width)."""
    return {rotation_id(width): make_rotation(width, seed) for width in sorted(set(widths))}


def tensor_name(rotation: str, role: str) -> str:
    """Name in the bundle of the `signs` or the `mix` of a rotation id."""
    return f"velox.rotation.{rotation}.{role}"


def rotations_to_tensors(
    rotations: Mapping[str, StructuredRotation],
) -> dict[str, dict[str, mx.array]]:
    """Id -> role -> array as it is stored."""
    tensors: dict[str, dict[str, mx.array]] = {}
    for name, rotation in rotations.items():
        tensors[name] = {"signs": rotation.signs.astype(mx.int8)}
        if rotation.mix is not None:
            tensors[name]["mix"] = rotation.mix
    return tensors


def rotations_from_tensors(
    tensors: Mapping[str, Mapping[str, mx.array]],
) -> dict[str, StructuredRotation]:
    """Id -> rotation from id -> role -> stored array.

    Nothing is drawn or decomposed. Raises PackError, naming the rotation, if roles, dtypes or
    shapes are wrong, a sign is not +-1 or a mix is not orthogonal.
    """
    return {name: _from_roles(name, dict(roles)) for name, roles in tensors.items()}


def _from_roles(name: str, roles: dict[str, mx.array]) -> StructuredRotation:
    signs, mix = roles.pop("signs", None), roles.pop("mix", None)
    if signs is None or roles:
        raise PackError(f"rotation {name}: needs signs and perhaps mix, has {sorted(roles)}")
    if signs.dtype != mx.int8 or signs.ndim != 1 or signs.shape[0] < 1:
        raise PackError(f"rotation {name}: signs must be int8 with one axis")
    if not bool(mx.all(mx.abs(signs) == 1).item()):
        raise PackError(f"rotation {name}: a sign is not +1 or -1")
    width = signs.shape[0]
    block = largest_power_of_two(width)
    if mix is not None:
        if mix.dtype != mx.float32 or mix.ndim != 2 or mix.shape[0] < 1 or width % mix.shape[0]:
            raise PackError(f"rotation {name}: a mix {mix.shape} does not fit width {width}")
        block = width // mix.shape[0]
        matrix = np.array(mix, dtype=np.float64)
        if matrix.shape[0] != matrix.shape[1] or not (
            np.abs(matrix @ matrix.T - np.eye(len(matrix))).max() < _ORTHOGONAL
        ):
            raise PackError(f"rotation {name}: its mix is not orthogonal")
    try:
        return StructuredRotation(signs.astype(mx.float32), block, mix)
    except ValueError as error:
        raise PackError(f"rotation {name}: {error}") from error
