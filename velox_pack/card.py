"""The bundle's README.md: what it is and how to use it, nothing that was not measured."""

from velox_pack.manifests.manifest import Manifest


def card(manifest: Manifest) -> str:
    """Markdown of a fresh bundle's card."""
    source = manifest.source
    front = ["library_name: mlx", "tags:", "- mlx", "- velox-pack"]
    if source.repo:
        front = [f"base_model: {source.repo}", "base_model_relation: quantized", *front]
    weights = manifest.weights
    options = ",".join(f"{k}={v}" for k, v in sorted(weights.parameters.items()))
    what = f"{weights.encoding}{f' ({options})' if options else ''}"
    lines = ["---", *front, "---", "", f"# {source.name}, prepared with velox-pack", ""]
    lines += [
        "```python",
        "import mlx_lm, velox_pack",
        "model, tokenizer = velox_pack.load(\"path or repo of this bundle\")",
        "print(mlx_lm.generate(model, tokenizer, prompt=\"...\"))",
        "```",
        "",
        f"- weights: {what}, {len(weights.packed)} linear layers packed",
        f"- caches: {', '.join(f'`{c.name}`' for c in manifest.caches) or 'none'}",
    ]
    if manifest.calibration:
        text = manifest.calibration
        lines.append(f"- calibrated on {text.tokens} tokens of {text.text} text")
    lines += ["", "`velox-pack verify` checks every byte, `velox-pack eval` measures quality.", ""]
    return "\n".join(lines)
