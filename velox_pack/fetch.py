"""Fetching a repo's files from the Hub into its cache, with every failure told in one line."""

import errno
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from shutil import disk_usage
from typing import Any

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import tqdm

from velox_pack.manifests.errors import SourceError

Report = Callable[[str], None]

_LOG_IN = "log in with `hf auth login` or set HF_TOKEN"


def fetch(
    repo: str,
    revision: str | None,
    patterns: Sequence[str],
    *,
    optional: Sequence[str] = (),
    report: Report | None = None,
) -> Path:
    """Download the files of `repo` that match `patterns` or `optional`; return the snapshot folder.

    The folder's name is the resolved commit. Without network a complete cached copy is used;
    `optional` patterns are asked for but not missed there, since other tools that filled the cache
    may not have wanted them. Room on the disk is checked before a download of known size starts.

    Args:
        repo: `owner/name` on the Hub.
        revision: branch, tag or full commit; None means the default branch.
        patterns: file name patterns that a usable copy must have.
        optional: further patterns.
        report: told once, in words, what is about to be downloaded.

    Raises:
        SourceError: no such repo or revision, gated, no network and not cached, disk full, ...
    """
    wanted = [*patterns, *optional]
    with _quiet(), _one_line(repo, revision):
        try:
            _announce(repo, revision, wanted, report)
            return _snapshot(repo, revision, wanted)
        except LocalEntryNotFoundError as error:
            if not optional or getattr(error, "snapshot_path", None) is None:
                raise
            return _snapshot(repo, revision, patterns)


def list_files(repo: str, revision: str | None) -> list[str]:
    """Name the files of a repo; empty when the Hub cannot say (used only to explain an error)."""
    try:
        with _quiet():
            return sorted(HfApi().list_repo_files(repo, revision=revision))
    except Exception:
        return []


class _Silent(tqdm):
    """The Hub client's progress bar, never drawn: `report` says what is going on."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **(kwargs | {"disable": True}))  # type: ignore[no-untyped-call]


def _snapshot(repo: str, revision: str | None, patterns: Sequence[str]) -> Path:
    folder = snapshot_download(
        repo, revision=revision, allow_patterns=list(patterns), tqdm_class=_Silent
    )
    return Path(folder)


def _announce(repo: str, revision: str | None, patterns: list[str], report: Report | None) -> None:
    """Say what will be downloaded, and refuse what the disk cannot hold."""
    try:
        files = snapshot_download(
            repo, revision=revision, allow_patterns=patterns, tqdm_class=_Silent, dry_run=True
        )
    except (OSError, HfHubHTTPError):  # offline or refused: the real call says which
        return
    missing = [f for f in files if f.will_download]
    size = sum(f.file_size or 0 for f in missing)
    cache = Path(constants.HF_HUB_CACHE).expanduser()
    there = next(p for p in (cache, *cache.absolute().parents) if p.exists())
    if (free := disk_usage(there).free) < size:
        raise SourceError(
            f"{repo}: {size:,} bytes to download but {free:,} free at {cache}: "
            "make room or point HF_HOME at a larger disk"
        )
    if missing and report is not None:
        report(f"fetching {len(missing)} files, {size / 1e6:,.1f} MB, of {repo}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the Hub client's own warnings off stderr: what matters of them is in our errors."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _one_line(repo: str, revision: str | None) -> Iterator[None]:
    try:
        yield
    except SourceError:
        raise
    except Exception as error:  # the client lets its transport's own exceptions through as well
        raise SourceError(_explain(error, repo, revision)) from error


def _explain(error: Exception, repo: str, revision: str | None) -> str:
    """Put a failure of the Hub client into words of ours: its own run over many lines."""
    if isinstance(error, GatedRepoError):  # a RepositoryNotFoundError too: so it comes first
        return f"{repo} is gated: accept its terms on its page at the Hub, then {_LOG_IN}"
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"{repo}: no such folder here and no such model on the Hub, or it is private: "
            f"check the name, or {_LOG_IN}"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"{repo} has no revision {revision!r}: name a branch, a tag or a full commit"
    if isinstance(error, HFValidationError):
        return f"{repo!r} is neither a folder here nor a repo id of the Hub (owner/name)"
    if getattr(error, "snapshot_path", None) is not None:
        return (
            f"{repo}: the Hub cannot be reached and the cached copy is incomplete: "
            "connect and run again to complete it"
        )
    if (status := _status(error)) is not None:
        if status == 401:
            return f"{repo}: the Hub refused the login (401): {_LOG_IN} with a valid token"
        return f"{repo}: the Hub answered with HTTP status {status}: try again later"
    if _errno(error) == errno.ENOSPC:
        return f"{repo}: the disk filled up during the download: make room and run again"
    if isinstance(error, PermissionError):
        return f"{repo}: no permission to write {error.filename}: set HF_HOME to your own folder"
    cause = type(error.__cause__ or error).__name__
    return (
        f"{repo}: no such folder here, the Hub cannot be reached ({cause}) and its cache holds no "
        "complete copy: connect, or give a local folder"
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__


def _status(error: Exception) -> int | None:
    """Find the HTTP status that caused `error`, if the Hub answered at all."""
    for cause in _chain(error):
        if isinstance(cause, HfHubHTTPError) and cause.response is not None:
            return int(cause.response.status_code)
    return None


def _errno(error: Exception) -> int | None:
    for cause in _chain(error):
        if isinstance(cause, OSError) and cause.errno is not None:
            return cause.errno
    return None
