"""The packed linear layer: y = rotate(x) times decoded codes, decoded a block of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import mlx.core as mx
import mlx.nn as nn

from velox_pack.kernels import (
    StructuredRotation,
    level_table,
    packed_words,
    rotate,
    rotate_transpose,
    unpack_levels,
)
from velox_pack.manifests.errors import PackError
from velox_pack.reservoir.encoding import decode_affine, decode_lloyd
from velox_pack.reservoir.spec import LinearSpec

# Decoded weights of one block, in bytes.
BLOCK_BYTES = 16 << 20
# From this many rows of input the CPU is faster on decoded blocks than in mx.quantized_matmul.
_CPU_DECODE_ROWS = 16


class ReservoirLinear(nn.Module):
    """A linear layer held as codes; takes the place of `nn.Linear`.

    Parameters: codes uint32 [out, words]; lloyd: scales float16 [out, 1], levels float32 [2^bits];
    affine: scales and biases [out, in / group]; bias [out] if there is one. The rotation is shared
    between layers and is no parameter. A new layer holds zeros: its parameters are to be loaded.
    """

    def __init__(self, spec: LinearSpec, rotation: StructuredRotation | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # MLX leaves it untyped
        if (spec.rotation is None) != (rotation is None):
            raise PackError(f"the layer's rotation is {spec.rotation}, given: {rotation}")
        if rotation is not None and rotation.width != spec.in_features:
            raise PackError(
                f"rotation {spec.rotation} of width {rotation.width} for {spec.in_features} inputs"
            )
        out = spec.out_features
        self.spec = spec
        self.rotation = rotation
        self.codes = mx.zeros((out, packed_words(spec.in_features, spec.bits)), mx.uint32)
        if spec.group is None:
            self.scales = mx.zeros((out, 1), mx.float16)
            self.levels = mx.zeros((1 << spec.bits,), mx.float32)
        else:
            self.scales = mx.zeros((out, spec.in_features // spec.group), mx.float16)
            self.biases = mx.zeros((out, spec.in_features // spec.group), mx.float16)
        if spec.bias:
            self.bias = mx.zeros((out,), mx.float16)

    def __call__(self, x: mx.array) -> mx.array:
        """x [..., in] to [..., out] in x's dtype."""
        turned = x
        if self.rotation is not None:
            turned = rotate(x.astype(mx.float32), self.rotation)
        on_cpu = mx.default_device().type == mx.cpu
        # On the CPU 16-bit products are many times slower than float32 ones; float16 sums of
        # levels, which have no scale yet, could overflow.
        wide = on_cpu or (x.dtype == mx.float16 and self.spec.group is None)
        turned = turned.astype(mx.float32 if wide else x.dtype)
        rows = x.size // max(1, x.shape[-1])
        if self.spec.group is not None and not (on_cpu and rows >= _CPU_DECODE_ROWS):
            y = mx.quantized_matmul(
                turned,
                self.codes,
                self.scales.astype(turned.dtype),
                self.biases.astype(turned.dtype),
                transpose=True,
                group_size=self.spec.group,
                bits=self.spec.bits,
            )
        else:
            y = self._decoded_product(turned)
            if self.spec.group is None:
                y = y * self.scales.reshape(-1)
        if self.spec.bias:
            y = y + self.bias
        return y.astype(x.dtype)

    def _decoded_product(self, turned: mx.array) -> mx.array:
        """Rotated x times the decoded weight, whose blocks never exist all at once."""
        parts: list[mx.array] = []
        pending = 0
        for block in self._blocks(turned.dtype):
            parts.append(turned @ block.T)
            pending += block.nbytes
            # Left lazy, all blocks would be allocated before the first product is done.
            if pending >= 2 * BLOCK_BYTES:
                _settle(parts)
                pending = 0
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)

    def _blocks(self, dtype: mx.Dtype) -> Iterator[mx.array]:
        """Decoded, still rotated blocks of rows [r, in]; lloyd: without the rows' scales."""
        spec = self.spec
        step = max(1, BLOCK_BYTES // (spec.in_features * 4))
        table = None if spec.group else level_table(self.levels.astype(dtype), spec.bits)
        for start in range(0, spec.out_features, step):
            part = slice(start, start + step)
            if table is not None:
                yield unpack_levels(self.codes[part], spec.bits, spec.in_features, table)
            else:
                yield mx.dequantize(
                    self.codes[part],
                    self.scales[part].astype(dtype),
                    self.biases[part].astype(dtype),
                    group_size=spec.group,
                    bits=spec.bits,
                )

    def decode(self) -> mx.array:
        """The weight float32 [out, in] that the codes stand for, turned back (a dense copy)."""
        spec = self.spec
        if spec.group is None:
            rows = decode_lloyd(self.codes, self.scales, self.levels, spec.bits, spec.in_features)
        else:
            rows = decode_affine(self.codes, self.scales, self.biases, spec.bits, spec.group)
        return rows if self.rotation is None else rotate_transpose(rows, self.rotation)

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters as held; the shared rotation is not counted."""
        return sum(int(p.nbytes) for p in self.values() if isinstance(p, mx.array))

    def _extra_repr(self) -> str:
        spec = self.spec
        group = "" if spec.group is None else f", group={spec.group}"
        return (
            f"input_dims={spec.in_features}, output_dims={spec.out_features}, bias={spec.bias}, "
            f"encoding={spec.encoding}, bits={spec.bits}{group}, rotation={spec.rotation}"
        )


def _settle(arrays: list[mx.array]) -> None:
    """Evaluate, unless a transformation (compile, vmap) is being traced, which forbids it."""
    with suppress(ValueError):
        mx.eval(arrays)
