"""Pictures of what a bundle holds: `velox-pack inspect BUNDLE --plots DIR`.

Needs matplotlib, the optional extra `plots`. The same bundle gives the same bytes with the same
matplotlib. Kinds of artifact that have no picture are left out.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from velox_pack import contents
from velox_pack.manifests.artifacts import KINDS
from velox_pack.manifests.bundle import Bundle, open_bundle
from velox_pack.manifests.errors import BundleError
from velox_pack.manifests.files import replace_file
from velox_pack.plots import allocations, budgets, byte_bars, filters, spectra
from velox_pack.plots.canvas import MARK, Page, ready, to_png

# Kind of artifact -> what its picture's name starts with, and the panels it adds to a page.
PICTURES: dict[str, tuple[str, Callable[[Page, Any], None]]] = {
    "spectral": ("spectrum", spectra.spectral),
    "joint-spectral": ("spectrum", spectra.joint_spectral),
    "lowrank": ("spectrum", spectra.lowrank),
    "qfilters": ("filters", filters.directions),
    "attention-filter": ("filters", filters.directions),
    "filter-report": ("filters", filters.report),
    "allocation": ("bits", allocations.allocation),
    "widths": ("bits", allocations.widths),
    "budgets": ("budgets", budgets.budgets),
}


def draw(
    bundle: str | Path, folder: str | Path, report: Callable[[str], None] = lambda line: None
) -> list[Path]:
    """Write a PNG for each artifact that has a picture and one of the bytes; what was written.

    `folder` is created if missing; of the files in it only pictures drawn here are replaced.
    `report` is told what is drawn. Raises VeloxError without matplotlib, BundleError for a bad
    bundle or a name that is taken.
    """
    ready()
    opened = open_bundle(bundle)
    out = Path(folder)
    pages = dict(_pages(opened))
    try:
        out.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise BundleError(f"{out}: is not a folder; choose another for the plots") from None
    for name in pages:
        _refuse_if_taken(out / name)
    for name, make in pages.items():
        report(f"drawing {name}")
        replace_file(out / name, to_png(make))
    return [out / name for name in pages]


def _pages(bundle: Bundle) -> Iterator[tuple[str, Callable[[Page], None]]]:
    for record in bundle.manifest.artifacts:
        if record.kind in PICTURES and record.kind in KINDS:
            word, panels = PICTURES[record.kind]
            artifact = bundle.artifact(record.id)
            yield f"{word}-{record.id}.png", _page(panels, artifact, record.id)
    found = contents.inspect(bundle.path)
    yield "bytes.png", lambda page: byte_bars.byte_bars(page, found, bundle)


def _page(panels: Callable[[Page, Any], None], artifact: Any, title: str) -> Callable[[Page], None]:
    def make(page: Page) -> None:
        page.title = title
        panels(page, artifact)

    return make


def _refuse_if_taken(path: Path) -> None:
    """BundleError if something else than a picture of ours has this name."""
    try:
        with open(path, "rb") as file:
            ours = MARK in file.read(256)
    except FileNotFoundError:
        return
    except OSError:
        ours = False
    if not ours:
        raise BundleError(f"{path}: exists and is no plot of velox-pack's; choose another folder")
