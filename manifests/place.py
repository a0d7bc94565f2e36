"""Putting a finished folder in place of nothing, or of an older bundle, by renaming."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import sys
from pathlib import Path

from . import strict_json
from .errors import BundleError
from .files import read_bounded, sync
from .manifest import MAX_MANIFEST_BYTES
from .names import MANIFEST_NAME

# Files that systems and the Hub's client put into folders; they do not make a folder precious.
_LITTER = {".DS_Store", ".cache", ".gitattributes", MANIFEST_NAME}


def check_destination(out: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """BundleError unless a bundle may be put at `out`; cheap, so call it before any work.

    With `overwrite` an existing bundle may be replaced, unless it also holds files that its
    manifest does not list (a `.git`, say), which would be lost with it.
    """
    out = Path(out).resolve()
    if not out.parent.is_dir():
        raise BundleError(f"{out}: the folder {out.parent} does not exist; make it first")
    if not os.access(out.parent, os.W_OK | os.X_OK):
        raise BundleError(f"{out}: the folder {out.parent} cannot be written to")
    if not os.path.lexists(out):
        return
    if not overwrite:
        raise BundleError(f"{out}: exists already; choose another place or pass --overwrite")
    if not out.is_dir():
        raise BundleError(f"{out}: is a file, not a bundle; choose another place")
    if not any(out.iterdir()):
        return
    if not (out / MANIFEST_NAME).is_file():
        raise BundleError(
            f"{out}: is not a bundle (it has no {MANIFEST_NAME}), so it is not overwritten"
        )
    strays = sorted(_foreign(out))
    if strays:
        raise BundleError(f"{out}: also holds {strays[0]}, which is no part of the bundle; move it")


def _foreign(out: Path) -> set[str]:
    try:
        old = strict_json.loads(read_bounded(out / MANIFEST_NAME, MAX_MANIFEST_BYTES))
        listed = set(old.get("files", {}))
    except (BundleError, ValueError, AttributeError, TypeError):
        raise BundleError(
            f"{out}: its {MANIFEST_NAME} cannot be read, so it is not overwritten; remove it first"
        ) from None
    top = {name.split("/")[0] for name in listed} | _LITTER | {"plots", "README.md"}
    return {path.name for path in out.iterdir()} - top


def new_sibling(out: Path, purpose: str) -> Path:
    """Make an empty hidden folder beside `out`, on the same disk so that a rename is enough."""
    # A folder of that name can only be the leftover of a killed run: leave it, take another.
    for attempt in range(1000):
        suffix = f"-{attempt}" if attempt else ""
        path = out.with_name(f".{out.name}.velox-{purpose}-{os.getpid()}{suffix}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        except OSError as error:
            raise BundleError(f"{out}: cannot be written ({error.strerror})") from None
        return path
    raise BundleError(f"{out}: too many leftover folders {path.name}; remove them")


def put_in_place(folder: Path, out: Path) -> None:
    """Rename `folder` to `out`; an older `out` is removed once the new one is there."""
    if not os.path.lexists(out):
        _rename(folder, out)
        sync(out.parent)
        return
    if _exchange(folder, out):
        sync(out.parent)
        shutil.rmtree(folder, ignore_errors=True)
        return
    aside = new_sibling(out, "old")
    try:
        _rename(out, aside)  # onto an empty folder, which rename replaces
        _rename(folder, out)
        sync(out.parent)
    finally:
        # Whatever happened in between: the old bundle goes only once there is another.
        if not os.path.lexists(out):
            os.rename(aside, out)
        shutil.rmtree(aside, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two folders in one step, so that not even a kill between two steps loses one.

    False where the system or the file system cannot do it.
    """
    old, new, swap = os.fsencode(one), os.fsencode(other), 2
    try:
        libc = ctypes.CDLL(None)
        if sys.platform == "linux":
            here = -100  # AT_FDCWD
            return bool(libc.renameat2(here, old, here, new, swap) == 0)
        if sys.platform == "darwin":
            return bool(libc.renamex_np(old, new, swap) == 0)
    except (OSError, AttributeError):
        pass
    return False


def _rename(source: Path, target: Path) -> None:
    try:
        os.rename(source, target)
    except OSError as error:
        full = error.errno in (errno.EEXIST, errno.ENOTEMPTY)
        reason = "somebody put something there meanwhile" if full else error.strerror
        raise BundleError(f"{target}: cannot be put in place ({reason})") from None
