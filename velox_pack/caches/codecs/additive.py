"""Additive codes of keys before RoPE whose entries commute with it (CommVQ).

Source: CommVQ, 2506.18879. What of it was read, what differs, and the NumPy definition are in
calibrators.commvq.

A key is the scaled sum over stages of c_A + J c_B, J turning each pair of coordinates by 90
degrees. Codes do not depend on the position: RoPE is applied to what is decoded (BeforeRope). The
paper applies it to the codebooks instead, for each token: here that takes one rotation for all
stages in either case, since the sums over entries A and B come first.
"""

from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from velox_pack.caches.codecs.base import Packed
from velox_pack.caches.codecs.heads import apart, together
from velox_pack.caches.codecs.rotated import LogNorm
from velox_pack.caches.codecs.vectors import blockwise, fitting_scale, unit_rows
from velox_pack.kernels.packing import pack_mixed, unpack_mixed
from velox_pack.manifests.artifacts_vector import rope_pairs
from velox_pack.manifests.errors import RecipeError

_NORM_BITS = 8


@dataclass(frozen=True)
class Additive:
    """Codes (A, B) of M stages with K entries each, and one 8-bit scale for each row.

    codebooks  [H, M, K, D] float16, entries laid out like keys
    mean       [H, D] float32
    weight     [H, D] float32, alike in both halves of a pair: encoding makes |weight * (k -
               decoded)| small
    dims, traditional  what RoPE turns and how it pairs (manifests.artifacts_vector.rope_pairs)
    beam       partial codes of a row that encoding follows from stage to stage
    """

    codebooks: mx.array
    mean: mx.array
    weight: mx.array
    norm: LogNorm
    dims: int
    traditional: bool
    beam: int = 4
    granularity: int = 1
    _partner: mx.array = field(init=False, repr=False)
    _sign: mx.array = field(init=False, repr=False)
    _widths: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Which coordinate is the other half of each pair, and how the bits of a token lie."""
        H, M, K, D = self.codebooks.shape
        if K not in (4, 8, 16, 32, 64):
            raise RecipeError(f"commvq: {K} entries are not 4, 8, 16, 32 or 64")
        if D % 2 or not 0 <= self.dims <= D or self.dims % 2:
            raise RecipeError(f"commvq: dims {self.dims} of {D} cannot be paired")
        if self.beam < 1:
            raise RecipeError(f"commvq: beam={self.beam} is below 1")
        first, second = rope_pairs(D, self.dims, self.traditional)
        partner, sign = np.empty(D, np.uint32), np.empty(D, np.float32)
        partner[first], partner[second] = second, first
        sign[first], sign[second] = -1, 1
        widths = (_NORM_BITS, *((K.bit_length() - 1,) * (2 * M))) * H
        object.__setattr__(self, "_partner", mx.array(partner))
        object.__setattr__(self, "_sign", mx.array(sign))
        object.__setattr__(self, "_widths", widths)

    def encode(self, x: mx.array, start: int) -> Packed:
        """`[B, H, N, D]` to words [B, 1, N, W] uint32: scale and codes, heads one after another."""
        K = self.codebooks.shape[2]
        weight = self.weight[:, None]
        y = (x.astype(mx.float32) - self.mean[:, None]) * weight
        aim = unit_rows(y)
        books = self.codebooks.astype(mx.float32) * weight[:, None]
        other = self._quarter(books)
        # |c_A + J c_B|^2 for all A and B, and all entries that a code may add to a sum.
        square = mx.square(books).sum(axis=-1)
        sizes = square[..., None] + square[:, :, None] + 2 * books @ other.swapaxes(-1, -2)
        entries = mx.concatenate([books, other], axis=2)
        wide = min(self.beam, K * K) * K * K

        def work(rows: mx.array) -> Packed:
            return self._search(rows, entries, sizes)

        codes, left = blockwise(work, aim, wide)
        scale = self.norm.encode(fitting_scale(y, aim - left, unbiased=False))
        both = mx.concatenate([scale.astype(mx.uint32), codes], axis=-1)
        return (pack_mixed(together(both), self._widths),)

    def _search(self, z: mx.array, entries: mx.array, sizes: mx.array) -> Packed:
        """Codes uint32 `[B, H, N, 2M]` of rows `[B, H, N, D]`, and what they leave of the rows.

        A beam, as in calibrators.additive_em. `entries` [H, M, 2K, D] are c and J c of all stages,
        `sizes` [H, M, K, K] the squares of their sums.
        """
        B, H, N, D = z.shape
        M, K = self.codebooks.shape[1:3]
        rest, wide = z[:, :, :, None], 1
        error = mx.square(z).sum(axis=-1, keepdims=True)
        path: mx.array | None = None
        heads = (mx.arange(H, dtype=mx.uint32) * (2 * K))[:, None, None]
        for stage in range(M):
            book = entries[:, stage]
            inner = (rest.reshape(B, H, N * wide, D) @ book.swapaxes(-1, -2)) * 2
            inner = inner.reshape(B, H, N, wide, 2 * K)
            # What each candidate (parent, A, B) would leave.
            grown = (error[..., None] - inner[..., :K])[..., None] - inner[..., None, K:]
            grown = (grown + sizes[:, stage, None, None]).reshape(B, H, N, wide * K, K)
            keep = min(self.beam, wide * K * K) if stage < M - 1 else 1
            at, error = _least(grown, keep)
            code = at % (K * K)
            pair = mx.stack([code // K, code % K + K], axis=-1)
            table = book.reshape(H * 2 * K, D)
            added = mx.take(table, pair + heads[..., None], axis=0).sum(axis=-2)
            if wide > 1:
                parent = (at // (K * K))[..., None]
                rest = _of_parents(rest, parent)
                path = _of_parents(path, parent) if path is not None else None
            rest = rest - added
            path = pair if path is None else mx.concatenate([path, pair], axis=-1)
            wide = keep
        assert path is not None
        return path[:, :, :, 0] % K, rest[:, :, :, 0]

    def _quarter(self, x: mx.array) -> mx.array:
        """J x: each pair turned by 90 degrees."""
        return mx.take(x, self._partner, axis=-1) * self._sign

    def decode(self, packed: Packed, start: int, dtype: mx.Dtype) -> mx.array:
        """Give `[B, H, N, D]` before RoPE back in `dtype`."""
        H, M, K, D = self.codebooks.shape
        both = apart(unpack_mixed(packed[0], self._widths), H)
        B, _, N, _ = both.shape
        codes = both[..., 1:].reshape(B, H, N, M, 2).transpose(0, 1, 4, 2, 3)
        # Sums of entries as one product: a fourth of the numbers that gathering them makes.
        chosen = (codes[..., None] == mx.arange(K, dtype=mx.uint32)).astype(mx.float32)
        books = self.codebooks.astype(mx.float32).reshape(H, M * K, D)
        sums = chosen.reshape(B, H, 2 * N, M * K) @ books
        first, second = mx.split(sums, 2, axis=2)
        x = (first + self._quarter(second)) * self.norm.decode(both[..., :1])
        return (x + self.mean[:, None]).astype(dtype)

    def constants(self) -> list[mx.array]:
        """Codebooks, mean, weight and pairs."""
        return [self.codebooks, self.mean, self.weight, self._partner, self._sign]


def _least(lines: mx.array, keep: int) -> tuple[mx.array, mx.array]:
    """Places uint32 `[..., keep]` of the least numbers of `[..., R, K]`, and the numbers.

    They are in those lines whose own least are the `keep` least: looking there first is several
    times faster than looking through all of them.
    """
    R, K = lines.shape[-2:]
    if keep == 1:
        flat = lines.reshape(*lines.shape[:-2], R * K)
        at = mx.argmin(flat, axis=-1, keepdims=True)
        return at, mx.take_along_axis(flat, at, axis=-1)
    if keep < R:
        line = mx.argpartition(lines.min(axis=-1), keep - 1, axis=-1)[..., :keep]
    else:
        line = mx.broadcast_to(mx.arange(R, dtype=mx.uint32), lines.shape[:-1])
    wanted = (*line.shape, K)
    few = mx.take_along_axis(lines, mx.broadcast_to(line[..., None], wanted), axis=-2)
    few = few.reshape(*line.shape[:-1], -1)
    best = mx.argpartition(few, keep - 1, axis=-1)[..., :keep]
    at = mx.take_along_axis(line, best // K, axis=-1) * K + best % K
    return at, mx.take_along_axis(few, best, axis=-1)


def _of_parents(x: mx.array, parent: mx.array) -> mx.array:
    """`[B, H, N, W, X]` at parents `[B, H, N, keep, 1]`."""
    wanted = (*parent.shape[:-1], x.shape[-1])
    return mx.take_along_axis(x, mx.broadcast_to(parent, wanted), axis=3)
