"""Mean and norm range per layer and KV head, for codes that need no basis of their own."""

from collections.abc import Mapping

import numpy as np

from velox_pack.calibrators.capture import LayerStatistics
from velox_pack.calibrators.spectral import norm_range
from velox_pack.manifests.artifacts import Center


def fit(statistics: Mapping[int, LayerStatistics], part: str) -> tuple[Center, ...]:
    """Centers of "keys" (before RoPE where it can be undone) or "values" of all layers given.

    Layers that agree in shape and in standing before RoPE are stacked into one artifact.
    """
    groups: dict[tuple[bool, tuple[int, ...]], list[int]] = {}
    for index in sorted(statistics):
        moments, _ = statistics[index].part(part)
        before = part == "keys" and statistics[index].rotated
        groups.setdefault((before, moments.total.shape), []).append(index)
    artifacts = []
    for (before, _), layers in groups.items():
        parts = [statistics[i].part(part) for i in layers]
        ranges = [norm_range(sample - moments.mean[:, None, :]) for moments, sample in parts]
        artifacts.append(
            Center(
                part=part,
                before_rope=before,
                mean=np.stack([moments.mean for moments, _ in parts]).astype(np.float32),
                log_norm=np.stack(ranges).astype(np.float32),
                layers=tuple(layers),
            )
        )
    return tuple(artifacts)
