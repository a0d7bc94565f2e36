"""Where local source models lie on this machine, so that `eval` finds them again.

A bundle never names a local path: it is for sharing. This small index in the user's cache folder
does, keyed by what the source's files hash to.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from velox_pack.manifests.errors import SourceError
from velox_pack.manifests.manifest import Source as SourceRecord
from velox_pack.source import DEMO, Source, resolve


def _folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "velox-pack" / "sources"


def _key(hashes: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(dict(sorted(hashes.items()))).encode()).hexdigest()


def remember(source: Source, hashes: Mapping[str, str]) -> None:
    """Note where a local source lies; a cache folder that cannot be written is no error."""
    if source.kind == "local":
        with suppress(OSError, RuntimeError):  # RuntimeError: a user without a home
            _folder().mkdir(parents=True, exist_ok=True)
            path = str(source.path.resolve())
            (_folder() / f"{_key(hashes)}.json").write_text(json.dumps({"path": path}))


def find(record: SourceRecord, given: str | Path | None = None) -> Source:
    """The source that a bundle was made from; `given` overrides where to look.

    Raises SourceError if it cannot be found, or is not the same model.
    """
    if given is not None:
        source = resolve(str(given))
    elif record.kind == "demo":
        source = resolve(DEMO)
    elif record.repo is not None:
        source = resolve(record.repo, record.revision)
    else:
        source = resolve(_remembered(record))
    config = source.hashes().get("config.json")
    if config != record.files.get("config.json") or source.hashes() != record.files:
        raise SourceError(
            f"{source.path} is not the model that the bundle was made from ({record.name}); "
            "pass the right one as --source"
        )
    return source


def _remembered(record: SourceRecord) -> str:
    try:
        entry = json.loads((_folder() / f"{_key(record.files)}.json").read_text())
        path = str(entry["path"])
    except (OSError, RuntimeError, ValueError, KeyError, TypeError):
        path = ""
    if not path or not Path(path).is_dir():
        raise SourceError(
            f"the bundle was made from the local folder {record.name}, which is not known here; "
            "pass it as --source"
        )
    return path
