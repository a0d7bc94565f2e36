"""Evaluation: a bundle against its source on held-out text, with generation semantics.

Every figure says what it is against: `kl` is the mean KL divergence of the bundle's next-token
distribution from the source's (exact cache), `kl_cache` from that of the same packed weights with
an exact cache, so that weights and cache can be judged apart.
"""

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from velox_pack import known_sources
from velox_pack.architectures import positions
from velox_pack.caches import recipes
from velox_pack.caches.plan import ModelPlan
from velox_pack.calibrators.text import load_text
from velox_pack.card import with_measured
from velox_pack.door import cache_plan
from velox_pack.environment import describe, fast_dtype
from velox_pack.loader import load_model
from velox_pack.manifests.bundle import Bundle, open_bundle, write_measured
from velox_pack.manifests.errors import BundleError, CalibrationError, VeloxError
from velox_pack.manifests.files import locate
from velox_pack.manifests.manifest import VERSION, Layer
from velox_pack.onepass import OnePassCache
from velox_pack.samples import sample
from velox_pack.sizes import GENERATED, PROMPT, cache_bytes
from velox_pack.source import Source, data_folder

Report = Callable[[str], None]
WINDOW = 512


@dataclass
class Score:
    """Sums over scored positions of one way to run the model, against one reference."""

    kl: list[np.ndarray] = field(default_factory=list)
    agree: list[np.ndarray] = field(default_factory=list)
    loss: list[np.ndarray] = field(default_factory=list)

    def add(self, reference: mx.array, logits: mx.array, targets: mx.array) -> None:
        """Add one window: logits [T, V] float32 of both, targets [T]."""
        q = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        p = reference - mx.logsumexp(reference, axis=-1, keepdims=True)
        kl = mx.sum(mx.exp(p) * (p - q), axis=-1)
        agree = reference.argmax(-1) == logits.argmax(-1)
        loss = -mx.take_along_axis(q[:-1], targets[1:, None], axis=-1)[:, 0]
        mx.eval(kl, agree, loss)
        self.kl.append(np.array(kl))
        self.agree.append(np.array(agree))
        self.loss.append(np.array(loss))

    def result(self) -> dict[str, float]:
        """Mean KL in nats, its standard error, top-1 agreement, perplexity."""
        kl = np.concatenate(self.kl).astype(np.float64)
        loss = np.concatenate(self.loss).astype(np.float64)
        return {
            "kl": float(kl.mean()),
            "kl_standard_error": float(kl.std() / np.sqrt(kl.size)),
            "top1_agreement": float(np.concatenate(self.agree).mean()),
            "perplexity": float(np.exp(loss.mean())),
        }


def one_pass(
    model: nn.Module, tokens: mx.array, layers: tuple[Layer, ...], plan: ModelPlan | None
) -> mx.array:
    """Logits float32 [L, V] of a text as decoding it token by token with `plan` would give them."""
    caches = make_prompt_cache(model)
    for layer in layers:
        if plan is not None and layer.index in plan.layers and layer.cache_index is not None:
            caches[layer.cache_index] = OnePassCache(plan.layers[layer.index])
    logits: mx.array = model(tokens[None], cache=caches)[0].astype(mx.float32)
    mx.eval(logits)
    return logits


def evaluate(
    path: str | Path,
    *,
    text: str | Path | None = None,
    tokens: int = 2048,
    source: str | Path | None = None,
    write: bool = True,
    report: Report | None = None,
) -> dict[str, Any]:
    """Measure a bundle, write the result into its manifest and give it back.

    Args:
        path: bundle folder.
        text: held-out text; by default the built-in one, which no calibration sees.
        tokens: how many tokens to score, in windows of 512.
        source: where the source model lies, if it is a local folder that was moved.
        write: put the result into velox.json and the card.
        report: told what is going on, a line at a time.

    Raises VeloxError for a damaged bundle, a missing source or unusable text.
    """
    say = report or (lambda line: None)
    if tokens < 2:
        raise CalibrationError(f"{tokens} tokens cannot be scored: give at least 2")
    bundle = open_bundle(path)
    if write:
        _require_writable(bundle)
    file = data_folder() / "text" / "heldout.txt" if text is None else Path(text).expanduser()
    content = _read(file)
    say("looking for the source")
    original = known_sources.find(bundle.manifest.source, source)
    windows = _windows(original, content, tokens)
    dtype = fast_dtype()
    say("loading the source and the bundle")
    reference_model = _source_model(original, dtype)
    start = time.perf_counter()
    model, _ = load_model(bundle, cache="none", dtype=dtype)
    seconds = time.perf_counter() - start
    layers = tuple(bundle.manifest.model.layers)
    ready, unready = _by_readiness(bundle)
    plans = {name: cache_plan(bundle, name) for name in ready}
    against_source: dict[str, Score] = {name: Score() for name in ("source", "weights", *plans)}
    against_exact: dict[str, Score] = {name: Score() for name in plans}
    for number, ids in enumerate(windows):
        say(f"window {number + 1} of {len(windows)}: {ids.size} tokens, {1 + len(plans)} ways")
        row = mx.array(ids)
        reference = one_pass(reference_model, row, layers, None)
        against_source["source"].add(reference, reference, row)
        exact = one_pass(model, row, layers, None)
        against_source["weights"].add(reference, exact, row)
        for name, plan in plans.items():
            logits = one_pass(model, row, layers, plan)
            against_source[name].add(reference, logits, row)
            against_exact[name].add(exact, logits, row)
    result: dict[str, Any] = {
        "text": "built-in held-out" if text is None else file.name,
        "text_sha256": hashlib.sha256(content.encode()).hexdigest(),
        "tokens": int(windows.size),
        "window": int(windows.shape[1]),
        "tokens_held": PROMPT + GENERATED,
        "environment": describe() | {"dtype": str(dtype).removeprefix("mlx.core.")},
        "load_seconds": round(seconds, 3),
        "source": {"perplexity": against_source["source"].result()["perplexity"]},
        "weights": against_source["weights"].result(),
        "caches": {},
    }
    if unready:
        say(f"not measured, since they cannot be loaded yet: {', '.join(unready)}")
        result["not_measured"] = unready
    for name, plan in plans.items():
        scored = against_source[name].result()
        scored["kl_cache"] = against_exact[name].result()["kl"]
        result["caches"][name] = scored | _bytes(layers, plan)
    if write:
        write_measured(path, result, _card(bundle, result))
    return result


def _require_writable(bundle: Bundle) -> None:
    """Before the work, not after it. Raises BundleError."""
    if not os.access(bundle.path, os.W_OK):
        raise BundleError(f"{bundle.path}: cannot be written to, and the result goes in there")
    if bundle.manifest.version > VERSION:
        raise BundleError(
            f"{bundle.path}: is of a newer format, only read here; upgrade velox-pack"
        )


def _by_readiness(bundle: Bundle) -> tuple[list[str], list[str]]:
    """Names of the plans that can be loaded, and of those that are only prepared."""
    parsed = {plan.name: recipes.parse(plan.recipe) for plan in bundle.manifest.caches}
    ready = [name for name, plan in parsed.items() if not plan.missing]
    return ready, [name for name in parsed if name not in ready]


def _read(file: Path) -> str:
    try:
        return load_text(file)
    except CalibrationError as error:  # here the text is not one to calibrate on
        raise CalibrationError(str(error).removeprefix("calibration ")) from error


def _card(bundle: Bundle, result: dict[str, Any]) -> dict[str, bytes]:
    """The bundle's card with the result in it, if it has a card."""
    try:
        text = locate(bundle.path, "README.md").read_text("utf-8")
    except (BundleError, OSError, ValueError):
        return {}
    return {"README.md": with_measured(text, result).encode()}


def _bytes(layers: tuple[Layer, ...], plan: ModelPlan | None) -> dict[str, Any]:
    if plan is None:
        raise VeloxError("a plain cache has no plan to count")
    found = cache_bytes(layers, plan)
    return {
        "state_bytes": found.state,
        "constant_bytes": found.constants,
        "plain_bytes": found.plain,
        "bytes_per_token": found.state / (PROMPT + GENERATED),
        "bits_per_element": found.bits_per_element,
        "bits_with_constants": found.bits_with_constants,
    }


def _source_model(source: Source, dtype: mx.Dtype) -> nn.Module:
    model = source.skeleton()
    model.load_weights(list(source.weights().items()), strict=True)
    model.set_dtype(dtype)
    mx.eval(model.parameters())
    return model


def _windows(source: Source, text: str, tokens: int) -> np.ndarray:
    """Windows int32 [n, length] from stretches spread over the text: every kind in it counts."""
    length = min(WINDOW, positions(source.config) or WINDOW, tokens)
    hint = "see --text and --tokens"
    return sample(source.tokenizer(), text, tokens, length, seed=0, name="the text", hint=hint)
