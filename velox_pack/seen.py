"""What running the model over the calibration text has shown, for all fits of a job alike."""

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from velox_pack.caches.needs import Need
from velox_pack.calibrators import (
    attention_filter,
    attention_mass,
    expected_attention,
    joint,
    sensitivity,
    sinks,
)
from velox_pack.calibrators.attention_mass import AttentionMass
from velox_pack.calibrators.capture import LayerStatistics, capture
from velox_pack.calibrators.neighbours import LayerTokens, Neighbours
from velox_pack.calibrators.sensitivity import Sensitivity
from velox_pack.calibrators.squeeze import HiddenChange
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

# Collectors that a forward pass can run: of heads together, of true attention, of sinks, of the
# same tokens in all layers, of queries, of the hidden state around attention.
STATISTICS = "statistics"
JOINT = "joint"
MASS = "mass"
SINKS = "sinks"
NEIGHBOURS = "neighbours"
QUERIES = "queries"
FILTERS = "filters"
HIDDEN = "hidden"


class PassError(CalibrationError):
    """The forward pass failed, whatever was to be fitted to what it shows."""


@dataclass
class Seen:
    """One forward pass with every collector that is wanted, and backward passes as asked for."""

    job: "Job"
    report: Report
    wanted: Collection[str]
    fit: "Callable[[Seen, Need], Iterable[Artifact]]"
    _made: dict[Need, Sequence[Artifact]] = field(default_factory=dict)
    _collected: dict[str, Any] = field(default_factory=dict)
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
    def statistics(self) -> dict[int, LayerStatistics]:
        """Moments and samples of every covered layer."""
        self.report(f"capturing attention over {self.tokens.size} tokens")
        streaming = self.streaming()
        inside = HiddenChange()
        watching = inside.watching(streaming.layers) if HIDDEN in self.wanted else nullcontext()
        hooks = {name: make(self) for name, make in _COLLECTORS.items() if name in self.wanted}
        with watching:
            try:
                statistics = capture(
                    streaming,
                    self.tokens,
                    self.traces,
                    seed=self.job.seed,
                    also=list(hooks.values()),
                )
            except CalibrationError as error:
                raise PassError(str(error)) from error
        self._collected = {**hooks, HIDDEN: inside}
        return statistics

    def collected(self, name: str) -> Any:
        """A collector of the forward pass, filled; its own module says what it gives."""
        _ = self.statistics
        if name not in self.wanted:
            raise CalibrationError(f"{name} was not asked for before the pass")
        return self._collected[name]

    def joint(self, part: str) -> dict[int, joint.Joint]:
        """Statistics of heads together."""
        found: dict[int, joint.Joint] = self.collected(JOINT).done(part)
        return found

    @cached_property
    def neighbours(self) -> dict[int, LayerTokens]:
        """The same tokens in all layers."""
        found: dict[int, LayerTokens] = self.collected(NEIGHBOURS).done()
        return found

    @cached_property
    def mass(self) -> dict[int, AttentionMass]:
        """True attention, and what it loses to a budget."""
        found: dict[int, AttentionMass] = self.collected(MASS).done()
        return found

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


_COLLECTORS: dict[str, Callable[[Seen], Any]] = {
    JOINT: lambda seen: joint.Collector(seen.traces),
    MASS: lambda seen: attention_mass.Collector(seen.traces, len(seen.tokens)),
    SINKS: lambda seen: sinks.Masses(seen.traces),
    NEIGHBOURS: lambda seen: Neighbours(seen.traces, seen.tokens.shape),
    QUERIES: lambda seen: expected_attention.Collector(seen.traces),
    FILTERS: lambda seen: attention_filter.Collector(seen.traces),
}
