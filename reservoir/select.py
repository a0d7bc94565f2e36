"""Which linear layers of a model are packed, and why the others are kept."""

from collections import Counter
from dataclasses import dataclass
from typing import Literal

import mlx.core as mx
import mlx.nn as nn

from velox_pack.manifests.dtypes import ITEM_BYTES, dtype_name
from velox_pack.reservoir.rotations import rotation_id
from velox_pack.reservoir.spec import LinearSpec, check_encoding, packed_specs, specs_nbytes


@dataclass(frozen=True)
class Kept:
    """A module that is stored as it is. `linear`: it does a matrix product that could be packed."""

    path: str
    reason: str
    parameters: int
    linear: bool


@dataclass(frozen=True)
class Selection:
    """What is packed (path -> spec, sorted by path) and what is kept, in the model's order."""

    packed: dict[str, LinearSpec]
    kept: tuple[Kept, ...]
    parameters_packed: int
    parameters_total: int

    @property
    def widths(self) -> tuple[int, ...]:
        """Input widths that need a rotation."""
        return tuple(sorted({s.in_features for s in self.packed.values() if s.rotation}))

    def coverage(self) -> str:
        """One line: "144 of 168 linears packed; kept 24: already quantized (24)"."""
        kept = Counter(k.reason for k in self.kept if k.linear)
        total = len(self.packed) + sum(kept.values())
        line = f"{len(self.packed)} of {total} linears packed"
        if kept:
            reasons = ", ".join(f"{reason} ({n})" for reason, n in sorted(kept.items()))
            line += f"; kept {sum(kept.values())}: {reasons}"
        return line


def select(
    model: nn.Module, encoding: str, bits: int, group: int | None = None, rotated: bool = True
) -> Selection:
    """Decide for every module of a model whose parameters need not be evaluated.

    Only the exact class `nn.Linear` inside the model's layers is packed. Raises PackError for an
    encoding that does not exist; whatever one layer's shape forbids is a reason to keep it.
    """
    check_encoding(encoding, bits, group)
    modules = dict(model.named_modules())
    in_layers = _layer_paths(model)
    packed: dict[str, LinearSpec] = {}
    kept: list[Kept] = []
    for path, module in sorted(modules.items(), key=lambda item: _natural(item[0])):
        size = _own_parameters(module)
        if not size:
            continue
        reason, linear = _reason(path, module, modules, in_layers)
        if reason is None:
            spec, reason = _spec(path, module, encoding, bits, group, rotated)
            if spec is not None:
                packed[path] = spec
                continue
        kept.append(Kept(path or "(model)", reason or "", size, linear))
    total = sum(_own_parameters(module) for module in modules.values())
    parameters_packed = sum(s.parameters for s in packed.values())
    return Selection(dict(sorted(packed.items())), tuple(kept), parameters_packed, total)


def _reason(
    path: str, module: nn.Module, modules: dict[str, nn.Module], in_layers: tuple[str, ...]
) -> tuple[str | None, bool]:
    """Why a module is kept (None: it may be packed) and whether it is a linear layer."""
    kind = type(module).__name__
    if isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding):
        return "already quantized", isinstance(module, nn.QuantizedLinear)
    if "Switch" in kind:
        return "stacked experts", True
    if isinstance(module, nn.Embedding):
        return "embedding", False
    if "Norm" in kind:
        return "norm", False
    if not isinstance(module, nn.Linear):
        return f"not a linear layer ({kind})", False
    if type(module) is not nn.Linear:
        return f"a linear of a kind of its own ({kind})", True
    parent, _, name = path.rpartition(".")
    if "lm_head" in name:
        return "output head", True
    if in_layers and not path.startswith(in_layers):
        return "outside the layers", True
    if any("Switch" in type(m).__name__ for p, m in modules.items() if _parent(p) == parent):
        return "router of experts", True
    return None, True


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _own_parameters(module: nn.Module) -> int:
    """Parameters that belong to the module itself, not to its children."""
    own = [v for k, v in module.items() if isinstance(v, mx.array) and not k.startswith("_")]
    return sum(v.size for v in own)


def _spec(
    path: str, module: nn.Module, encoding: str, bits: int, group: int | None, rotated: bool
) -> tuple[LinearSpec | None, str | None]:
    """The spec of a layer, or why its shape forbids it."""
    weight, bias = module["weight"], module.get("bias")
    out, width = weight.shape
    if not mx.issubdtype(weight.dtype, mx.floating):
        return None, f"weights of type {dtype_name(weight)}"
    if group is not None and width % group:
        return None, f"width is not a multiple of group {group}"
    bias_dtype = None if bias is None else dtype_name(bias)
    specs = packed_specs(path, out, width, bias_dtype, encoding, bits, group)
    plain = 2 * weight.size + (0 if bias is None else bias.size * ITEM_BYTES[dtype_name(bias)])
    if specs_nbytes(specs) >= plain:
        return None, "would not get smaller"
    rotation = rotation_id(width) if rotated else None
    kind: Literal["lloyd", "affine"] = "lloyd" if group is None else "affine"
    return LinearSpec(kind, bits, group, rotation, width, out, bias is not None), None


def _layer_paths(model: nn.Module) -> tuple[str, ...]:
    """Path prefixes of the members of `model.layers`, () if it has none."""
    layers = {id(layer) for layer in getattr(model, "layers", None) or []}
    return tuple(f"{p}." for p, m in model.named_modules() if id(m) in layers)


def _natural(path: str) -> tuple[tuple[bool, int, str], ...]:
    """Sorts layers.10 after layers.9."""
    return tuple((not p.isdigit(), int(p) if p.isdigit() else 0, p) for p in path.split("."))
