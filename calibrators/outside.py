"""Parameters outside the layers: large tables stay in their own dtype, products go in blocks.

On the CPU only float32 products are fast, but an embedding of 150,000 rows in float32 is larger
than any layer. So rows are looked up first and cast after, and a product with the table casts
blocks of its rows.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from velox_pack.calibrators.hooks import LayerCall, replaced_calls

_LARGE = 1 << 22  # elements of a matrix that stays in its own dtype: 16 MiB in float32
# Elements of a table cast to float32 at a time, 4 MiB. On the CPU some thirty casts are in memory
# at once, because MLX allocates ahead of the products that use them (measured; larger ones are no
# faster).
_BLOCK = 1 << 20
# OpenBLAS sums the edges of a product that are no whole tiles in another order, and where threads
# meet there are edges: with whole tiles the bytes do not depend on the number of threads.
_TILE = 32


def as_float32(array: mx.array, *, tables: bool = True) -> mx.array:
    """Floating-point arrays as float32, lazily; with `tables` False large matrices stay as is."""
    if not mx.issubdtype(array.dtype, mx.floating):
        return array
    if not tables and array.ndim == 2 and array.size > _LARGE:
        return array
    return array.astype(mx.float32)


def _blocks(weight: mx.array) -> Iterator[tuple[int, int]]:
    rows = max(_TILE, _BLOCK // weight.shape[1] // _TILE * _TILE)
    for start in range(0, weight.shape[0], rows):
        yield start, min(start + rows, weight.shape[0])


def _whole(block: mx.array) -> mx.array:
    """Rows [n, in] followed by zeros up to a multiple of the tile."""
    missing = -block.shape[0] % _TILE
    return mx.pad(block, [(0, missing), (0, 0)]) if missing else block


def product(x: mx.array, weight: mx.array) -> mx.array:
    """x [..., in] @ weight [out, in].T in float32, casting a block of rows at a time."""
    return cast(mx.array, _product(x, weight))


@mx.custom_function
def _product(x: mx.array, weight: mx.array) -> mx.array:
    parts = [x @ _whole(weight[a:b].astype(mx.float32)).T for a, b in _blocks(weight)]
    out: mx.array = mx.concatenate(parts, axis=-1)
    return out[..., : weight.shape[0]]


@_product.vjp
def _product_vjp(
    primals: tuple[mx.array, mx.array], cotangent: mx.array, _output: mx.array
) -> tuple[mx.array, mx.array]:
    x, weight = primals
    gradient = mx.zeros_like(x)
    for a, b in _blocks(weight):
        block = _whole(weight[a:b].astype(mx.float32))
        given = mx.pad(cotangent[..., a:b], [(0, 0)] * (x.ndim - 1) + [(0, block.shape[0] - b + a)])
        gradient = gradient + given @ block
    return gradient, mx.zeros_like(weight)  # nobody asks for the table's: lazy, never made


def _linear(module: nn.Module, x: mx.array) -> mx.array:
    out = product(x, module.weight)
    if "bias" in module:
        out = out + module.bias
    return out


@contextmanager
def read_in_native_dtype(model: nn.Module, layers: list[nn.Module]) -> Iterator[None]:
    """Inside the block, embeddings and linears outside the layers compute in float32 as above."""
    inside = {id(m) for layer in layers for m in layer.modules()}
    tables = [
        m
        for m in model.modules()
        if isinstance(m, nn.Embedding | nn.Linear) and id(m) not in inside
    ]

    def make(_index: int, module: nn.Module, original: LayerCall) -> LayerCall:
        def call(x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
            if isinstance(module, nn.Linear):
                return _linear(module, x)
            rows: mx.array = original(x, *args, **kwargs)
            return rows.astype(mx.float32)

        return call

    tied = [m for m in tables if isinstance(m, nn.Embedding)]
    with replaced_calls(tables, make):
        try:
            for module in tied:  # the head of tied models
                object.__setattr__(
                    module, "as_linear", lambda x, _module=module: product(x, _module.weight)
                )
            yield
        finally:
            for module in tied:
                object.__delattr__(module, "as_linear")
