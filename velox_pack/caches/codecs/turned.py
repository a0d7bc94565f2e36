"""What codecs of whole rows in another basis have in common: decoding, scores, mixtures."""

from dataclasses import dataclass

import mlx.core as mx

from velox_pack.caches.codecs.base import Packed
from velox_pack.caches.codecs.rotated import Turn


@dataclass(frozen=True)
class TurnedRows:
    """Rows that are coded in the basis of `turn`, each head apart; `coded` is what differs."""

    turn: Turn

    def coded(self, packed: Packed) -> mx.array:
        """Decoded rows in the turned basis, `[B, H, N, D]` float32."""
        raise NotImplementedError

    def decode(self, packed: Packed, start: int, dtype: mx.Dtype) -> mx.array:
        """Give `[B, H, N, D]` back in `dtype`."""
        return self.turn.backward(self.coded(packed)).astype(dtype)

    def scores(self, q: mx.array, packed: Packed, start: int) -> mx.array:
        """Products `[B, H, R, N]` of queries `[B, H, R, D]` with coded keys, float32.

        The queries are turned instead of the keys.
        """
        return self.turn.query(q) @ self.coded(packed).swapaxes(-1, -2)

    def mix(self, p: mx.array, packed: Packed, start: int) -> mx.array:
        """Mixtures `[B, H, R, D]` of coded values with weights `[B, H, R, N]`, float32."""
        return self.turn.mixed(p @ self.coded(packed))
