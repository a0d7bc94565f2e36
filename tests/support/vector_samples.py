"""Artifacts of vector codes for tests of their codecs: made by hand, or fitted to given rows."""

import numpy as np

from velox_pack.calibrators.capture import LayerStatistics, Moments
from velox_pack.calibrators.spectral import norm_range
from velox_pack.calibrators.trace import LayerTrace, RopeSpec
from velox_pack.calibrators.vector_tools import random_rotation
from velox_pack.manifests.artifacts_vector import CommVQ, RaBitQ, VecInfer, rope_pairs


def _moments(rows: np.ndarray) -> Moments:
    x = rows.astype(np.float64)
    largest = np.abs(x).max(axis=1)
    return Moments(x.shape[1], x.sum(axis=1), np.swapaxes(x, 1, 2) @ x, largest)


def statistics(rows: np.ndarray) -> tuple[LayerStatistics, LayerTrace]:
    """A layer 0 whose keys, as before RoPE, and values are `rows` [H, S, D]; queries are normal."""
    moments, queries = _moments(rows), _moments(normal(*rows.shape, seed=7))
    sample = rows.astype(np.float32)
    where = np.zeros(rows.shape[:2], int)
    layer = LayerStatistics(
        0, False, queries, moments, moments, moments, sample, sample, sample, where, where
    )
    heads, _, dim = rows.shape
    rope = RopeSpec(dim, False, tuple(0.01 ** (i / dim) for i in range(0, dim, 2)))
    sizes = {"heads": heads, "kv_heads": heads, "k_dim": dim, "v_dim": dim}
    return layer, LayerTrace(0, "full", rope=rope, **sizes)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def _scales(rows: np.ndarray) -> np.ndarray:
    return norm_range(rows)[None].astype(np.float32)


def vecinfer_of(
    heads: int, dim: int, sub: int, bits: int, *, part: str = "keys", shared: bool = False
) -> VecInfer:
    """Random codebooks, one for all sub vectors or one for each."""
    signs, mix = random_rotation(dim, 1, 0)
    count = (1, 1) if shared else (heads, dim // sub)
    return VecInfer(
        part=part,
        before_rope=False,
        scaled=True,
        mean=normal(1, heads, dim, seed=1).astype(np.float32),
        smoothing=np.exp(0.3 * normal(1, heads, dim, seed=2)).astype(np.float32),
        codebooks=(normal(1, *count, 2**bits, sub, seed=3) * dim**-0.5).astype(np.float16),
        log_scale=_scales(normal(heads, 64, dim)),
        signs=signs,
        mix=mix,
        layers=(0,),
    )


def rabitq_of(heads: int, dim: int, centroids: int, *, part: str = "keys") -> RaBitQ:
    """Random centroids."""
    signs, mix = random_rotation(dim, 3, 0)
    return RaBitQ(
        part=part,
        before_rope=False,
        centroids=normal(1, heads, centroids, dim, seed=1).astype(np.float16),
        log_scale=_scales(normal(heads, 64, dim)),
        signs=signs,
        mix=mix,
        layers=(0,),
    )


def commvq_of(
    heads: int, dim: int, stages: int, entries: int, *, dims: int, traditional: bool = False
) -> CommVQ:
    """Random codebooks, smaller from stage to stage."""
    first, second = rope_pairs(dim, dims, traditional)
    weight = np.exp(0.3 * normal(1, heads, dim, seed=2))
    weight[..., second] = weight[..., first]
    size = dim**-0.5 * 0.8 ** np.arange(stages)
    books = normal(1, heads, stages, entries, dim, seed=3) * size[:, None, None]
    return CommVQ(
        dims=dims,
        traditional=traditional,
        mean=normal(1, heads, dim, seed=1).astype(np.float32),
        weight=weight.astype(np.float32),
        codebooks=books.astype(np.float16),
        log_scale=_scales(normal(heads, 64, dim)),
        layers=(0,),
    )
