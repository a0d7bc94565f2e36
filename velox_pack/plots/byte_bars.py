"""Where the bytes of a bundle go."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from velox_pack.manifests.aligned import read_header
from velox_pack.manifests.bundle import Bundle
from velox_pack.manifests.names import CACHE_FILE
from velox_pack.plots.canvas import Page
from velox_pack.show import size

_MOST = 14  # bars in a panel; what is smaller is added up


def byte_bars(page: Page, found: Mapping[str, Any], bundle: Bundle) -> None:
    """Bars of what the bytes are for, the files, the artifacts and the layers' weights."""
    page.title = "bytes"
    _bars(page, found["bytes_by_use"], "What the bytes are for")
    _bars(page, found["file_bytes"], "Files")
    if CACHE_FILE in found["file_bytes"]:
        entries = read_header(bundle.path / CACHE_FILE)
        artifacts = {
            record.id: sum(entries[name].nbytes for name in record.tensors.values())
            for record in bundle.manifest.artifacts
        }
        if artifacts:
            _bars(page, artifacts, "Artifacts")
    layers = found["layers"]
    weights = np.array([layer["weight_bytes"] for layer in layers], np.float64)
    if weights.size and weights.max() > 0:
        factor, unit = _unit(float(weights.max()))
        indices = [layer["index"] for layer in layers]
        page.by_layer({"weights": weights / factor}, indices, "Weights of the layers", unit)


def _bars(page: Page, sizes: Mapping[str, int], title: str) -> None:
    ordered = sorted(sizes.items(), key=lambda item: (-item[1], item[0]))
    shown = dict(ordered if len(ordered) <= _MOST else ordered[: _MOST - 1])
    rest = dict(ordered[len(shown) :])
    if rest:
        shown[f"{len(rest)} smaller"] = sum(rest.values())
    factor, unit = _unit(max(shown.values(), default=0))
    ends = [size(count) for count in shown.values()]
    lengths = [count / factor for count in shown.values()]
    page.bars([_short(name) for name in shown], lengths, ends, title, unit)


def _unit(largest: float) -> tuple[float, str]:
    return next(
        ((f, u) for f, u in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")) if largest >= f), (1.0, "B")
    )


def _short(name: str, most: int = 35) -> str:
    return name if len(name) <= most else f"{name[: most - 11]}…{name[-10:]}"
