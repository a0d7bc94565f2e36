"""Plans and caches for a model, made as a conversion makes them but without a bundle."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import KVCache

from velox_pack.attention import install
from velox_pack.caches import recipes
from velox_pack.caches.cache import VeloxCache
from velox_pack.caches.codecs.affine import Affine
from velox_pack.caches.codecs.exact import Exact
from velox_pack.caches.codecs.grouped import GroupedBasis
from velox_pack.caches.codecs.rope import BeforeRope, RopeTable
from velox_pack.caches.codecs.rotated import (
    Eigenbasis,
    LevelTable,
    LogNorm,
    PlainNorm,
    RotatedScalar,
    Structured,
)
from velox_pack.caches.plan import LayerPlan, ModelPlan
from velox_pack.caches.shelf import Shelf
from velox_pack.calibrators import (
    center,
    codebooks,
    joint,
    spectral,
    spectral_metric,
    waterfill,
)
from velox_pack.calibrators.capture import capture
from velox_pack.calibrators.spectral_metric import head_metric, query_metric
from velox_pack.calibrators.stream import StreamingForward
from velox_pack.calibrators.trace import LayerTrace, trace
from velox_pack.kernels.rotation import make_rotation
from velox_pack.manifests.artifacts import Artifact, Rope, Rotation, Spectral, Widths
from velox_pack.manifests.artifacts_scalar import JointSpectral
from velox_pack.manifests.manifest import Layer
from velox_pack.source import data_folder, resolve


def text_tokens(source: str, name: str, rows: int, length: int) -> np.ndarray:
    """Token ids int32 [rows, length] from the start of one of the package's texts."""
    text = (data_folder() / "text" / name).read_text("utf-8")[: 8 * rows * length]
    ids = resolve(source).tokenizer().encode(text)[: rows * length]
    return np.array(ids, dtype=np.int32).reshape(rows, length)


def random_tokens(rows: int, length: int, seed: int = 0) -> np.ndarray:
    """Token ids int32 [rows, length] for models of 256 bytes."""
    return np.random.default_rng(seed).integers(0, 256, (rows, length)).astype(np.int32)


@dataclass(frozen=True)
class Prepared:
    """A float32 model with routed attention, and the artifacts of its covered layers."""

    path: str
    model: nn.Module
    layers: tuple[Layer, ...]
    artifacts: dict[str, Artifact]
    plans: dict[str, ModelPlan] = field(default_factory=dict)

    def plan(self, recipe: str) -> ModelPlan:
        """The plan of a recipe, such as `spectral:bits=3`; made once."""
        if recipe not in self.plans:
            parsed = recipes.parse(recipe)
            artifacts = self.artifacts | _widths(parsed, self.layers, self.artifacts)
            shelf = Shelf(self.layers, artifacts)
            self.plans[recipe] = recipes.build(parsed, recipe, f"{self.path}/{recipe}", shelf)
        return self.plans[recipe]

    def caches(self, plan: ModelPlan | str | None, kind: type | None = None) -> list:
        """Fresh caches: VeloxCache, or `kind(layer plan)`, where covered; else mlx-lm's own."""
        # The class's own: a test may have put another make_cache on the model.
        make = getattr(type(self.model), "make_cache", None)
        caches = make(self.model) if make else [KVCache() for _ in self.model.layers]
        plan = self.plan(plan) if isinstance(plan, str) else plan
        for index, own in plan.layers.items() if plan else ():
            at = self.layers[index].cache_index
            caches[at] = kind(own) if kind else VeloxCache(own, plan.fingerprint, index)
        return caches

    def logits(self, tokens: mx.array, caches: list, chunks: list[int] | None = None) -> mx.array:
        """Logits float32 [L, V] of tokens [L], fed in chunks of these sizes (one by default)."""
        parts = []
        for piece in split(tokens, chunks or [tokens.shape[0]]):
            parts.append(self.model(piece[None], cache=caches)[0])
            mx.eval(parts[-1])
        return mx.concatenate(parts).astype(mx.float32)


def split(tokens: mx.array, chunks: list[int]) -> Iterator[mx.array]:
    start = 0
    for size in chunks:
        yield tokens[start : start + size]
        start += size


def uniform(plan: LayerPlan, like: ModelPlan) -> ModelPlan:
    """The same plan for every layer that `like` covers."""
    return ModelPlan("uniform", "uniform", "uniform", dict.fromkeys(like.layers, plan))


def prepare(path: str, tokens: np.ndarray) -> Prepared:
    source = resolve(path)
    traces = trace(source.skeleton())
    covered = [t for t in traces if t.covered and t.attention == "full"]
    layers = tuple(
        Layer(
            index=t.index,
            attention=t.attention,
            heads=t.heads,
            kv_heads=t.kv_heads,
            k_dim=t.k_dim,
            v_dim=t.v_dim,
            window=t.window,
            rope=None if t.rope is None else "rope",
            routed=t.routed,
            covered=t in covered,
            reason=None if t in covered else t.reason or "sliding",
            cache_index=t.cache_index,
        )
        for t in traces
    )
    together = joint.Collector(covered)
    streaming = StreamingForward(source.skeleton(), source.weights)
    statistics = capture(streaming, tokens, covered, also=[together])
    metrics = {
        "keys": {t.index: query_metric(statistics[t.index], t) for t in covered},
        "values": {t.index: head_metric(statistics[t.index]) for t in covered},
    }
    fitted = [
        codebooks.fit(),
        *(rotation(d) for d in sorted({d for t in covered for d in (t.k_dim, t.v_dim)})),
        *_ropes(covered),
        *spectral.fit(statistics, "keys"),
        *center.fit(statistics, "values"),
        *spectral_metric.fit(together.done("keys"), metrics["keys"], "keys", metric="queries"),
        *spectral_metric.fit(together.done("values"), metrics["values"], "values", metric="heads"),
    ]
    model = source.skeleton()
    model.load_weights(list(source.weights().items()))
    model.set_dtype(mx.float32)
    mx.eval(model.parameters())
    install(model)
    artifacts = {f"{a.kind}-{n}": opened(a) for n, a in enumerate(fitted)}
    return Prepared(path, model, layers, artifacts)


def opened(artifact: Artifact) -> Artifact:
    """The artifact as it comes out of a bundle, in MLX arrays."""
    tensors = {role: mx.array(value) for role, value in artifact.to_tensors().items()}
    return type(artifact).from_tensors(artifact.parameters(), artifact.layers, tensors)


def rotation(width: int) -> Rotation:
    made = make_rotation(width, 0)
    mix = np.ones((1, 1), np.float32) if made.mix is None else np.array(made.mix)
    signs = np.array(made.signs).astype(np.int8)
    return Rotation(width=width, block=made.block, signs=signs, mix=mix)


def _ropes(traces: list[LayerTrace]) -> list[Rope]:
    """One artifact a layer: stacking is the conversion's business."""
    return [
        Rope(
            dims=t.rope.dims,
            traditional=t.rope.traditional,
            inv_freq=np.array([t.rope.inv_freq], dtype=np.float32),
            layers=(t.index,),
        )
        for t in traces
        if t.rope is not None
    ]


def _widths(
    plan: recipes.Plan, layers: tuple[Layer, ...], artifacts: dict[str, Artifact]
) -> dict[str, Artifact]:
    bits = plan.recipe.bits_of()
    covered = [layer for layer in layers if layer.covered]
    if bits is None:
        return {}
    shelf = Shelf(layers, artifacts)
    rows: dict[str, list[np.ndarray]] = {"keys": [], "values": []}
    for layer in covered:
        for part, dim, wanted in zip(rows, (layer.k_dim, layer.v_dim), bits, strict=True):
            variance = np.ones((1, dim))
            if part in plan.recipe.bases and plan.name == "joint-spectral":
                book, row = shelf.find(JointSpectral, layer.index, part=part)
                variance = np.array(book.cost[row])
            elif part in plan.recipe.bases:
                book, row = shelf.find(Spectral, layer.index, part=part)
                variance = np.array(book.variance[row])
                variance = variance / variance.sum(axis=-1, keepdims=True)
            rows[part].append(waterfill.widths(variance, wanted)[0])
    made = Widths(
        plan=plan.canonical,
        bits=sum(bits) / 2,
        keys=np.stack(rows["keys"]),
        values=np.stack(rows["values"]),
        layers=tuple(layer.index for layer in covered),
    )
    return {"widths": opened(made)}


def example_plans(heads: int = 2, dim: int = 64) -> dict[str, LayerPlan]:
    """One plan of each kind of codec for keys and values of these sizes; nothing is fitted."""
    table = LevelTable(dict(opened(codebooks.fit()).levels))
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.standard_normal((heads, dim, dim)))[0]
    variance = np.broadcast_to(1.0 / np.arange(1, dim + 1), (heads, dim))
    share = variance / variance.sum(axis=-1, keepdims=True)
    spectral = RotatedScalar(
        turn=Eigenbasis(mx.array(basis.astype(np.float16))),
        sigma=mx.array(np.sqrt(share).astype(np.float32)),
        widths=tuple(int(w) for w in waterfill.widths(variance, 3)[0]),
        table=table,
        norm=LogNorm(-2.0, 0.03),
        mean=mx.array(rng.standard_normal((heads, dim)).astype(np.float32)),
    )
    both = np.linalg.qr(rng.standard_normal((1, heads * dim, heads * dim)))[0]
    grouped = RotatedScalar(
        turn=GroupedBasis(mx.array(both.astype(np.float16)), mx.ones((heads, 1, 1)), heads),
        sigma=mx.full((1, heads * dim), (heads * dim) ** -0.5),
        widths=(4,) * 32 + (2,) * (heads * dim - 32),
        table=table,
        norm=LogNorm(-2.0, 0.03),
        mean=mx.array(rng.standard_normal((heads, dim)).astype(np.float32)),
    )
    rotated = RotatedScalar(
        turn=Structured(make_rotation(dim, 0)),
        sigma=mx.full((heads, dim), dim**-0.5),
        widths=(3,) * dim,
        table=table,
        norm=PlainNorm(),
    )
    inv_freq = mx.array((10000.0 ** (-np.arange(0, dim, 2) / dim)).astype(np.float32))
    before = BeforeRope(spectral, RopeTable(inv_freq, False))
    token, channel = (Affine(4, 32, dim, axis) for axis in ("token", "channel"))
    return {
        "exact": LayerPlan(Exact(), Exact(), 4, 24, 8),
        "rotated": LayerPlan(rotated, rotated, 4, 24, 8),
        "spectral": LayerPlan(before, rotated, 4, 24, 8),
        "joint": LayerPlan(BeforeRope(grouped, RopeTable(inv_freq, False)), grouped, 4, 24, 8),
        "no window": LayerPlan(before, rotated, 0, 0, 1),
        "token": LayerPlan(token, token, 4, 24, 64),
        "channel": LayerPlan(channel, token, 4, 24, 64),
        "channel, no sinks": LayerPlan(channel, channel, 0, 0, 32),
    }


def rows_of(tokens: int, batch: int = 1, heads: int = 2, dim: int = 64, seed: int = 0) -> mx.array:
    """Random float32 [batch, heads, tokens, dim]."""
    shape = (batch, heads, tokens, dim)
    return mx.array(np.random.default_rng(seed).standard_normal(shape, np.float32))


def fill(cache: VeloxCache, keys: mx.array, values: mx.array, chunks: list[int]) -> VeloxCache:
    """Put keys and values [B, H, N, D] into a cache in chunks, as a model's layer would."""
    start = 0
    for size in chunks:
        piece = slice(start, start + size)
        cache.update_and_fetch(keys[:, :, piece], values[:, :, piece])
        start += size
    cache.settle()
    mx.eval(cache.arrays())
    return cache


def everything(cache: VeloxCache) -> tuple[mx.array, mx.array]:
    """All keys and values decoded, float32."""
    held = copy.deepcopy(cache)
    held.settle()
    return held._all(mx.float32)
