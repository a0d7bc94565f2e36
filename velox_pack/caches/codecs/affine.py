"""Affine rounding in groups, along the channels of a token or along the tokens of a channel."""

from dataclasses import dataclass

import mlx.core as mx

from velox_pack.caches.codecs.base import Packed
from velox_pack.manifests.errors import RecipeError

GROUPS = (32, 64, 128)
BITS = (2, 3, 4, 5, 6, 8)


@dataclass(frozen=True)
class Affine:
    """`mx.quantize`'s affine format: codes, and a scale and bias of 16 bits per group.

    Scale and bias have the type of 16-bit rows (bfloat16 rows may exceed float16's range), and
    float16 for float32 rows.

    `axis="token"` groups channels of one token (KIVI's values, mlx-lm's QuantizedKVCache);
    `axis="channel"` groups `group` consecutive tokens of one channel (KIVI's keys), and then
    tokens can only be encoded `group` at a time.

    mlx has groups of 32, 64 and 128 alone. Where none divides the head dim (16, 80, 112), a
    token's last group is filled up with copies of its last channel, which changes neither its
    range nor its rounding; the codes of the copies are stored and counted. Of the groups only
    those are allowed that store the fewest such codes.
    """

    bits: int
    group: int
    dim: int
    axis: str = "token"

    def __post_init__(self) -> None:
        """Check what can be checked before anything is encoded."""
        if self.bits not in BITS:
            raise RecipeError(f"affine: bits={self.bits} is not one of {BITS}")
        if self.group not in GROUPS:
            raise RecipeError(f"affine: group={self.group} is not one of {GROUPS}")
        if self.axis not in ("token", "channel"):
            raise RecipeError(f"affine: axis={self.axis!r} is neither token nor channel")
        least = min(self.dim + _missing(self.dim, g) for g in GROUPS)
        if self.axis == "token" and self.dim + _missing(self.dim, self.group) > least:
            fitting = [g for g in GROUPS if self.dim + _missing(self.dim, g) == least]
            raise RecipeError(
                f"affine: group={self.group} does not divide the head dim {self.dim}; "
                f"possible are {fitting}"
            )

    @property
    def granularity(self) -> int:
        """Tokens per group when channels are grouped along tokens, else 1."""
        return self.group if self.axis == "channel" else 1

    def encode(self, x: mx.array, start: int) -> Packed:
        """Quantize `[B, H, N, D]`."""
        if self.axis == "channel":
            B, H, N, D = x.shape
            x = x.reshape(B, H, N // self.group, self.group, D).swapaxes(3, 4)
        elif missing := _missing(self.dim, self.group):
            last = mx.broadcast_to(x[..., -1:], (*x.shape[:-1], missing))
            x = mx.concatenate([x, last], axis=-1)
        codes, scales, biases = mx.quantize(x, group_size=self.group, bits=self.bits)
        half = mx.bfloat16 if x.dtype == mx.bfloat16 else mx.float16
        return codes, scales.astype(half), biases.astype(half)

    def decode(self, packed: Packed, start: int, dtype: mx.Dtype) -> mx.array:
        """Give `[B, H, N, D]` back."""
        codes, scales, biases = packed
        x = mx.dequantize(
            codes, scales.astype(dtype), biases.astype(dtype), group_size=self.group, bits=self.bits
        )
        if self.axis == "channel":
            B, H, n, D, group = x.shape
            x = x.swapaxes(3, 4).reshape(B, H, n * group, D)
        elif x.shape[-1] > self.dim:
            x = x[..., : self.dim]
        return x

    def constants(self) -> list[mx.array]:
        """Nothing is shared."""
        return []


def _missing(dim: int, group: int) -> int:
    """Channels that make `dim` whole groups."""
    return -dim % group
