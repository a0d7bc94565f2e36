"""Keys and values predicted from decoded neighbours by a calibrated linear map; the rest is coded.

What sharing codes between layers (XQuant) is after, in the right basis: the residual stream changes
little from layer to layer, so a layer's keys and values are mostly a linear function of those of
the layer before (keys and values together), and values of the keys of their own layer. The maps are
read in order, a layer after the other, from what was DECODED, so errors do not add up: a layer's
rest holds the errors of its sources too. Measured on SmolLM2-135M at 2 bits: a rest of 0.15 to 0.2
of the variance, a quarter of the squared error of the same code without prediction, and a ninth of
its KL divergence (0.0057 nats at 2.125 bits, where that of plain rounding is 0.011 at 3.5 bits).
The maps, in 8 bits, are 5.7 MB there: another 0.24 bits if 8 sequences of 2,048 tokens share them.

The rest is coded by `rotated_code`. Keys stand before RoPE. `span` layers make a chain (0: all
layers): the first of a chain has no layer before, and its values are predicted from its keys alone
(measured: pairs of layers, span 2, keep a third of the gain; weights for a layer before are stored
as zeros where there is none).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from velox_pack.calibrators import linear_maps
from velox_pack.calibrators.joint import group_of, grouped, ungrouped
from velox_pack.calibrators.linear_maps import LinearMap
from velox_pack.calibrators.neighbours import LayerTokens
from velox_pack.calibrators.rotated_code import RotatedCode, norm_bits, range_of
from velox_pack.manifests.artifacts_sharing import Prediction
from velox_pack.manifests.errors import CalibrationError

Array = np.ndarray

WIDEST = 256  # coordinates that one map predicts, unless one head alone has more
SOURCES = {
    "keys": ["previous keys", "previous values"],
    "values": ["keys", "previous keys", "previous values"],
}
Decoded = Mapping[tuple[int, str], Array]


@dataclass(frozen=True, eq=False)
class _Layer:
    """One layer of what `Prediction` stacks."""

    maps: list[LinearMap]
    bias: Array
    previous: int
    log_norm: Array
    left: float


def fit(
    tokens: Mapping[int, LayerTokens], bits: int, *, span: int = 0, widest: int = WIDEST
) -> tuple[Prediction, ...]:
    """Maps for keys and values of all layers of the sample, for a rest of `bits` bits.

    Layers whose shape is not that of the layer before start a chain. Raises CalibrationError for
    bits other than 1 to 8 or a negative span.
    """
    if not 1 <= bits <= 8 or span < 0:
        raise CalibrationError(
            f"prediction: {bits} bits (1 to 8), a span of {span} layers (from 0)"
        )
    made: dict[tuple[int, str], _Layer] = {}
    decoded: dict[tuple[int, str], Array] = {}
    last, length = -1, 0
    for index, layer in sorted(tokens.items()):
        alike = last >= 0 and all(
            tokens[last].part(p).shape == layer.part(p).shape for p in SOURCES
        )
        length = length + 1 if alike and not (span and length >= span) else 1
        previous = last if length > 1 else -1
        for part in SOURCES:
            fitted, known = _fit_layer(layer, part, previous, decoded, bits, widest)
            made[index, part] = fitted
            decoded[index, part] = known
        decoded = {place: x for place, x in decoded.items() if place[0] == index}
        last = index
    return tuple(a for part in SOURCES for a in _stack(tokens, made, part, bits, widest))


def _fit_layer(
    layer: LayerTokens, part: str, previous: int, decoded: Decoded, bits: int, widest: int
) -> tuple[_Layer, Array]:
    """The maps of a layer, and its sample decoded, [H, S, D]."""
    x = layer.part(part).astype(np.float64)
    heads, count, dim = x.shape
    group = _group(layer, widest)
    mean = x.mean(axis=1, keepdims=True)
    target = grouped(x - mean, group)
    sources = _sources(layer.index, part, previous, decoded, (heads, count), layer, group)
    middle = sources.mean(axis=1, keepdims=True)
    fitted = [
        linear_maps.fit(s, t, layer.run) for s, t in zip(sources - middle, target, strict=True)
    ]
    maps = [m for m, _ in fitted]
    matrix = np.stack([m.matrix() for m in maps])
    bias = (mean + ungrouped(-middle @ matrix, group)).astype(np.float32)
    guess = bias + ungrouped(sources @ matrix, group)
    rest = x - guess
    log_norm = range_of(rest).astype(np.float32)
    code = RotatedCode(dim, bits, log_norm)
    left = float(np.sum(np.square(rest)) / max(float(np.sum(np.square(target))), 1e-300))
    known = guess + code.decode(*code.encode(rest))
    return _Layer(maps, bias[:, 0], previous, log_norm, left), known


def _group(layer: LayerTokens, widest: int) -> int:
    heads = layer.keys.shape[0]
    return group_of(heads, max(layer.keys.shape[2], layer.values.shape[2]), widest)


def _sources(
    index: int,
    part: str,
    previous: int,
    decoded: Decoded,
    shape: tuple[int, int],
    layer: LayerTokens,
    group: int,
) -> Array:
    """What the maps read, float64 [G, N, S]; zeros for a layer before that is not there."""
    blocks = []
    for source in SOURCES[part]:
        name = source.split()[-1]
        at = index if source == "keys" else previous
        dim = layer.part(name).shape[2]
        x = decoded[at, name] if at >= 0 else np.zeros((*shape, dim))
        blocks.append(grouped(np.asarray(x, np.float64), group))
    return np.concatenate(blocks, axis=2)


def _stack(
    tokens: Mapping[int, LayerTokens],
    made: Mapping[tuple[int, str], _Layer],
    part: str,
    bits: int,
    widest: int,
) -> list[Prediction]:
    groups: dict[tuple[bool, tuple[int, ...]], list[int]] = {}
    for index in sorted(tokens):
        layer = tokens[index]
        shape = (*layer.keys.shape[::2], layer.values.shape[2])
        groups.setdefault((layer.rotated, shape), []).append(index)
    return [
        Prediction(
            part=part,
            before_rope=before and part == "keys",
            group=_group(tokens[indices[0]], widest),
            sources=SOURCES[part],
            bits=bits,
            weights=np.stack([[m.weights for m in made[i, part].maps] for i in indices]),
            inputs=np.stack([[m.inputs for m in made[i, part].maps] for i in indices]),
            outputs=np.stack([[m.outputs for m in made[i, part].maps] for i in indices]),
            bias=np.stack([made[i, part].bias for i in indices]),
            previous=np.array([made[i, part].previous for i in indices], np.int32),
            log_norm=np.stack([made[i, part].log_norm for i in indices]),
            left=np.array([made[i, part].left for i in indices], np.float32),
            layers=tuple(indices),
        )
        for (before, _), indices in groups.items()
    ]


def needs(artifact: Prediction, row: int) -> list[tuple[int, str] | None]:
    """(layer, part) of each source, None where there is no layer before."""
    previous = int(artifact.previous[row])
    own = artifact.layers[row]
    places = [(own if s == "keys" else previous, s.split()[-1]) for s in artifact.sources]
    return [place if place[0] >= 0 else None for place in places]


def predict(artifact: Prediction, row: int, sources: Sequence[Array | None]) -> Array:
    """Guess float64 [H, N, D] (or [H, 1, D]) from decoded vectors [H, N, D] in order of `needs`."""
    bias = np.asarray(artifact.bias[row], np.float64)[:, None]
    parts = [s for s in sources if s is not None]
    if not parts:
        return bias
    matrix, start = matrix_of(artifact, row), 0
    guess = np.zeros((matrix.shape[0], parts[0].shape[1], matrix.shape[2]))
    for source, size in zip(sources, _widths(artifact, matrix.shape[1], sources), strict=True):
        if source is not None:
            x = grouped(np.asarray(source, np.float64), artifact.group)
            guess += x @ matrix[:, start : start + size]
        start += size
    result: Array = bias + ungrouped(guess, artifact.group)
    return result


def _widths(artifact: Prediction, total: int, sources: Sequence[Array | None]) -> list[int]:
    """Coordinates of each source in a group; keys and values may differ, all else is alike."""
    names = [s.split()[-1] for s in artifact.sources]
    known = {
        n: artifact.group * s.shape[2] for n, s in zip(names, sources, strict=True) if s is not None
    }
    left = total - sum(known.get(n, 0) for n in names)
    lacking = [n for n in names if n not in known]
    return [known[n] if n in known else left // len(lacking) for n in names]


def matrix_of(artifact: Prediction, row: int) -> Array:
    """Float64 [G, S, C]."""
    rows = (artifact.weights[row], artifact.inputs[row], artifact.outputs[row])
    return np.stack([LinearMap(*g).matrix() for g in zip(*rows, strict=True)])


def encode(
    artifact: Prediction, row: int, x: Array, sources: Sequence[Array | None]
) -> tuple[Array, Array]:
    """Codes uint8 [H, N, D] and scale codes uint8 [H, N] of vectors [H, N, D]."""
    rest = np.asarray(x, np.float64) - predict(artifact, row, sources)
    return _code(artifact, row).encode(rest)


def decode(
    artifact: Prediction, row: int, codes: Array, scales: Array, sources: Sequence[Array | None]
) -> Array:
    """Vectors float64 [H, N, D]."""
    rest = _code(artifact, row).decode(codes, scales)
    x: Array = predict(artifact, row, sources) + rest
    return x


def _code(artifact: Prediction, row: int) -> RotatedCode:
    return RotatedCode(artifact.bias.shape[-1], artifact.bits, artifact.log_norm[row])


def bits_per_element(artifact: Prediction) -> float:
    """Bits of a number, scales included; maps are constants of the model."""
    return float(artifact.bits + norm_bits(artifact.bias.shape[-1]))
