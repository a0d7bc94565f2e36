"""A page of panels under one another, and the few ways to fill one.

matplotlib is imported when a page is drawn, never before, and without pyplot: no window system, no
global figures. A page is 6 inches wide with text that can still be read at half of that.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from velox_pack.manifests.errors import VeloxError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, Normalize

Array = np.ndarray
Panel = Callable[["Axes"], None]

MARK = b"tEXtSoftware\0velox-pack"  # in the first bytes of every picture: no date, no version
WIDTH, DPI = 6.0, 160
STYLE = {
    "font.size": 10.0,
    "axes.titlesize": 11.0,
    "axes.grid": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
}
KEYS, VALUES = "#30123b", "#c24a1a"  # told apart by brightness too
_MOST_TICKS = 12


def ready() -> None:
    """VeloxError, in one line, if matplotlib is not installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise VeloxError(
            'inspect --plots needs matplotlib: pip install "velox-pack[plots]"'
        ) from None


class Page:
    """Panels, top to bottom, each of its own height in inches."""

    def __init__(self) -> None:
        self.title = ""
        self.panels: list[tuple[float, Panel]] = []

    def heat(
        self,
        matrix: Array,
        layers: Sequence[int],
        title: str,
        colour: str,
        *,
        rows: str = "KV head",
        log: bool = False,
        limits: tuple[float, float] | None = None,
    ) -> None:
        """A map of `matrix` [rows, L] with layers from left to right; `colour` is what it shows."""
        height = 1.15 + min(0.22 * len(matrix), 3.0)
        scale = _Scale(matrix, colour, log, limits)

        def panel(axes: Axes) -> None:
            scale.show(axes, matrix)
            axes.set_title(title)
            _ticks(axes, "x", layers)
            _ticks(axes, "y", range(len(matrix)))
            axes.set(xlabel="layer", ylabel=rows)

        self.panels.append((height, panel))

    def spectra(self, matrix: Array, layers: Sequence[int], title: str, colour: str) -> None:
        """A logarithmic map of `matrix` [L, D] with coordinates from left to right."""
        height = 1.3 + min(max(0.16 * len(matrix), 1.0), 3.5)
        scale = _Scale(matrix, colour, True, None)

        def panel(axes: Axes) -> None:
            scale.show(axes, matrix)
            axes.set_title(title)
            _ticks(axes, "x", range(matrix.shape[1]))
            _ticks(axes, "y", layers)
            axes.set(xlabel="coordinate", ylabel="layer")

        self.panels.append((height, panel))

    def band(self, curves: Array, title: str, y: str) -> None:
        """Median and 10th to 90th percentile of positive `curves` [n, D], logarithmic."""
        x = np.arange(curves.shape[1])
        low, middle, high = np.percentile(curves, [10, 50, 90], axis=0)

        def panel(axes: Axes) -> None:
            axes.fill_between(x, low, high, color=KEYS, alpha=0.2, lw=0, label="10 to 90 %")
            axes.plot(x, middle, color=KEYS, label="median")
            axes.set(yscale="log", xlabel="coordinate", ylabel=y, xlim=(0, max(1, len(x) - 1)))
            _ticks(axes, "x", range(len(x)))
            axes.set_title(title)
            axes.legend(loc="lower left")

        self.panels.append((2.4, panel))

    def by_layer(
        self, curves: Mapping[str, Array], layers: Sequence[int], title: str, y: str
    ) -> None:
        """One line for each of `curves` [L], from 0 up; at most four."""
        colours = (KEYS, VALUES, "#1a7f8e", "#8fb339")

        def panel(axes: Axes) -> None:
            for n, (name, curve) in enumerate(curves.items()):
                look = {"color": colours[n], "marker": "os^D"[n], "ms": 4}
                axes.plot(range(len(curve)), curve, label=name, **look)  # type: ignore[arg-type]
            top = max(float(np.max(curve)) for curve in curves.values())
            axes.set(xlabel="layer", ylabel=y, ylim=(0, 1.08 * top if top > 0 else 1))
            axes.set_title(title)
            _ticks(axes, "x", layers)
            if len(curves) > 1:
                axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.28), ncols=len(curves))

        self.panels.append((2.6, panel))

    def bars(
        self,
        names: Sequence[str],
        lengths: Sequence[float],
        ends: Sequence[str],
        title: str,
        unit: str,
    ) -> None:
        """Horizontal bars, the first on top, with the texts `ends` behind them."""

        def panel(axes: Axes) -> None:
            drawn = axes.barh(range(len(names)), lengths, color=KEYS, height=0.7)
            axes.bar_label(drawn, labels=list(ends), padding=3)
            axes.set_yticks(range(len(names)), names)
            axes.invert_yaxis()
            axes.set(xlabel=unit, xlim=(0, 1.25 * max([*lengths, 1e-9])))
            axes.set_title(title)

        self.panels.append((0.95 + 0.27 * len(names), panel))


class _Scale:
    """Colours of a map: logarithmic, symmetric about 0 where numbers have signs, or plain."""

    def __init__(
        self, matrix: Array, label: str, log: bool, limits: tuple[float, float] | None
    ) -> None:
        self.label, self.log = label, log
        finite = matrix[np.isfinite(matrix)]
        low, high = limits or (
            (float(finite.min()), float(finite.max())) if finite.size else (0, 1)
        )
        self.signed = not log and low < 0 < high
        if log:
            positive = finite[finite > 0]
            high = float(positive.max()) if positive.size else 1.0
            low = max(float(positive.min()), 1e-6 * high) if positive.size else 0.1
        elif self.signed:
            low, high = -max(-low, high), max(-low, high)
        if low >= high and not log:  # one value everywhere
            low, high = low - 0.5 * (abs(low) or 1.0), low + 0.5 * (abs(low) or 1.0)
        self.low, self.high = low, high

    def show(self, axes: Axes, matrix: Array) -> None:
        from matplotlib.colors import LogNorm, Normalize

        norm: Normalize = Normalize(self.low, self.high)
        if self.log:
            norm = LogNorm(self.low, max(self.high, 1.01 * self.low), clip=True)
        colours: str | Colormap = "coolwarm" if self.signed else "viridis"
        shown = axes.imshow(matrix, norm=norm, cmap=colours, aspect="auto", interpolation="none")
        figure = axes.get_figure()
        assert figure is not None  # an axes of a page always has one
        figure.colorbar(shown, ax=axes, label=self.label, pad=0.02)


def _ticks(axes: Axes, which: str, labels: Sequence[int]) -> None:
    """Few ticks, a power of two apart, at positions 0, 1, ... named by `labels`."""
    room = _MOST_TICKS if which == "x" else _MOST_TICKS // 2
    step = 1
    while step * room < len(labels):
        step *= 2
    at = list(range(0, len(labels), step))
    set_ticks: Any = axes.set_xticks if which == "x" else axes.set_yticks
    set_ticks(at, [str(labels[n]) for n in at])


def to_png(make: Callable[[Page], None]) -> bytes:
    """The picture of the page that `make` fills; whatever the user's own style, the same bytes."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    page = Page()
    make(page)
    heights = [height for height, _ in page.panels]
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)  # type: ignore[arg-type]
        figure = Figure(figsize=(WIDTH, sum(heights) + 0.35), dpi=DPI, layout="constrained")
        FigureCanvasAgg(figure)
        places = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)
        for axes, (_, panel) in zip(places[:, 0], page.panels, strict=True):
            panel(axes)
        figure.suptitle(page.title, fontsize=12)
        out = io.BytesIO()
        figure.savefig(out, format="png", metadata={"Software": "velox-pack"})
    return out.getvalue()
