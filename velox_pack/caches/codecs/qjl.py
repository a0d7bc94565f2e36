"""Sign sketches of rows whose inner products with any query are right on average (QJL).

Zandieh, Daliri, Han, 2406.03482; the estimator and its constant as in the authors' code
(amirzandieh/QJL: models/llama2_utils_qjl.py and qjl_kernel/csrc/qjl_score_kernel.cu), whose
projections are orthogonal too (`rot=True`).
"""

import math
from dataclasses import dataclass

import mlx.core as mx

from velox_pack.caches.codecs.base import Packed
from velox_pack.caches.codecs.rotated import PlainNorm, Structured
from velox_pack.kernels.packing import pack, packed_words, unpack
from velox_pack.kernels.rotation import StructuredRotation
from velox_pack.manifests.errors import RecipeError

ROUNDS = 2  # rotations of a chunk; after one, a row of few large coordinates is no random one


def chunks_of(
    turn: Structured, count: int, rounds: int = ROUNDS
) -> tuple[tuple[Structured, ...], ...]:
    """`count` rotations, each a chain of `rounds`, from the signs of one stored rotation.

    Every link has the signs moved on by another number of places: such signs are as good as
    independent ones, and nothing else has to be stored. At most width - 1 links differ.
    """
    stored = turn.rotation
    links = count * rounds
    if links >= stored.width:
        raise RecipeError(f"qjl: {links} rotations from {stored.width} signs")
    step = max(1, stored.width // (links + 1))
    moved = [
        Structured(
            StructuredRotation(mx.roll(stored.signs, step * (i + 1)), stored.block, stored.mix)
        )
        for i in range(links)
    ]
    mx.eval([m.rotation.signs for m in moved])
    return tuple(tuple(moved[i * rounds : (i + 1) * rounds]) for i in range(count))


@dataclass(frozen=True)
class SignSketch:
    """Signs of a row in one or several rotated bases, and the unit vector that they stand for.

    For a random rotation R the mean of R^T sign(R x) is x / |x| times d E|u|, u a coordinate of a
    random unit vector. So the sum over the chunks, divided by their number times d E|u|, keeps
    every inner product with a unit row on average. (The paper's projections have Gaussian rows of
    length sqrt(d), and sqrt(pi / 2) for 1 / E|u|; this is its value for orthogonal ones.)
    """

    dim: int
    chunks: tuple[tuple[Structured, ...], ...]

    @property
    def length(self) -> int:
        """Signs of a row."""
        return self.dim * len(self.chunks)

    @property
    def words(self) -> int:
        """Words of 32 bits that the signs of a row take."""
        return packed_words(self.length, 1)

    def project(self, x: mx.array) -> mx.array:
        """`[..., D]` in all bases, `[..., length]`."""
        parts = []
        for chain in self.chunks:
            y = x
            for link in chain:
                y = link.forward(y)
            parts.append(y)
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)

    def encode(self, x: mx.array) -> mx.array:
        """Signs of `[..., D]` as words `[..., words]` uint32; 1 means positive."""
        return pack(self.project(x) > 0, 1)

    def signs(self, words: mx.array) -> mx.array:
        """+1 and -1, `[..., length]` float32, divided by the factor that makes them unbiased."""
        scale = 1 / (self.length * mean_coordinate(self.dim))
        return (2 * scale) * unpack(words, 1, self.length).astype(mx.float32) - scale

    def decode(self, words: mx.array) -> mx.array:
        """The estimate of each row's unit vector, `[..., D]` float32."""
        total: mx.array | None = None
        for chain, part in zip(
            self.chunks, mx.split(self.signs(words), len(self.chunks), axis=-1), strict=True
        ):
            for link in reversed(chain):
                part = link.backward(part)
            total = part if total is None else total + part
        assert total is not None
        return total

    def scores(self, q: mx.array, words: mx.array) -> mx.array:
        """Products `[..., R, N]` of `q` `[..., R, D]` with the estimates of N rows."""
        return self.project(q) @ self.signs(words).swapaxes(-1, -2)

    def constants(self) -> list[mx.array]:
        """Signs and mixes of all links."""
        return [a for chain in self.chunks for link in chain for a in link.constants()]


def mean_coordinate(dim: int) -> float:
    """Mean absolute coordinate of a random unit vector of `dim` dimensions."""
    return math.exp(math.lgamma(dim / 2) - math.lgamma((dim + 1) / 2)) / math.sqrt(math.pi)


@dataclass(frozen=True)
class SketchedKeys:
    """QJL's keys: signs of a sketch, and the row's norm."""

    sketch: SignSketch
    norm: PlainNorm
    granularity: int = 1

    def encode(self, x: mx.array, start: int) -> Packed:
        """`[B, H, N, D]` to signs `[B, H, N, words]` uint32 and norms `[B, H, N, 1]`."""
        y = x.astype(mx.float32)
        return self.sketch.encode(y), self.norm.encode(mx.linalg.norm(y, axis=-1, keepdims=True))

    def decode(self, packed: Packed, start: int, dtype: mx.Dtype) -> mx.array:
        """The vectors `[B, H, N, D]` whose products are the estimates."""
        return (self.sketch.decode(packed[0]) * self.norm.decode(packed[1])).astype(dtype)

    def scores(self, q: mx.array, packed: Packed, start: int) -> mx.array:
        """Estimates `[B, H, R, N]` float32: queries are sketched but not rounded to signs."""
        return self.sketch.scores(q, packed[0]) * self.norm.decode(packed[1]).swapaxes(-1, -2)

    def constants(self) -> list[mx.array]:
        """Rotations."""
        return self.sketch.constants()
