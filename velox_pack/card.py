"""The bundle's README.md: what it is and how to use it, nothing that was not measured."""

import json
from collections.abc import Mapping
from typing import Any

from velox_pack.caches import recipes
from velox_pack.door import NO_CACHE
from velox_pack.manifests.manifest import Manifest

# `eval` writes between these lines and nowhere else, so that a card may be edited.
BEGIN, END = "<!-- velox-pack eval -->", "<!-- end of eval -->"


def card(manifest: Manifest, licence: Mapping[str, str] | None = None) -> str:
    """Markdown of a fresh bundle's card; `licence` has the source's own licence fields."""
    source = manifest.source
    front = [f"{key}: {json.dumps(value)}" for key, value in (licence or {}).items()]
    if source.repo:
        front += [f"base_model: {source.repo}", "base_model_relation: quantized"]
    front += ["library_name: mlx", "pipeline_tag: text-generation", "tags:", "- mlx"]
    weights = manifest.weights
    options = ",".join(f"{k}={v}" for k, v in sorted(weights.parameters.items()))
    what = f"{weights.encoding}{f' ({options})' if options else ''}"
    lines = ["---", *front, "- velox-pack", "---", ""]
    lines += [f"# {source.name}, prepared with velox-pack", ""]
    ready = [c.name for c in manifest.caches if not recipes.parse(c.recipe).missing]
    named = ""
    if manifest.default_cache not in (None, *ready):  # then loading it is refused
        named = f", cache={json.dumps(next(iter(ready), NO_CACHE))}"
    lines += [
        "```python",
        "import mlx_lm, velox_pack",
        f'model, tokenizer = velox_pack.load("path or repo of this bundle"{named})',
        'print(mlx_lm.generate(model, tokenizer, prompt="..."))',
        "```",
        "",
        f"- weights: {what}, {len(weights.packed)} linear layers packed",
        f"- caches: {', '.join(f'`{c}`' for c in ready) or 'none'}",
    ]
    if later := [f"`{c.name}`" for c in manifest.caches if c.name not in ready]:
        lines.append(f"- prepared only, cannot be loaded yet: {', '.join(later)}")
    if manifest.calibration:
        text = manifest.calibration
        lines.append(f"- calibrated on {text.tokens} tokens of {_named(text.text)}")
    lines += ["", "`velox-pack verify` checks every byte, `velox-pack eval` measures quality."]
    return "\n".join([*lines, "", BEGIN, END, ""])


def with_measured(text: str, measured: Mapping[str, Any]) -> str:
    """The card with what `eval` measured between its two lines; as it is if they are gone."""
    before, begin, rest = text.partition(f"{BEGIN}\n")
    _, end, after = rest.partition(f"{END}\n")
    return f"{before}{begin}{_table(measured)}{end}{after}" if begin and end else text


def _table(measured: Mapping[str, Any]) -> str:
    """Markdown of the results of `eval`."""
    rows = {"packed weights, exact cache": measured["weights"], **measured["caches"]}
    lines = ["| | bits per element of cache | KL from the source | top-1 | perplexity |"]
    lines += ["|---|---|---|---|---|"]
    lines += [f"| source | 16 | 0 | 100 % | {measured['source']['perplexity']:.2f} |"]
    for name, row in rows.items():
        lines.append(
            f"| {name} | {row.get('bits_per_element', 16):.4g} | {row['kl']:.4f} | "
            f"{100 * row['top1_agreement']:.1f} % | {row['perplexity']:.2f} |"
        )
    lines += [f"| {name} | not measured | | | |" for name in measured.get("not_measured", ())]
    environment = measured["environment"]
    lines += [
        "",
        f"{measured['tokens']} tokens of {_named(measured['text'])} in windows of "
        f"{measured['window']}, each token seen as decoding would; bits at "
        f"{measured['tokens_held']} tokens of one sequence. {environment['device']}, "
        f"{environment['system']}, {environment['dtype']}; {environment['versions']}.",
        "",
    ]
    return "\n".join(lines)


def _named(text: str) -> str:
    return f"the {text} text" if text.startswith("built-in") else f"`{text}`"
