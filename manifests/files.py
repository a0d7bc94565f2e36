"""Files of a bundle on disk: found without leaving it, hashed, and made durable."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

from .errors import BundleError

_BLOCK = 4 * 2**20  # bytes read at a time


def locate(folder: Path, name: str) -> Path:
    """The path of `name` (a checked name) in a bundle; BundleError if it is absent or outside.

    Links are followed only if they end in the bundle itself or, when the bundle is a snapshot in
    a Hugging Face cache (`.../snapshots/<commit>`, a folder of links), in that repository's
    `blobs` folder. Anything else would let a bundle read any file of the machine.
    """
    path = folder / name
    try:
        real = path.resolve(strict=True)
        regular = stat.S_ISREG(os.stat(real).st_mode)
    except (OSError, RuntimeError):  # RuntimeError: a loop of links
        raise BundleError(f"{name}: is missing; get the bundle again") from None
    if not regular:
        raise BundleError(f"{name}: is not a regular file")
    base = folder.resolve()
    allowed = [base]
    if base.parent.name == "snapshots":
        allowed.append(base.parent.parent.resolve() / "blobs")
    if not any(real.is_relative_to(root) for root in allowed):
        raise BundleError(f"{name}: is a link out of the bundle; put the file itself there")
    return path


def read_bounded(path: Path, limit: int) -> bytes:
    """The whole of a file; BundleError, before reading, if it is larger than `limit` bytes."""
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size > limit:
                raise BundleError(f"{path.name}: is larger than {limit} bytes")
            return file.read(limit)
    except OSError as error:
        raise BundleError(f"{path.name}: cannot be read ({error.strerror})") from None


def sha256_file(path: str | os.PathLike[str], progress: Callable[[int], None] | None = None) -> str:
    """Hex SHA-256 of a file, read in blocks; `progress` is told the bytes of each block."""
    digest = hashlib.sha256()
    buffer = bytearray(_BLOCK)
    view = memoryview(buffer)
    try:
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(view[:count])
                if progress is not None:
                    progress(count)
    except OSError as error:
        raise BundleError(f"{Path(path).name}: cannot be read ({error.strerror})") from None
    return digest.hexdigest()


def require_space(path: str | os.PathLike[str], needed: int) -> None:
    """BundleError unless the disk that will hold `path` has `needed` bytes free."""
    folder = Path(path).absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise BundleError(
            f"{path}: needs {needed} bytes ({needed / 1e9:.2f} GB), the disk has {free} free "
            f"({free / 1e9:.2f} GB); make room or choose another place"
        )


def sync(path: Path) -> None:
    """Make a file or a folder's list of names durable, where the system can."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except OSError:  # a folder on Windows
        return
    try:
        os.fsync(handle)
    except OSError:
        if not path.is_dir():  # some file systems refuse to sync a folder
            raise
    finally:
        os.close(handle)


def replace_file(path: Path, data: bytes) -> None:
    """Put `data` in place of a file, atomically; a link is replaced, not followed."""
    temporary = path.with_name(f".{path.name}.velox-tmp-{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise BundleError(f"{path}: cannot be written ({error.strerror})") from None
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)
