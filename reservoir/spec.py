"""What a packed linear layer is, and what its tensors are called and shaped, before any data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, cast

from velox_pack.kernels import packed_words
from velox_pack.manifests.dtypes import ITEM_BYTES
from velox_pack.manifests.errors import PackError

LLOYD_BITS = (2, 3, 4, 5, 6, 7, 8)
AFFINE_BITS = (2, 3, 4, 5, 6, 8)
AFFINE_GROUPS = (32, 64, 128)

# (safetensors dtype, shape) of each tensor, by name.
Specs = dict[str, tuple[str, tuple[int, ...]]]


class PackedRecord(Protocol):
    """The fields of a packed layer's record in the manifest."""

    @property
    def encoding(self) -> str:
        """ "lloyd" or "affine"."""

    @property
    def bits(self) -> int:
        """Bits of a code."""

    @property
    def group(self) -> int | None:
        """Inputs that share a scale (affine)."""

    @property
    def rotation(self) -> str | None:
        """Id of the rotation of its input."""

    @property
    def in_features(self) -> int:
        """Inputs."""

    @property
    def out_features(self) -> int:
        """Outputs."""

    @property
    def bias(self) -> bool:
        """Whether it adds a bias."""


@dataclass(frozen=True)
class LinearSpec:
    """One packed linear layer; the fields are those of the manifest's record.

    encoding: "lloyd" (one scale a row, levels of a codebook) or "affine" (MLX's groups). bits of
    a code; group: inputs that share a scale (affine) or None. rotation: id of the rotation of the
    input, or None. Raises PackError for a combination that cannot be stored.
    """

    encoding: Literal["lloyd", "affine"]
    bits: int
    group: int | None
    rotation: str | None
    in_features: int
    out_features: int
    bias: bool

    def __post_init__(self) -> None:
        check_encoding(self.encoding, self.bits, self.group)
        if self.in_features < 1 or self.out_features < 1:
            raise PackError(f"a packed layer of {self.out_features} x {self.in_features}")
        if self.group is not None and self.in_features % self.group:
            raise PackError(f"width {self.in_features} is not a multiple of group {self.group}")

    @classmethod
    def of(cls, record: PackedRecord) -> LinearSpec:
        """The spec that a manifest record states."""
        return cls(
            encoding=cast(Literal["lloyd", "affine"], record.encoding),
            bits=record.bits,
            group=record.group,
            rotation=record.rotation,
            in_features=record.in_features,
            out_features=record.out_features,
            bias=record.bias,
        )

    @property
    def parameters(self) -> int:
        """Number of parameters that the layer stands for."""
        return self.out_features * (self.in_features + self.bias)


def check_encoding(encoding: str, bits: int, group: int | None) -> None:
    """Raise PackError unless the encoding exists with these bits and group."""
    if encoding == "lloyd":
        if bits not in LLOYD_BITS:
            raise PackError(f"lloyd packs 2 to 8 bits, not {bits}")
        if group is not None:
            raise PackError(f"lloyd has one scale a row, no group (got {group})")
    elif encoding == "affine":
        if bits not in AFFINE_BITS:
            raise PackError(f"affine packs 2, 3, 4, 5, 6 or 8 bits, not {bits}")
        if group not in AFFINE_GROUPS:
            raise PackError(f"affine groups are 32, 64 or 128 inputs, not {group}")
    else:
        raise PackError(f"unknown encoding {encoding!r}; use lloyd or affine")


def scale_dtype(encoding: str, weight_dtype: str) -> str:
    """Stored dtype of scales (and affine biases) for a weight of this safetensors dtype.

    Affine scales are in the model's 16-bit dtype, so that `mx.quantized_matmul` need not promote;
    BF16 for float32 weights, whose range float16 lacks. Lloyd scales are F16: their layer's levels
    carry a power of two where a row needs it.
    """
    return "F16" if encoding == "lloyd" or weight_dtype == "F16" else "BF16"


def packed_specs(
    path: str,
    out_features: int,
    in_features: int,
    bias_dtype: str | None,
    encoding: str,
    bits: int,
    group: int | None,
    weight_dtype: str = "BF16",
) -> Specs:
    """Name -> (safetensors dtype, shape) of every tensor of one packed layer.

    `bias_dtype` is the dtype of the layer's bias, which is stored as it is, None if it has none;
    `weight_dtype` that of its weight. Raises PackError as LinearSpec does.
    """
    check_encoding(encoding, bits, group)
    words = packed_words(in_features, bits)
    small = scale_dtype(encoding, weight_dtype)
    specs: Specs = {f"{path}.codes": ("U32", (out_features, words))}
    if group is None:
        specs[f"{path}.levels"] = ("F32", (1 << bits,))
        specs[f"{path}.scales"] = (small, (out_features, 1))
    else:
        if in_features % group:
            raise PackError(f"{path}: width {in_features} is not a multiple of group {group}")
        specs[f"{path}.biases"] = (small, (out_features, in_features // group))
        specs[f"{path}.scales"] = (small, (out_features, in_features // group))
    if bias_dtype is not None:
        specs[f"{path}.bias"] = (bias_dtype, (out_features,))
    return dict(sorted(specs.items()))


def specs_nbytes(specs: Specs) -> int:
    """Bytes of all tensors, without any padding."""
    total = 0
    for dtype, shape in specs.values():
        size = ITEM_BYTES[dtype]
        for n in shape:
            size *= n
        total += size
    return total
