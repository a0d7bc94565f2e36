"""What running the model over the calibration text has shown, for all fits of a job alike."""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from velox_pack.caches.needs import Need
from velox_pack.calibrators import joint, sensitivity
from velox_pack.calibrators.capture import LayerStatistics, capture
from velox_pack.calibrators.sensitivity import Sensitivity
from velox_pack.calibrators.stream import StreamingForward
from velox_pack.calibrators.trace import LayerTrace
from velox_pack.manifests.artifacts import Artifact
from velox_pack.manifests.errors import CalibrationError
from velox_pack.manifests.manifest import Layer

if TYPE_CHECKING:
    from velox_pack.job import Job

Report = Callable[[str], None]
# A backward pass costs more than a forward one and needs fewer tokens.
BACKWARD_SEQUENCES = 8

STATISTICS, JOINT = "statistics", "joint"


@dataclass
class Seen:
    """One forward pass with every collector that is wanted, and backward passes as asked for."""

    job: "Job"
    report: Report
    wanted: Collection[str]
    fit: "Callable[[Seen, Need], Iterable[Artifact]]"
    _made: dict[Need, Sequence[Artifact]] = field(default_factory=dict)
    _sensitivities: dict[int, Sensitivity] = field(default_factory=dict)

    def made(self, need: Need) -> Sequence[Artifact]:
        """Artifacts of a need, fitted when first asked for."""
        if need not in self._made:
            self._made[need] = tuple(self.fit(self, need))
        return self._made[need]

    @property
    def covered(self) -> list[Layer]:
        """Layers that caches serve."""
        return [layer for layer in self.job.layers if layer.covered]

    @property
    def tokens(self) -> np.ndarray:
        """The calibration text's token ids, int32 [n, N]."""
        if self.job.text is None:
            raise CalibrationError("a calibration was asked for without a text")
        return self.job.text.tokens

    @property
    def few(self) -> np.ndarray:
        """As many sequences as a backward pass gets."""
        return self.tokens[:BACKWARD_SEQUENCES]

    @cached_property
    def traces(self) -> list[LayerTrace]:
        """Traces of the covered layers."""
        indices = {layer.index for layer in self.covered}
        return [t for t in self.job.traces if t.index in indices]

    def streaming(self) -> StreamingForward:
        """The model, to be run once more."""
        return StreamingForward(self.job.source.skeleton(), self.job.source.weights)

    @cached_property
    def _forward(self) -> tuple[dict[int, LayerStatistics], joint.Collector | None]:
        self.report(f"capturing attention over {self.tokens.size} tokens")
        together = joint.Collector(self.traces) if JOINT in self.wanted else None
        statistics = capture(
            self.streaming(),
            self.tokens,
            self.traces,
            seed=self.job.seed,
            also=[together] if together else [],
        )
        return statistics, together

    @property
    def statistics(self) -> dict[int, LayerStatistics]:
        """Moments and samples of every covered layer."""
        return self._forward[0]

    def joint(self, part: str) -> dict[int, joint.Joint]:
        """Statistics of heads together."""
        collector = self._forward[1]
        if collector is None:
            raise CalibrationError("joint statistics were not asked for before the pass")
        return collector.done(part)

    def sensitivity(self, window: int) -> Sensitivity:
        """Sensitivities behind an exact window of so many tokens; measured once for each."""
        if window not in self._sensitivities:
            self.report("measuring sensitivities")
            self._sensitivities[window] = sensitivity.measure(
                self.streaming(),
                self.few,
                self.traces,
                self.statistics,
                window=window,
                seed=self.job.seed,
            )
        return self._sensitivities[window]
