"""The card: what it says of a bundle, and where `eval` writes."""

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from huggingface_hub.repocard import metadata_load

import velox_pack
from velox_pack.card import BEGIN, END, card, with_measured
from velox_pack.manifests.bundle import open_bundle
from velox_pack.manifests.errors import RecipeError

MEASURED: dict[str, Any] = {
    "text": "built-in held-out",
    "tokens": 2048,
    "window": 512,
    "tokens_held": 2048,
    "environment": {"device": "CPU", "system": "Linux", "versions": "mlx 1", "dtype": "float32"},
    "source": {"perplexity": 20.0},
    "weights": {"kl": 0.1, "top1_agreement": 0.8, "perplexity": 21.0},
    "caches": {
        "spectral": {
            "kl": 0.11, "top1_agreement": 0.79, "perplexity": 21.5, "bits_per_element": 3.3261,
        }
    },
}  # fmt: skip


@pytest.fixture
def fresh(demo_bundle: Path) -> str:
    return card(open_bundle(demo_bundle).manifest)


def test_front_matter_is_what_the_hub_reads(demo_bundle: Path, tmp_path: Path) -> None:
    manifest = open_bundle(demo_bundle).manifest
    source = manifest.source.model_copy(
        update={"kind": "hub", "repo": "org/model", "revision": "0" * 40}
    )
    licence = {"license": "other", "license_link": 'a "quoted": link\n- x'}
    (tmp_path / "README.md").write_text(
        card(manifest.model_copy(update={"source": source}), licence)
    )
    assert (
        metadata_load(tmp_path / "README.md")
        == {
            "base_model": "org/model",
            "base_model_relation": "quantized",
            "library_name": "mlx",
            "pipeline_tag": "text-generation",
            "tags": ["mlx", "velox-pack"],
        }
        | licence
    )
    assert ModelCard.load(tmp_path / "README.md").data.base_model == "org/model"


def test_a_fresh_card_claims_nothing_that_was_not_measured(fresh: str) -> None:
    assert "- weights: affine (bits=4,group=64), 42 linear layers packed\n" in fresh
    assert "- caches: `ratequant+joint-spectral`\n" in fresh
    assert "- calibrated on 1024 tokens of the built-in text\n" in fresh
    assert "base_model" not in fresh  # nobody else could fetch the demo
    assert fresh.endswith(f"\n{BEGIN}\n{END}\n")
    assert "perplexity" not in fresh


@pytest.mark.parametrize(
    ("caches", "named"),
    [
        (["affine:group=32", "kivi-sink"], ""),
        (["kivi-sink", "qfilters+affine:group=32", "affine:group=32"], ', cache="affine:group=32"'),
        (["kivi-sink"], ', cache="none"'),
    ],
)
def test_what_the_card_says_to_do_can_be_done(
    tiny_model, tmp_path: Path, caches: list[str], named: str
) -> None:
    out = velox_pack.convert(
        tiny_model("llama"), tmp_path / "b", caches=caches, calibration_tokens=128
    )
    text = (out / "README.md").read_text()
    (line,) = [line for line in text.splitlines() if "velox_pack.load(" in line]
    assert line.endswith(f'("path or repo of this bundle"{named})')
    assert f"cannot be loaded yet: {', '.join(f'`{c}`' for c in caches if c[0] != 'a')}\n" in text
    exec(line.replace("path or repo of this bundle", str(out)), {"velox_pack": velox_pack})
    if named:  # the premise
        with pytest.raises(RecipeError):
            velox_pack.load(out)


def test_results_go_between_their_lines(fresh: str) -> None:
    edited = fresh.replace("# demo", "# My demo") + "\nThanks.\n"
    once = with_measured(edited, MEASURED)
    assert "| spectral | 3.326 | 0.1100 | 79.0 % | 21.50 |\n" in once
    assert "| source | 16 | 0 | 100 % | 20.00 |\n" in once
    assert "CPU, Linux, float32; mlx 1." in once
    more = with_measured(edited, MEASURED | {"not_measured": ["kivi-sink"]})
    assert "| 21.50 |\n| kivi-sink | not measured | | | |\n\n" in more
    assert "# My demo" in once
    assert once.endswith("Thanks.\n")
    assert with_measured(once, MEASURED) == once
    assert once.replace(once.partition(f"{BEGIN}\n")[2].partition(END)[0], "") == edited


@pytest.mark.parametrize("missing", [BEGIN, END])
def test_a_card_without_the_lines_is_left_alone(fresh: str, missing: str) -> None:
    text = fresh.replace(missing, "")
    assert with_measured(text, MEASURED) == text
