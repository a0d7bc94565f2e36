"""Packs one linear layer at a time, and grafts empty packed layers into a model."""

from collections.abc import Mapping

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from velox_pack.kernels import StructuredRotation, rotate
from velox_pack.manifests.dtypes import MLX_TYPES, dtype_name
from velox_pack.manifests.errors import PackError
from velox_pack.reservoir.encoding import encode_affine, encode_lloyd
from velox_pack.reservoir.linear import ReservoirLinear
from velox_pack.reservoir.spec import LinearSpec, PackedRecord, scale_dtype

# Elements rotated at once in float32.
_BLOCK_ELEMENTS = 1 << 22


def pack_linear(
    path: str,
    weight: mx.array,
    bias: mx.array | None,
    spec: LinearSpec,
    rotations: Mapping[str, StructuredRotation],
    levels: mx.array | None,
) -> dict[str, mx.array]:
    """Full name -> array of one packed layer; what `packed_specs` predicts, evaluated.

    weight [out, in] of a float dtype; levels float32 [2^bits] of a source of variance 1, sorted
    (lloyd). Raises PackError naming the layer if shapes differ from the spec, a value is not
    finite or something is missing.
    """
    if weight.shape != (spec.out_features, spec.in_features):
        raise PackError(f"{path}: weight {weight.shape} is not what was planned ({spec})")
    if (bias is not None) != spec.bias:
        raise PackError(f"{path}: {'unplanned' if bias is not None else 'missing'} bias")
    try:
        rows = _rotated(weight, spec, rotations)
        if spec.group is None:
            if levels is None:
                raise PackError("needs a codebook of levels")
            arrays = encode_lloyd(rows, levels, spec.bits)
        else:
            dtype = MLX_TYPES[scale_dtype(spec.encoding, dtype_name(weight))]
            arrays = encode_affine(rows, spec.bits, spec.group, dtype)
    except PackError as error:
        raise PackError(f"{path}: {error}") from error
    if bias is not None:
        arrays["bias"] = bias
    mx.eval(arrays)
    return {f"{path}.{name}": array for name, array in sorted(arrays.items())}


def _rotated(
    weight: mx.array, spec: LinearSpec, rotations: Mapping[str, StructuredRotation]
) -> mx.array:
    """Weight rows float32 turned along the input; as they are without a rotation."""
    if spec.rotation is None:
        return weight
    rotation = _rotation(spec, rotations)
    step = max(1, _BLOCK_ELEMENTS // weight.shape[1])
    blocks = []
    for start in range(0, weight.shape[0], step):
        blocks.append(rotate(weight[start : start + step].astype(mx.float32), rotation))
        mx.eval(blocks[-1])
    return mx.concatenate(blocks)


def _rotation(spec: LinearSpec, rotations: Mapping[str, StructuredRotation]) -> StructuredRotation:
    name = spec.rotation or ""
    if name not in rotations:
        raise PackError(f"rotation {name!r} is missing; there are {sorted(rotations)}")
    return rotations[name]


def graft(
    model: nn.Module,
    packed: Mapping[str, PackedRecord],
    rotations: Mapping[str, StructuredRotation],
) -> None:
    """Put empty packed layers in the place of the linears at these paths; computes nothing.

    Parameters are loaded into the model afterwards. Raises PackError, naming the path, if there is
    no linear layer of that shape.
    """
    modules = dict(model.named_modules())
    grafted: list[tuple[str, ReservoirLinear]] = []
    for path, record in packed.items():
        old = modules.get(path)
        if type(old) is not nn.Linear:
            raise PackError(f"{path}: the model has no linear layer there")
        try:
            spec = LinearSpec.of(record)
            if old.weight.shape != (spec.out_features, spec.in_features):
                raise PackError(
                    f"the model's linear is {old.weight.shape}, the packed one "
                    f"({spec.out_features}, {spec.in_features})"
                )
            if ("bias" in old) != spec.bias:
                raise PackError("model and packed layer differ about a bias")
            rotation = None if spec.rotation is None else _rotation(spec, rotations)
            grafted.append((path, ReservoirLinear(spec, rotation)))
        except PackError as error:
            raise PackError(f"{path}: {error}") from error
    model.update_modules(tree_unflatten(grafted))
