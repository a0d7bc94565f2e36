"""The codec that changes nothing: the control in every comparison."""

from dataclasses import dataclass

import mlx.core as mx

from velox_pack.caches.codecs.base import Packed, copy_rows


@dataclass(frozen=True)
class Exact:
    """Stores rows as they come."""

    granularity: int = 1

    def encode(self, x: mx.array, start: int) -> Packed:
        """Keep `[B, H, N, D]` as it is."""
        return (copy_rows(x, 0, x.shape[2]),)

    def decode(self, packed: Packed, start: int, dtype: mx.Dtype) -> mx.array:
        """Give the rows back in `dtype`."""
        return packed[0].astype(dtype)

    def constants(self) -> list[mx.array]:
        """Nothing is shared."""
        return []
