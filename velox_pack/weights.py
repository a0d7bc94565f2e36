"""What `--weights` may say, and how parameters travel from a source into a bundle."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, cast

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from velox_pack.caches import grammar
from velox_pack.calibrators import codebooks
from velox_pack.kernels.rotation import StructuredRotation
from velox_pack.manifests import manifest
from velox_pack.manifests.aligned import TensorSpec, spec_of
from velox_pack.manifests.dtypes import dtype_name
from velox_pack.manifests.errors import RecipeError
from velox_pack.manifests.writer import WeightWriter
from velox_pack.reservoir.pack import pack_linear
from velox_pack.reservoir.rotations import make_rotations, rotations_to_tensors, tensor_name
from velox_pack.reservoir.select import Selection, select
from velox_pack.reservoir.spec import LinearSpec, packed_specs
from velox_pack.source import Source, check_finite


@dataclass(frozen=True)
class Keep:
    """Parameters are copied as they are."""

    encoding: ClassVar[Literal["keep"]] = "keep"


@dataclass(frozen=True)
class Overlay:
    """No parameters are stored; the bundle names the Hub repo and commit that has them."""

    encoding: ClassVar[Literal["overlay"]] = "overlay"


@dataclass(frozen=True)
class Lloyd:
    """Rotated rows, Lloyd-Max levels, one scale per row: smallest at equal quality."""

    encoding: ClassVar[Literal["lloyd"]] = "lloyd"
    bits: int = 4

    def __post_init__(self) -> None:
        """Check the bits."""
        if self.bits not in (2, 3, 4):
            raise RecipeError(f"lloyd: bits={self.bits} is not 2, 3 or 4")


@dataclass(frozen=True)
class Affine:
    """Rotated rows in MLX's own affine format: `mx.quantized_matmul` multiplies it everywhere."""

    encoding: ClassVar[Literal["affine"]] = "affine"
    bits: int = 4
    group: int = 64

    def __post_init__(self) -> None:
        """Check bits and group."""
        if self.bits not in (2, 3, 4, 5, 6, 8):
            raise RecipeError(f"affine: bits={self.bits} is not 2, 3, 4, 5, 6 or 8")
        if self.group not in (32, 64, 128):
            raise RecipeError(f"affine: group={self.group} is not 32, 64 or 128")


WeightPlan = Keep | Overlay | Lloyd | Affine
KINDS: dict[str, type[Any]] = {"keep": Keep, "overlay": Overlay, "lloyd": Lloyd, "affine": Affine}
DEFAULT = "affine:bits=4,group=64"


def parse(text: str) -> WeightPlan:
    """Read `lloyd:bits=4`. Raises RecipeError that lists the valid names or keys."""
    parts = grammar.parse(text)
    if len(parts) != 1 or parts[0].name not in KINDS:
        raise RecipeError(f"weights {text!r}: give one of {', '.join(KINDS)}")
    plan: WeightPlan = grammar.make(KINDS[parts[0].name], parts[0].name, parts[0].options)
    return plan


@dataclass(frozen=True)
class Packing:
    """What becomes codes and what is kept; with `keep` and `overlay` nothing becomes codes."""

    plan: WeightPlan
    selection: Selection | None
    parameters_total: int

    @property
    def packed(self) -> Mapping[str, LinearSpec]:
        """Packed linear layers by path."""
        return self.selection.packed if self.selection else {}

    @property
    def kept(self) -> list[tuple[str, str]]:
        """Linear layers and tables that are kept, with the reason (norms go without saying)."""
        if self.selection is None:
            return []
        return [(k.path, k.reason) for k in self.selection.kept if k.reason != "norm"]

    def coverage(self) -> str:
        """One line for people."""
        if self.selection is not None:
            return self.selection.coverage()
        if isinstance(self.plan, Overlay):
            return "no parameters stored: they are fetched from the base repo"
        return "parameters copied as they are"


def choose(model: nn.Module, plan: WeightPlan) -> Packing:
    """Decide for every module of a model whose parameters need not be evaluated."""
    if isinstance(plan, Lloyd):
        selection = select(model, "lloyd", plan.bits)
    elif isinstance(plan, Affine):
        selection = select(model, "affine", plan.bits, plan.group)
    else:
        flat = cast(list[tuple[str, mx.array]], tree_flatten(model.parameters()))
        total = sum(int(a.size) for _, a in flat)
        return Packing(plan, None, total)
    return Packing(plan, selection, selection.parameters_total)


def specs_of(weights: Mapping[str, mx.array], packing: Packing) -> dict[str, TensorSpec]:
    """Name, type and shape of every tensor to be stored; no data is read."""
    if isinstance(packing.plan, Overlay):
        return {}
    specs: dict[str, TensorSpec] = {}
    for name, array in weights.items():
        path, _, role = name.rpartition(".")
        spec = packing.packed.get(path)
        if spec is None:
            specs[name] = spec_of(array)
        elif role == "weight":
            bias = weights.get(f"{path}.bias")
            planned = packed_specs(
                path,
                spec.out_features,
                spec.in_features,
                None if bias is None else dtype_name(bias),
                spec.encoding,
                spec.bits,
                spec.group,
                dtype_name(array),
            )
            specs |= {n: TensorSpec(dtype, shape) for n, (dtype, shape) in planned.items()}
    return specs


def write(
    writer: WeightWriter,
    source: Source,
    packing: Packing,
    rotations: Mapping[str, StructuredRotation],
    report: Callable[[str], None],
) -> None:
    """Read, pack and write one module at a time; nothing stays in memory.

    Raises SourceError for NaN or infinity in a weight, naming it, and PackError.
    """
    weights = source.weights()
    book = codebooks.fit().levels if isinstance(packing.plan, Lloyd) else {}
    block = ""
    for name in sorted(weights, key=_natural):
        path = name.rpartition(".")[0]
        spec = packing.packed.get(path)
        if spec is None:
            array = weights.pop(name)
            check_finite(name, array)
            writer.write(name, array)
            del array
        elif f"{path}.weight" in weights:  # else this is a bias that went with its weight
            weight, bias = weights.pop(f"{path}.weight"), weights.pop(f"{path}.bias", None)
            check_finite(f"{path}.weight", weight)
            if bias is not None:
                check_finite(f"{path}.bias", bias)
            if _block(path) != block:
                block = _block(path)
                report(f"packing {block}")
            levels = mx.array(book[spec.bits]) if spec.encoding == "lloyd" else None
            for tensor, value in pack_linear(path, weight, bias, spec, rotations, levels).items():
                writer.write(tensor, value)
            del weight, bias


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Sorts layers.10 after layers.9."""
    return [(not p.isdigit(), int(p) if p.isdigit() else 0, p) for p in name.split(".")]


def _block(path: str) -> str:
    """`model.layers.3` of `model.layers.3.mlp.up_proj`: progress goes by layers."""
    parts = path.split(".")
    last = max((i for i, part in enumerate(parts) if part.isdigit()), default=len(parts) - 1)
    return ".".join(parts[: last + 1])


def rotations_of(
    packing: Packing, seed: int
) -> tuple[dict[str, StructuredRotation], dict[str, mx.array]]:
    """The rotations of the packed layers, and the tensors that store them."""
    widths = packing.selection.widths if packing.selection else ()
    rotations = make_rotations(widths, seed)
    tensors = {
        tensor_name(name, role): array
        for name, roles in rotations_to_tensors(rotations).items()
        for role, array in roles.items()
    }
    return rotations, tensors


def record(
    packing: Packing, rotations: Mapping[str, StructuredRotation], source_bytes: int
) -> manifest.Weights:
    """The manifest's account of the weights; an overlay's says how large its base is."""
    stored = rotations_to_tensors(rotations)
    parameters = asdict(packing.plan)
    if isinstance(packing.plan, Overlay):
        parameters["base_bytes"] = source_bytes
    return manifest.Weights(
        encoding=packing.plan.encoding,
        parameters=parameters,
        rotations={
            name: manifest.Rotation(
                width=rotation.width,
                tensors={role: tensor_name(name, role) for role in stored[name]},
            )
            for name, rotation in rotations.items()
        },
        packed={
            path: manifest.PackedLayer(**asdict(spec)) for path, spec in packing.packed.items()
        },
        kept=[manifest.KeptLayer(path=path, reason=reason) for path, reason in packing.kept],
        parameters_packed=packing.selection.parameters_packed if packing.selection else 0,
        parameters_total=packing.parameters_total,
    )
