"""RoPE that is not the last thing done to a key: found by looking at keys, undone by angles.

Some models turn a slice of the key and put it back among the rest, or normalize the key after RoPE.
Whether that can be undone is a question about keys alone: with one and the same layer input at
every position, a key at position p is R(p) k, with k the same everywhere, or it is not. A norm
without weights keeps that form (a rotation does not change lengths); one with weights does not.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map

from velox_pack.calibrators.hooks import AttentionCall, RopeCall, first_and_rest
from velox_pack.kernels.rope import rope_angles, undo_rope

Array = np.ndarray

_TOLERANCE = 2e-3  # of the largest coordinate; keys that differ do so by a tenth and more


@dataclass(frozen=True)
class RopeSpec:
    """Rotation of a key's first `dims` coordinates: position p turns pair i by p * inv_freq[i].

    Pairs are (i, i + dims/2), or (2i, 2i + 1) if `traditional`; `inv_freq` holds float32 values.
    Factors that the model puts on the key before rotating belong to the key before RoPE.
    """

    dims: int
    traditional: bool
    inv_freq: tuple[float, ...]


def rope_spec(call: RopeCall) -> RopeSpec:
    """The rotation as `mx.fast.rope` does it: base^(-2i/dims) * scale, or scale / freqs.

    Computed in float32 with MLX's own operations: what is rounded otherwise in the frequencies is
    multiplied by the position (with exact ones 0.02 radians at position 100,000, measured).
    """
    with mx.stream(mx.cpu):
        if call.freqs is not None:
            inverse = 1.0 / call.freqs.astype(mx.float32)  # of infinity: that pair is not turned
        else:
            half = call.dims // 2
            base = 10000.0 if call.base is None else call.base
            inverse = mx.exp(mx.arange(0, -half, -1, dtype=mx.float32) * (np.log(base) / half))
        values = np.array(inverse * call.scale)
    return RopeSpec(call.dims, call.traditional, tuple(float(v) for v in values))


def undo(keys: mx.array, spec: RopeSpec, start: int = 0) -> mx.array:
    """Keys [B, H, N, D] at positions `start` and on, turned back; float32 loses least."""
    positions = mx.arange(start, start + keys.shape[2])
    cos, sin = rope_angles(mx.array(spec.inv_freq), positions)
    return undo_rope(keys, cos, sin, spec.traditional)


def keys_before(call: AttentionCall, spec: RopeSpec | None) -> mx.array:
    """The call's keys as they were before a rotation that starts at position 0; as they are
    without `spec`.
    """
    if spec is None:
        return call.keys
    return call.rope.before if call.rope is not None else undo(call.keys, spec)


def find(
    keys: Sequence[tuple[int, mx.array]], candidates: Sequence[RopeSpec]
) -> tuple[RopeSpec | None, str | None]:
    """The rotation of keys made from ONE layer input at all positions, or why there is none.

    `keys` are (first position, keys [1, H, N, D]) pairs. (None, None) if the position makes no
    difference to them.
    """
    if not all(mx.isfinite(k).all().item() for _, k in keys):
        return None, "the layer's rotation could not be probed: keys are not finite"
    if _same(keys):
        return None, None
    for spec in candidates:
        if spec.dims <= keys[0][1].shape[-1] and _same(
            [(start, undo(k, spec, start)) for start, k in keys]
        ):
            return spec, None
    for spec in candidates:
        rolled = [(start, mx.roll(k, spec.dims, -1)) for start, k in keys]
        if spec.dims < keys[0][1].shape[-1] and _same(
            [(start, undo(k, spec, start)) for start, k in rolled]
        ):
            return None, "RoPE turns the last coordinates of a key, not the first ones"
    if candidates:
        return None, "keys are changed after RoPE in a way that does not commute with it"
    return None, "keys depend on their position, but not by RoPE with fixed frequencies"


def _same(keys: Sequence[tuple[int, mx.array]]) -> bool:
    """Whether all keys of a head are one and the same."""
    together = mx.concatenate([k for _, k in keys], axis=2)
    off = mx.abs(together - together[:, :, :1]).max()
    return bool((off < _TOLERANCE * mx.abs(together).max()).item())


@contextmanager
def drawn_parameters(model: nn.Module, indices: Sequence[int]) -> Iterator[Callable[[int], None]]:
    """Inside the block these layers have random parameters, evaluated only where they are used.

    A model that is not loaded has weights of 1 in its norms, which would pass for no weights. What
    is handed out puts a layer's own parameters back, so that those drawn are freed.
    """
    own = {i: model.layers[i].parameters() for i in indices}
    key = mx.random.key(0)

    def draw(parameter: mx.array) -> mx.array:
        nonlocal key
        key, new = mx.random.split(key)
        shape = parameter.shape
        if parameter.dtype == mx.uint32:
            return mx.random.randint(0, 1 << 31, shape, mx.uint32, key=new)  # packed codes
        if not mx.issubdtype(parameter.dtype, mx.floating):
            return mx.full(shape, 120, parameter.dtype)  # scales of 8 bits, finite in each format
        noise = mx.random.normal(shape, key=new)
        drawn = 1 + 0.5 * noise if parameter.ndim < 2 else noise / shape[-1] ** 0.5
        return drawn.astype(parameter.dtype)

    def restore(index: int) -> None:
        model.layers[index].update(own[index])

    for i in indices:
        model.layers[i].update(tree_map(draw, own[i]))
    try:
        yield restore
    finally:
        for i in indices:
            restore(i)


def alike(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A layer's arguments, the first replaced by random activations, the same for each token."""
    x, rest, named = first_and_rest(args, kwargs)
    drawn = mx.random.normal((1, 1, x.shape[-1]), x.dtype, key=mx.random.key(1))
    return (mx.broadcast_to(drawn, x.shape), *rest), named
