"""Source models: `demo`, a folder in the Hub's layout, or a repo of the Hub.

A `Source` gives the model as mlx-lm would load it (same classes, same sanitizing, same handling of
quantized checkpoints), but in two halves: a skeleton whose parameters are never evaluated, and
weights that stay on disk until somebody asks for one of them.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm import utils as mlx_lm_utils

from velox_pack.architectures import check_config, explain_missing_config
from velox_pack.fetch import Report, fetch, list_files
from velox_pack.manifests.aligned import read_header
from velox_pack.manifests.errors import SourceError, VeloxError

DEMO = "demo"

# What mlx-lm downloads, without Python files (never executed here); licences and the card's front
# matter travel into the bundle, so they are asked for too.
TEXT_PATTERNS = (
    "*.json",
    "*.jsonl",
    "*.jinja",
    "*.txt",
    "*.tiktoken",
    "tokenizer.model",
    "tiktoken.model",
)
LICENCE_PATTERNS = ("LICEN[CS]E*", "NOTICE*", "USE_POLICY*", "README.md")
WEIGHT_PATTERN = "model*.safetensors"

# Carried into a bundle as they are.
TOKENIZER_FILES = (
    "tokenizer*.json",
    "tokenizer*.jinja",
    "tokenizer.model",
    "tiktoken.model",
    "*.tiktoken",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.*",
)
OTHER_FILES = ("generation_config.json", "LICEN[CS]E*", "NOTICE*", "USE_POLICY*")


def data_folder() -> Path:
    """Return the folder of the package's own data: `demo/` (a model) and `text/`."""
    return Path(__file__).parent / "data"


def resolve(source: str, revision: str | None = None, *, report: Report | None = None) -> "Source":
    """Find a source model and check all that its configuration alone can tell.

    Args:
        source: `demo`, a folder in the Hub's layout (`./demo` for one of that name), or a repo id.
        revision: branch, tag or commit; for repos of the Hub only.
        report: told in words what is about to be downloaded.

    Raises:
        SourceError: cannot be found or fetched, is no causal language model that mlx-lm knows, has
            no safetensors, wants Python of its own executed, or is itself a bundle.
    """
    if not source or "\0" in source or len(source) > 4096:
        raise SourceError(f"{source!r:.80} is neither a folder here nor a repo id of the Hub")
    folder = Path(source).expanduser()
    if source == DEMO or folder.exists() or _is_path(source):
        if revision is not None:
            raise SourceError(f"{source}: a revision belongs to a repo of the Hub, not to a folder")
        path = data_folder() / DEMO if source == DEMO else folder
        kind: Literal["demo", "local"] = "demo" if source == DEMO else "local"
        name = DEMO if source == DEMO else os.path.basename(os.path.abspath(folder)) or "model"
        return _finish(Source(kind, name, None, None, path, _read_config(path, source)), source)
    path = fetch(source, revision, TEXT_PATTERNS, optional=LICENCE_PATTERNS, report=report)
    commit = path.name
    if not (path / "config.json").is_file():
        raise SourceError(explain_missing_config(source, list_files(source, commit)))
    found = Source("hub", source.split("/")[-1], source, commit, path, _read_config(path, source))
    check_config(source, found.config, _names(path))  # before gigabytes of weights travel
    # By name again: without network the client then looks at the cache alone, without retries.
    if fetch(source, revision, [WEIGHT_PATTERN], report=report) != path:  # the branch has moved on
        fetch(source, commit, [WEIGHT_PATTERN], report=report)
    return _finish(found, source)


@dataclass(frozen=True)
class Source:
    """A model to convert. `path` is a folder in the Hub's layout with all its files on disk.

    Attributes:
        kind: where it came from.
        name: short name for people, e.g. `Qwen2.5-0.5B-Instruct`.
        repo: repo id on the Hub, None unless `kind` is `hub`.
        revision: resolved commit (40 hex digits), None unless `kind` is `hub`.
        path: the folder.
        config: `config.json` exactly as it stands in the folder.
    """

    kind: Literal["hub", "local", "demo"]
    name: str
    repo: str | None
    revision: str | None
    path: Path
    config: Mapping[str, Any] = field(repr=False, compare=False)

    @property
    def weight_files(self) -> tuple[Path, ...]:
        """The files that mlx-lm would load: `model*.safetensors`, sorted by name."""
        return tuple(sorted(self.path.glob(WEIGHT_PATTERN)))

    def copy_list(self) -> tuple[Path, ...]:
        """Tokenizer, chat template, generation and licence files, to be carried into a bundle."""
        return _matching(self.path, (*TOKENIZER_FILES, *OTHER_FILES))

    def hashes(self) -> dict[str, str]:
        """Give {file name: sha256 in hex} of configuration, tokenizer and weights; read once."""
        return dict(self._hashes)

    @cached_property
    def _hashes(self) -> dict[str, str]:
        tokenizer = _matching(self.path, TOKENIZER_FILES)
        paths = {self.path / "config.json", *tokenizer, *self.weight_files}
        digests = {}
        for path in sorted(paths):
            with path.open("rb") as stream:
                digests[path.name] = hashlib.file_digest(stream, "sha256").hexdigest()
        return digests

    def skeleton(self) -> nn.Module:
        """Build mlx-lm's model of this configuration, its quantized layers in place.

        Its parameters have the right shapes and placeholder values that are never evaluated.
        """
        return self._load()[0]

    def weights(self) -> dict[str, mx.array]:
        """Open all weights anew: lazy arrays, named and sanitized as `skeleton` takes them.

        Every call opens the files again, so dropping the result frees what was read through it.
        """
        return self._load()[1]

    def mlx_config(self) -> dict[str, Any]:
        """Return the configuration as mlx-lm leaves it after loading.

        It has the end tokens of `generation_config.json` and, where mlx-lm translated packed
        weights (AWQ, GPTQ, MXFP4, ...), the `quantization` that describes the result.
        """
        return self._load()[2]

    @cached_property
    def native_quantized(self) -> dict[str, dict[str, Any]]:
        """Modules that come quantized: {path: {bits, group_size, mode}}; empty for plain models."""
        return {
            path: {"bits": m.bits, "group_size": m.group_size, "mode": getattr(m, "mode", "affine")}
            for path, m in self.skeleton().named_modules()
            if "scales" in m and hasattr(m, "bits") and hasattr(m, "group_size")
        }

    def check_weights(self) -> None:
        """Check, on the files' headers alone, that the weights are exactly what the model wants.

        Raises:
            SourceError: a header is damaged, a shard is truncated or missing, a tensor is missing,
                superfluous, twice there, of the wrong shape, or still packed; names the tensors.
        """
        model, weights, _ = self._load()
        wanted = dict(tree_flatten(model.parameters()))
        problems = {
            "missing": [n for n in wanted if n not in weights],
            "not wanted by the model": [n for n in weights if n not in wanted],
            "of the wrong shape": [
                f"{n} {weights[n].shape}, not {p.shape}"
                for n, p in wanted.items()
                if n in weights and weights[n].shape != p.shape
            ],
            "packed in a way mlx-lm does not decode": [
                f"{n} ({weights[n].dtype})"
                for n, p in wanted.items()
                if n in weights and p.ndim > 1 and _is_float(p) and not _is_float(weights[n])
            ],
        }
        if told := [f"{what}: {_some(names)}" for what, names in problems.items() if names]:
            raise SourceError(f"{self.name}: weights {'; '.join(told)}")

    def check_finite(self) -> None:
        """Read all weights, one at a time, and refuse NaN and infinity.

        Raises:
            SourceError: names the tensor.
        """
        weights = self.weights()
        for name in sorted(weights):
            check_finite(name, weights.pop(name))

    def tokenizer(self) -> Any:
        """Load the tokenizer as mlx-lm does (its `TokenizerWrapper`).

        Raises:
            SourceError: no tokenizer files, damaged ones, or one that wants its own Python run.
        """
        if not _matching(self.path, TOKENIZER_FILES):
            raise SourceError(f"{self.name}: no tokenizer in {self.path}: add tokenizer.json")
        ends = mlx_lm_utils.load_config(self.path).get("eos_token_id")
        try:
            found = mlx_lm_utils.load_tokenizer(self.path, {"trust_remote_code": False}, ends)
            # More text is encoded than the model is given: no reason to warn anybody.
            found._tokenizer.model_max_length = 1 << 62
            return found
        except Exception as error:  # transformers raises nearly anything
            why = _first_line(error)
            if "trust_remote_code" in str(error):
                why = "it asks for the repo's own Python to be executed, which is never done"
            raise SourceError(f"{self.name}: the tokenizer cannot be loaded: {why}") from error

    @cached_property
    def _sound_headers(self) -> bool:
        _check_headers(self.path, self.weight_files)
        return True

    def _load(self) -> tuple[nn.Module, dict[str, mx.array], dict[str, Any]]:
        """Run mlx-lm's own loader, but catch the weights on their way into the model."""
        _ = self._sound_headers  # mx.load trusts a header: one that lies can crash the process
        caught: dict[str, mx.array] = {}

        def classes(config: dict[str, Any]) -> tuple[type[nn.Module], type]:
            model_class, args_class = mlx_lm_utils._get_classes(config)

            def load_weights(self: nn.Module, items: list[Any], strict: bool = True) -> nn.Module:
                caught.update(items)
                self.__class__ = model_class
                return self

            catcher = type(model_class.__name__, (model_class,), {"load_weights": load_weights})
            return catcher, args_class

        try:
            model, config = mlx_lm_utils.load_model(self.path, lazy=True, get_model_classes=classes)
        except Exception as error:  # each architecture fails in its own way on a bad config
            raise SourceError(
                f"{self.name}: mlx-lm cannot build this model: {_first_line(error)}"
            ) from error
        weights = dict(caught)
        caught.clear()  # the class above is a reference cycle, and must not keep what is read
        return model, weights, config


def check_finite(name: str, array: mx.array) -> None:
    """Refuse NaN and infinity in a weight; integer arrays (packed codes) pass. Evaluates `array`.

    Raises:
        SourceError: names the tensor.
    """
    if _is_float(array) and not mx.isfinite(array).all().item():
        bad = (~mx.isfinite(array)).sum().item()
        raise SourceError(f"{name}: {bad} of {array.size} weights are NaN or infinite")


def _finish(source: Source, said: str) -> Source:
    names = _names(source.path)
    if source.repo is not None and not source.weight_files:
        names = sorted({*names, *list_files(source.repo, source.revision)})
    check_config(said, source.config, names)
    if not source.weight_files:
        others = [n for n in names if n.endswith((".bin", ".pt", ".pth", ".gguf", ".safetensors"))]
        found = f", only {_some(others)}: convert to safetensors first" if others else ""
        raise SourceError(f"{said}: no model*.safetensors{found}")
    return source


def _is_path(source: str) -> bool:
    return source.startswith((".", "/", "~")) or source.count("/") > 1 or "\\" in source


def _read_config(path: Path, said: str) -> dict[str, Any]:
    if not path.exists():
        raise SourceError(f"{said}: no such folder")
    if not path.is_dir():
        raise SourceError(f"{said}: not a folder: give the folder that holds config.json")
    if not (path / "config.json").is_file():
        raise SourceError(explain_missing_config(said, _names(path)))
    try:
        config = json.loads((path / "config.json").read_bytes())
    except (ValueError, OSError, RecursionError) as error:
        raise SourceError(f"{said}: config.json cannot be read: {_first_line(error)}") from error
    if not isinstance(config, dict):
        raise SourceError(f"{said}: config.json holds no object")
    return config


def _check_headers(path: Path, shards: tuple[Path, ...]) -> None:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        named: set[str] = set()
        with suppress(ValueError, AttributeError, TypeError):
            named = set(json.loads(index.read_bytes())["weight_map"].values())
        if absent := sorted(named - {s.name for s in shards}):
            raise SourceError(f"{path.name}: shards missing: {_some(absent)}")
    holder: dict[str, str] = {}
    for shard in shards:
        try:
            header = read_header(shard)
        except (VeloxError, ValueError, OSError) as error:
            line = _first_line(error)
            line = line if str(path) in line else f"{path.name}: {line}"
            raise SourceError(line) from error
        for name in header:
            if name in holder:
                both = f"{holder[name]} and {shard.name}"
                raise SourceError(f"{path.name}: {_some([name])} is both in {both}")
            holder[name] = shard.name


def _names(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir())


def _matching(path: Path, patterns: tuple[str, ...]) -> tuple[Path, ...]:
    return tuple(sorted({p for g in patterns for p in path.glob(g) if p.is_file()}))


def _is_float(array: mx.array) -> bool:
    return bool(mx.issubdtype(array.dtype, mx.floating))


def _some(names: list[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    shown = (n if n.isprintable() else ascii(n) for n in names[:most])
    return ", ".join(f"{n:.120}" for n in shown) + more


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
