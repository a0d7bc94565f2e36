"""Keys stored before RoPE: the rotation is undone on the way in and applied on the way out."""

from dataclasses import dataclass, field

import mlx.core as mx

from velox_pack.caches.codecs.base import Codec, Packed
from velox_pack.kernels.rope import apply_rope, rope_angles, undo_rope

_FIRST = 2048


@dataclass(eq=False)
class RopeTable:
    """Cosines and sines of one RoPE, shared by all layers that use it; grows by doubling.

    `inv_freq` [dims/2] float32: the angle of pair i at position p is `p * inv_freq[i]`.
    """

    inv_freq: mx.array
    traditional: bool
    _cos: mx.array | None = field(default=None, init=False)
    _sin: mx.array | None = field(default=None, init=False)

    def at(self, start: int, count: int) -> tuple[mx.array, mx.array]:
        """Cosines and sines `[count, dims/2]` float32 for positions from `start`."""
        end = start + count
        if self._cos is None or self._sin is None or self._cos.shape[0] < end:
            size = _FIRST
            while size < end:
                size *= 2
            self._cos, self._sin = rope_angles(self.inv_freq, mx.arange(size))
            mx.eval(self._cos, self._sin)
        return self._cos[start:end], self._sin[start:end]

    def constants(self) -> list[mx.array]:
        """The table as it is now, and the frequencies it is made from."""
        return [a for a in (self.inv_freq, self._cos, self._sin) if a is not None]


@dataclass(frozen=True)
class BeforeRope:
    """Any per-token codec, applied to keys as they were before RoPE.

    Before RoPE a channel has a mean and a basis of its own, whatever the position; after it
    both turn with the position. The survivors' positions are consecutive from `start`.
    """

    inner: Codec
    table: RopeTable

    @property
    def granularity(self) -> int:
        """That of the codec inside."""
        return self.inner.granularity

    def encode(self, x: mx.array, start: int) -> Packed:
        """Undo RoPE in float32, then encode."""
        cos, sin = self.table.at(start, x.shape[2])
        before = undo_rope(x.astype(mx.float32), cos, sin, self.table.traditional)
        return self.inner.encode(before, start)

    def decode(self, packed: Packed, start: int, dtype: mx.Dtype) -> mx.array:
        """Decode, then apply RoPE in float32."""
        x = self.inner.decode(packed, start, mx.float32)
        cos, sin = self.table.at(start, x.shape[2])
        return apply_rope(x, cos, sin, self.table.traditional).astype(dtype)

    def constants(self) -> list[mx.array]:
        """The inner codec's, and the RoPE table (shared: counted once by identity)."""
        return self.inner.constants() + self.table.constants()
