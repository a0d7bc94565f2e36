"""Eviction policies by name: what they want calibrated. The policies themselves are to come."""

from dataclasses import dataclass
from typing import Any, ClassVar

from velox_pack.caches.needs import Need
from velox_pack.manifests.errors import RecipeError


@dataclass(frozen=True)
class _Policy:
    """`budget` tokens are kept, a share of `recent` among them the last ones."""

    about: ClassVar[str]
    needs: ClassVar[tuple[Need, ...]]
    budget: int = 1024
    recent: float = 0.5

    def __post_init__(self) -> None:
        """Refuse budgets that keep nothing."""
        if self.budget < 16 or not 0 <= self.recent <= 1:
            raise RecipeError(
                f"budget={self.budget}, recent={self.recent:g}: must be at least 16, and 0 to 1"
            )


class QFiltersPolicy(_Policy):
    """Keys by their product with the filter."""

    about = "keep keys by their product with a calibrated filter (Q-Filters)"
    needs = (Need("qfilters"), Need("filter-report"))


class AttentionFilterPolicy(_Policy):
    """Keys by a filter fitted to true attention."""

    about = "keep keys by a filter fitted to true attention"
    needs = (
        Need.of("attention-filter", frame="fixed"),
        Need.of("attention-filter", frame="moving"),
    )


class ExpectedAttentionPolicy(_Policy):
    """Keys by the attention of queries like those of the calibration."""

    about = "keep keys that coming queries are expected to attend to (Expected Attention)"
    needs = (Need("expected-attention"),)


class PyramidPolicy(_Policy):
    """Budgets by layer, in an arithmetic sequence."""

    about = "budgets that fall or rise from layer to layer (PyramidKV)"
    needs = (Need("budgets-pyramid"),)


class SqueezePolicy(_Policy):
    """Budgets by layer, from how much attention changes the hidden state."""

    about = "budgets by what attention does in a layer (SqueezeAttention)"
    needs = (Need("budgets-squeeze"),)


class AdaPolicy(_Policy):
    """Budgets by head."""

    about = "budgets for each head of a layer from true attention (AdaKV)"
    needs = (Need("budgets-ada"),)


class MeasuredPolicy(_Policy):
    """Budgets by layer and head that lose least of the attention's output."""

    about = "budgets for each layer and head that lose least on the calibration text"
    needs = (Need("budgets-measured"),)


POLICIES: dict[str, Any] = {
    "qfilters": QFiltersPolicy,
    "attention-filter": AttentionFilterPolicy,
    "expected-attention": ExpectedAttentionPolicy,
    "pyramidkv": PyramidPolicy,
    "squeeze": SqueezePolicy,
    "adakv": AdaPolicy,
    "measured-budgets": MeasuredPolicy,
}
