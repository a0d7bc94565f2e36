"""The job of one conversion: all that can be checked before anything slow starts."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from velox_pack import weights as weight_plans
from velox_pack.architectures import positions
from velox_pack.caches import grammar, recipes
from velox_pack.caches.needs import Need
from velox_pack.calibrators.text import load_text, whole_tiles
from velox_pack.calibrators.trace import LayerTrace, refuse_if_uncovered, trace
from velox_pack.fits import FITS
from velox_pack.manifests.aligned import TensorSpec
from velox_pack.manifests.errors import CalibrationError, RecipeError, SourceError
from velox_pack.manifests.files import require_space
from velox_pack.manifests.manifest import Layer
from velox_pack.manifests.names import check_name
from velox_pack.manifests.place import check_destination
from velox_pack.rehearsal import Rehearsed, rehearse
from velox_pack.reuse import Old
from velox_pack.ropes import rope_groups
from velox_pack.samples import sample
from velox_pack.source import Source, data_folder, resolve

Report = Callable[[str], None]

DEFAULT_CACHES = ("ratequant+joint-spectral",)
DEFAULT_TOKENS = 8192
SEQUENCE = 512
FEWEST = 16  # coded tokens in a sequence, below which there is nothing to measure
BUILT_IN = "built-in"  # the name of our own text
SMALL_FILES = 64 * 2**20  # room kept for the tokenizer, artifacts and padding


@dataclass(frozen=True)
class Text:
    """The calibration text, tokenized: `tokens` int32 [sequences, length]."""

    name: str
    sha256: str
    tokens: np.ndarray


@dataclass(frozen=True)
class Job:
    """A conversion that has passed every cheap check.

    `layers` describes each layer of the model; `specs` are the tensors to be stored, `packing`
    says which modules become codes and which are kept and why; `source_bytes` is what the
    source's parameters take.
    """

    source: Source
    out: Path
    overwrite: bool
    seed: int
    weights: weight_plans.WeightPlan
    caches: tuple[tuple[str, recipes.Plan], ...]
    traces: tuple[LayerTrace, ...]
    layers: tuple[Layer, ...]
    text: Text | None
    packing: weight_plans.Packing
    specs: dict[str, TensorSpec]
    source_bytes: int
    old: Old | None = None

    @property
    def weight_bytes(self) -> int:
        """Bytes of parameters to be stored."""
        return sum(spec.nbytes for spec in self.specs.values())

    @property
    def needs(self) -> list[Need]:
        """Everything to be calibrated, once each: what plans need, and filters where text is run.

        The rope tables are always there, since the manifest's layers name them.
        """
        found = [Need("rope"), *(n for _, plan in self.caches for n in plan.needs)]
        if self.text is not None:
            found.append(Need("qfilters"))
        return list(dict.fromkeys(found))

    @property
    def captures(self) -> bool:
        """Whether the model has to be run over calibration text."""
        return self.text is not None

    @property
    def warnings(self) -> list[str]:
        """What will be as asked for, and probably not as hoped for: a line each."""
        name, plan = self.caches[0]
        if not plan.missing:
            return []
        return [
            f"the default cache {grammar.short(name)} is prepared only ({plan.missing} yet): "
            'loading has to name another plan, or "none"; the first --cache is the default'
        ]

    def summary(self) -> dict[str, Any]:
        """What will be done, what is left out and why, as plain data."""
        text = self.text
        return {
            "source": self.source.repo or self.source.name,
            "revision": self.source.revision,
            "out": str(self.out),
            "weights": grammar.write(self.weights.encoding, self.weights),
            "weight_bytes": self.weight_bytes,
            "source_weight_bytes": self.source_bytes,
            "caches": [name for name, _ in self.caches],
            "later": [name for name, plan in self.caches if plan.missing],
            "warnings": self.warnings,
            "coverage": {"weights": self._weight_coverage(), "caches": self._cache_coverage()},
            "kept": [{"path": path, "reason": reason} for path, reason in self.packing.kept],
            "calibration": None
            if text is None
            else {
                "text": text.name,
                "tokens": int(text.tokens.size),
                "length": int(text.tokens.shape[1]),
            },
        }

    def _weight_coverage(self) -> str:
        """What is packed; for a source that is quantized already, that it is."""
        line = self.packing.coverage()
        found = len(self.source.native_quantized)
        quantized = found and self.packing.selection is None
        return f"{line}, {found} modules of them quantized already" if quantized else line

    def _cache_coverage(self) -> str:
        """`3 of 18 layers cached by velox-pack; left to mlx-lm 15: reason`."""
        reasons: dict[str, int] = {}
        for layer in self.layers:
            if not layer.covered:
                reason = layer.reason or "no reason known"
                reasons[reason] = reasons.get(reason, 0) + 1
        covered = sum(layer.covered for layer in self.layers)
        left = "".join(f"; left to mlx-lm {n}: {why}" for why, n in reasons.items())
        return f"{covered} of {len(self.layers)} layers cached by velox-pack{left}"


def plan(
    source: str | Path,
    out: str | Path,
    *,
    revision: str | None = None,
    caches: Sequence[str] = (),
    weights: str | None = None,
    calibration: str | Path | None = None,
    calibration_tokens: int = DEFAULT_TOKENS,
    seed: int = 0,
    overwrite: bool = False,
    reuse: str | Path | None = None,
    report: Report | None = None,
) -> Job:
    """Check a conversion and say what it would do; reads headers and configuration alone.

    Args:
        source: `demo`, a folder in the Hub's layout, or a repo id of the Hub.
        out: folder of the new bundle.
        revision: branch, tag or commit of a Hub repo.
        caches: cache recipes; the first is the default of the bundle.
        weights: keep, overlay, lloyd:bits=4 or affine:bits=4,group=64; by default the last one, and
            keep for a source that is quantized already.
        calibration: UTF-8 text to calibrate on, by default a built-in one. It is used even if no
            recipe needs it: filters for eviction come from it too.
        calibration_tokens: how many tokens of it are run through the model.
        seed: of every random choice.
        overwrite: replace an existing bundle.
        reuse: a bundle whose artifacts are taken over where they would come out the same.
        report: told what is going on, a line at a time.

    Raises SourceError, CalibrationError, RecipeError or BundleError, one line each.
    """
    source = str(source)
    weight_plan = weight_plans.parse(weight_plans.DEFAULT if weights is None else weights)
    plans = _parse_caches(caches or DEFAULT_CACHES)
    out = Path(out).expanduser()
    check_destination(out, overwrite=overwrite)
    old = None if reuse is None else Old.open(reuse)
    needs_text = any(p.ratequant or any(FITS[n.name].reads for n in p.needs) for _, p in plans)
    content = _read_text(calibration) if needs_text or calibration is not None else None
    found = resolve(source, revision, report=report)
    if isinstance(weight_plan, weight_plans.Overlay) and found.kind != "hub":
        raise RecipeError(
            f"--weights overlay needs a Hub repo that others can fetch; {source} is "
            f"{'built in' if found.kind == 'demo' else 'a local folder'}; use keep"
        )
    found.check_weights()
    _check_names(found)
    if weights is None and found.native_quantized:
        weight_plan = weight_plans.Keep()
    model = found.skeleton()
    traces = tuple(trace(model))
    refuse_if_uncovered(traces)
    layers = _describe(traces)
    if not any(layer.covered for layer in layers):
        raise SourceError(f"{found.name}: {layers[0].reason}; there is no cache to compress")
    _check_recipes(plans, layers)
    packing = weight_plans.choose(model, weight_plan)
    arrays = found.weights()
    specs = weight_plans.specs_of(arrays, packing)
    require_space(out.parent, sum(s.nbytes for s in specs.values()) + SMALL_FILES)
    text = None
    if content is not None:
        name = BUILT_IN if calibration is None else Path(calibration).name
        longest = min(SEQUENCE, positions(found.config) or SEQUENCE)
        length = whole_tiles(min(longest, calibration_tokens))
        _check_length(plans, length, longest)
        _check_passes(plans, found.name, rehearse(model))
        text = _tokenize(found, name, content, calibration_tokens, length, seed)
    return Job(
        source=found,
        out=out,
        overwrite=overwrite,
        seed=seed,
        weights=weight_plan,
        caches=plans,
        traces=traces,
        layers=layers,
        text=text,
        packing=packing,
        specs=specs,
        source_bytes=sum(array.nbytes for array in arrays.values()),
        old=old,
    )


def _check_names(source: Source) -> None:
    for file in source.copy_list():
        if problems := check_name(file.name):
            raise SourceError(f"{source.name}: {problems[0]}; rename or remove it")


def _parse_caches(texts: Sequence[str]) -> tuple[tuple[str, recipes.Plan], ...]:
    plans: dict[str, recipes.Plan] = {}
    for text in texts:
        plan = recipes.parse(text)
        if plan.canonical in (other.canonical for other in plans.values()):
            again = f"--cache {grammar.short(text)} is given twice (it is {plan.canonical})"
            raise RecipeError(again)
        plans["".join(text.split())] = plan
    return tuple(plans.items())


def _describe(traces: Sequence[LayerTrace]) -> tuple[Layer, ...]:
    """Layers as the manifest has them; sliding ones keep mlx-lm's own cache, which is bounded."""
    ropes = rope_groups([t for t in traces if t.covered and t.attention == "full"])
    layers = []
    for t in traces:
        covered, reason = t.covered, t.reason
        if covered and t.attention != "full":
            covered, reason = False, f"sliding window of {t.window} tokens: its cache is bounded"
        rope = next((name for name, group in ropes.items() if t in group), None)
        layers.append(
            Layer(
                index=t.index,
                attention=t.attention,
                heads=t.heads,
                kv_heads=t.kv_heads,
                k_dim=t.k_dim,
                v_dim=t.v_dim,
                window=t.window,
                rope=rope,
                routed=t.routed,
                covered=covered,
                reason=reason,
                cache_index=t.cache_index,
            )
        )
    return tuple(layers)


def _check_recipes(plans: Sequence[tuple[str, recipes.Plan]], layers: Sequence[Layer]) -> None:
    for name, plan in plans:
        for layer in layers:
            if layer.covered:
                try:
                    plan.recipe.check(layer)
                except RecipeError as error:
                    where = f"--cache {grammar.short(name)}, layer {layer.index}"
                    raise RecipeError(f"{where}: {error}") from None


def _check_length(plans: Sequence[tuple[str, recipes.Plan]], length: int, longest: int) -> None:
    """Refuse sequences in which too few tokens would be coded for a plan to be calibrated.

    No sequence is of more than `longest` tokens, however many are asked for.
    """
    for name, plan in plans:
        recipe = plan.recipe
        needed = FEWEST
        # Sensitivities count what queries see from behind the window, so some must be there.
        if plan.behind is not None:
            needed += recipe.sinks + recipe.window + recipe.flush
        if length < needed:
            more = "give more --calibration-tokens or " if needed <= longest else ""
            raise CalibrationError(
                f"--cache {grammar.short(name)} needs calibration sequences of at least {needed} "
                f"tokens, these have {length}; {more}take a smaller window"
            )


def _check_passes(plans: Sequence[tuple[str, recipes.Plan]], model: str, found: Rehearsed) -> None:
    """Refuse what the passes over the text would refuse, after hours perhaps."""
    if found.forward:
        raise CalibrationError(
            f"{model}: {found.forward}: it cannot be run a sequence at a time, so nothing can be "
            "calibrated on a text; take caches that need none, such as --cache turboquant-mse"
        )
    for name, plan in plans:
        if found.backward and plan.behind is not None:
            uniform = replace(plan, ratequant=False)
            plain = name.replace(f"{recipes.RATEQUANT}+", "").replace(f"+{recipes.RATEQUANT}", "")
            instead = plain if plan.ratequant and uniform.behind is None else "spectral"
            raise CalibrationError(
                f"--cache {grammar.short(name)} needs sensitivities, which cannot be found in "
                f"{model}: {found.backward}; take --cache {grammar.short(instead)}"
            )


def _read_text(path: str | Path | None) -> str:
    built_in = data_folder() / "text" / "calibration.txt"
    return load_text(built_in if path is None else Path(path).expanduser())


def _tokenize(source: Source, name: str, text: str, tokens: int, length: int, seed: int) -> Text:
    rows = sample(
        source.tokenizer(),
        text,
        tokens,
        length,
        seed=seed,
        name=f"the {name} text" if name == BUILT_IN else f"calibration text {name}",
        hint="ask for fewer --calibration-tokens, or give a longer text as --calibration",
    )
    return Text(name, hashlib.sha256(text.encode()).hexdigest(), rows)
