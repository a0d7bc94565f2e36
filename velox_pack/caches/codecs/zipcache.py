"""Rounding by token after each channel is divided by a scale of its own (ZipCache).

He, Zhang, Wu, Liu, Zhou, Zhuang, 2405.14256; scales as in the authors' code (ThisisBillhe/ZipCache:
zipcache/models/CompressUtils/compress_function.py, channel_separate tokenwise). Salient tokens
with more bits are not here: what is salient follows from attention, which no codec sees.
"""

from dataclasses import dataclass

import mlx.core as mx

from velox_pack.caches.codecs.base import Packed
from velox_pack.caches.codecs.heads import apart, together
from velox_pack.kernels.packing import pack, unpack
from velox_pack.manifests.errors import RecipeError

_SMALLEST = 2.0**-10  # scales are at least this: a channel of zeros has one, too
_LARGEST = 65504.0


@dataclass(frozen=True)
class ChannelSeparable:
    """Codes, an offset and a step for the heads of a token together, a scale for each channel.

    A channel's scale is the root of its largest magnitude within `group` tokens, so that a
    channel of large numbers does not alone decide the range of its token. The authors' code has
    one scale for all tokens (and, as its demo sets it, encodes them again every 100); here every
    `group` tokens bring their own, 16 / group bits a number.
    """

    bits: int
    group: int
    heads: int
    dim: int

    def __post_init__(self) -> None:
        """Refuse what cannot be packed."""
        if self.bits not in range(1, 9) or self.group < 1:
            raise RecipeError(
                f"zipcache: bits={self.bits}, group={self.group}; bits are 1 to 8, groups 1 or more"
            )

    @property
    def granularity(self) -> int:
        """Tokens that share the scales of their channels."""
        return self.group

    def encode(self, x: mx.array, start: int) -> Packed:
        """`[B, H, N, D]` to codes, ranges and scales of N / group groups of tokens.

        Words [B, 1, n, group, W] uint32; offset and step of each token [B, 1, n, group, 2] and
        scales of the channels [B, 1, n, H * D], float16 (they are of the size of a root).
        """
        y = together(x).astype(mx.float32)
        B, _, N, C = y.shape
        y = y.reshape(B, 1, N // self.group, self.group, C)
        scales = mx.sqrt(mx.abs(y).max(axis=3))
        scales = mx.clip(scales, _SMALLEST, _LARGEST).astype(mx.float16)
        y = y / scales[..., None, :].astype(mx.float32)
        top = (1 << self.bits) - 1
        low = y.min(axis=-1, keepdims=True).astype(mx.float16)
        step = (y.max(axis=-1, keepdims=True) - low.astype(mx.float32)) / top
        step = mx.maximum(step, _SMALLEST**2).astype(mx.float16)
        codes = mx.round((y - low.astype(mx.float32)) / step.astype(mx.float32))
        words = pack(mx.clip(codes, 0, top).astype(mx.uint32), self.bits)
        return words, mx.concatenate([low, step], axis=-1), scales

    def decode(self, packed: Packed, start: int, dtype: mx.Dtype) -> mx.array:
        """Give `[B, H, N, D]` back in `dtype`."""
        words, ranges, scales = packed
        low, step = mx.split(ranges.astype(mx.float32), 2, axis=-1)
        codes = unpack(words, self.bits, self.heads * self.dim).astype(mx.float32)
        y = (codes * step + low) * scales[..., None, :].astype(mx.float32)
        B, _, n, group, C = y.shape
        return apart(y.reshape(B, 1, n * group, C), self.heads).astype(dtype)

    def constants(self) -> list[mx.array]:
        """Nothing is shared."""
        return []
