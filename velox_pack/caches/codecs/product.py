"""Product-quantizer codes of smoothed and rotated rows (VecInfer).

Source: VecInfer, 2510.06175. What of it was read, what differs, and the NumPy definition are in
calibrators.vecinfer.
"""

from dataclasses import dataclass, field

import mlx.core as mx

from velox_pack.caches.codecs.base import Packed
from velox_pack.caches.codecs.heads import apart, together
from velox_pack.caches.codecs.rotated import LogNorm
from velox_pack.caches.codecs.vectors import Rounds, blockwise, fitting_scale, unit_rows
from velox_pack.kernels.packing import pack, unpack
from velox_pack.manifests.errors import RecipeError


@dataclass(frozen=True)
class Product:
    """Codes of the nearest centroid of each sub vector of y = ((x - mean) / smoothing) @ R.

    turn       the rotation R
    codebooks  [C, G, K, S] float16: K = 16 to 256 centroids for sub vectors of S; C is H or 1, G is
               D / S or 1
    mean, smoothing  [H, D] float32
    norm       how a row's scale is stored; None: codebooks are those of y itself, not of y / |y|
    unbiased   the scale keeps inner products with the row (keys), else it is the nearest (values)
    """

    turn: Rounds
    codebooks: mx.array
    mean: mx.array
    smoothing: mx.array
    norm: LogNorm | None
    unbiased: bool
    granularity: int = 1
    bits: int = field(init=False)
    _starts: mx.array = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Lay the codebooks out: where in a flat table those of a head's sub vectors start."""
        (C, G, K, S), (H, D) = self.codebooks.shape, self.mean.shape
        if K not in (16, 32, 64, 128, 256):
            raise RecipeError(f"vecinfer: {K} centroids are not 16, 32, 64, 128 or 256")
        if D % S or C not in (1, H) or G not in (1, D // S):
            raise RecipeError(f"vecinfer: codebooks {[C, G, K, S]} for {H} heads of {D}")
        heads = (mx.arange(H) % C * G)[:, None, None]
        starts = (heads + mx.arange(D // S) % G) * K
        object.__setattr__(self, "bits", K.bit_length() - 1)
        object.__setattr__(self, "_starts", starts.astype(mx.uint32))

    def encode(self, x: mx.array, start: int) -> Packed:
        """`[B, H, N, D]` to codes and scales [B, H, N, 1] uint8 (only with a norm).

        Codes of 8 bits are uint8 [B, H, N, D / S], shorter ones words [B, 1, N, W] uint32.
        """
        y = (x.astype(mx.float32) - self.mean[:, None]) / self.smoothing[:, None]
        y = self.turn.forward(y)
        aim = y if self.norm is None else unit_rows(y)
        (index,) = blockwise(self._nearest, aim, self._parts * self.codebooks.shape[2])
        codes = index.astype(mx.uint8) if self.bits == 8 else pack(together(index), self.bits)
        if self.norm is None:
            return (codes,)
        scale = fitting_scale(y, self._rows(index), unbiased=self.unbiased)
        return codes, self.norm.encode(scale)

    @property
    def _parts(self) -> int:
        """Sub vectors of a row."""
        return int(self.mean.shape[1]) // int(self.codebooks.shape[3])

    def _nearest(self, y: mx.array) -> Packed:
        """Codes `[B, H, n, P]` of the nearest centroids."""
        books = self.codebooks.astype(mx.float32)
        # |y - c|^2 / 2 without |y|^2, which is the same for all centroids.
        offset = mx.square(books).sum(axis=-1)[:, :, None] / 2
        parts = y.reshape(*y.shape[:3], self._parts, -1).swapaxes(2, 3)
        return (mx.argmin(offset - parts @ books.swapaxes(-1, -2), axis=-1).swapaxes(2, 3),)

    def _index(self, packed: Packed) -> mx.array:
        """Codes `[B, H, N, P]` uint32."""
        if self.bits == 8:
            return packed[0].astype(mx.uint32)
        heads = int(self.mean.shape[0])
        return apart(unpack(packed[0], self.bits, heads * self._parts), heads)

    def _rows(self, index: mx.array) -> mx.array:
        """Decoded rows in the rotated basis but for their scale, `[B, H, N, D]` float32."""
        flat = self.codebooks.reshape(-1, self.codebooks.shape[3])
        found = mx.take(flat, index + self._starts, axis=0)
        return found.reshape(*index.shape[:3], -1).astype(mx.float32)

    def decode(self, packed: Packed, start: int, dtype: mx.Dtype) -> mx.array:
        """Give `[B, H, N, D]` back in `dtype`."""
        y = self._rows(self._index(packed))
        if self.norm is not None:
            y = y * self.norm.decode(packed[1])
        return self._out(y, self.mean[:, None]).astype(dtype)

    def _out(self, y: mx.array, mean: mx.array) -> mx.array:
        """Rows or mixtures of rows back out of the rotated basis."""
        return self.turn.backward(y) * self.smoothing[:, None] + mean

    def scores(self, q: mx.array, packed: Packed, start: int) -> mx.array:
        """Products `[B, H, R, N]` of queries `[B, H, R, D]` with coded keys, float32.

        Each part of a query is multiplied by its codebook once, then looked up: no key is decoded.
        """
        B, H, R, _ = q.shape
        index, books = self._index(packed), self.codebooks.astype(mx.float32)
        turned = self.turn.forward(q * self.smoothing[:, None]).reshape(B, H, R, self._parts, -1)
        # All queries of an entry together: one look-up serves all of them.
        table = (books @ turned.transpose(0, 1, 3, 4, 2)).reshape(-1, R)
        size = books.shape[2]
        places = mx.arange(B * H * self._parts, dtype=mx.uint32).reshape(B, H, 1, -1) * size
        found = mx.take(table, index + places, axis=0).sum(axis=3)
        if self.norm is not None:
            found = found * self.norm.decode(packed[1])
        return found.swapaxes(-1, -2) + (q * self.mean[:, None]).sum(axis=-1, keepdims=True)

    def mix(self, p: mx.array, packed: Packed, start: int) -> mx.array:
        """Mixtures `[B, H, R, D]` of coded values with weights `[B, H, R, N]`, float32."""
        weights = p
        if self.norm is not None:
            weights = p * self.norm.decode(packed[1]).swapaxes(-1, -2)
        mixed = weights @ self._rows(self._index(packed))
        return self._out(mixed, p.sum(axis=-1, keepdims=True) * self.mean[:, None])

    def constants(self) -> list[mx.array]:
        """Codebooks, rotation, smoothing and mean."""
        own = [self.codebooks, self.mean, self.smoothing, self._starts]
        return [*own, *self.turn.constants()]
