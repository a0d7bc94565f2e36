"""What a terminal, a pipe and a script get: streams, lines, traces, Ctrl-C."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from commands import start_python, velox
from velox_pack import job, show, weights
from velox_pack.manifests.errors import BundleError
from velox_pack.show import size

CLI = "import sys; from velox_pack.cli import main; main(sys.argv[1:])"


def test_every_line_of_progress_is_plain_outside_a_terminal(tiny_model, tmp_path: Path) -> None:
    source = tiny_model("llama")
    done = velox("convert", source, "--out", tmp_path / "b", "--cache", "turboquant-mse")
    assert done.err.splitlines() == [
        "hashing llama",
        "writing 71 tensors, 0.3 MB",
        *(f"packing model.layers.{i}" for i in range(3)),
    ]
    assert "\x1b" not in done.err + done.out
    assert done.out.splitlines()[0] == f"wrote {tmp_path / 'b'} from llama"


def test_the_last_line_is_the_error(tiny_model, tmp_path: Path, monkeypatch) -> None:
    """Progress may come before it on stderr; nothing comes after it, and nothing on stdout."""

    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device", "/the/file")

    monkeypatch.setattr("velox_pack.conversion.weight_plans.write", fail)
    source = tiny_model("llama")
    done = velox("convert", source, "--out", tmp_path / "b", "--cache", "turboquant-mse")
    assert (done.code, done.out) == (1, "")
    assert done.error == "velox-pack: No space left on device: /the/file"
    assert len(done.err.splitlines()) == 3
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", [["--debug", "inspect"], ["inspect", "--debug"]])
def test_debug_may_stand_anywhere(tmp_path: Path, place: list[str]) -> None:
    with pytest.raises(BundleError):
        velox(*place, tmp_path)


def test_text_of_a_bundle_is_no_markup(demo_bundle: Path, tmp_path: Path) -> None:
    """Names may hold what rich would take for markup or for a picture."""
    bundle = Path(shutil.copytree(demo_bundle, tmp_path / "b"))
    manifest = json.loads((bundle / "velox.json").read_text())
    manifest["source"]["name"] = "[red]x[/] :smile:"
    manifest["caches"][0]["name"] = manifest["default_cache"] = "[bold]a[/nonsense]:smile:"
    (bundle / "velox.json").write_text(json.dumps(manifest))
    done = velox("inspect", bundle)
    assert done.code == 0, done.err
    assert done.out.startswith("[red]x[/] :smile:, bundle format 1.0")
    assert "[bold]a[/nonsense]:smile: (default)" in done.out


def test_a_measurement_of_another_form_is_no_error(demo_bundle: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(demo_bundle, tmp_path / "b"))
    manifest = json.loads((bundle / "velox.json").read_text())
    manifest["measured"] = {"quality": "superb"}
    (bundle / "velox.json").write_text(json.dumps(manifest))
    done = velox("inspect", bundle)
    assert done.code == 0, done.err
    assert "measured by another version of velox-pack" in done.out


def test_long_lines_are_not_cut_in_a_pipe(tiny_model, tmp_path: Path) -> None:
    out = tmp_path / ("long" * 40)
    cache = "turboquant-mse:bits=3.5,sinks=4,window=24,flush=8"
    assert velox("convert", tiny_model("llama"), "--out", out, "--cache", cache).code == 0
    done = velox("inspect", out, "--memory", "1GB")
    assert f"{cache} (default)" in done.out
    assert "…" not in done.out


def test_what_a_dry_run_says(tmp_path: Path, hub, tiny_model) -> None:
    commit = hub.add("org/mixtral", tiny_model("mixtral"))
    done = velox("convert", "org/mixtral", "--out", tmp_path / "b", "--dry-run", "--weights",
                 "lloyd:bits=3", "--cache", "spectral:bits=4", "--cache", "exact",
                 "--calibration-tokens", "600")  # fmt: skip
    assert done.code == 0, done.err
    assert done.out.splitlines() == [
        f"would write {tmp_path / 'b'} from org/mixtral at {commit[:12]}",
        "weights lloyd:bits=3: 8 of 17 linears packed; kept 9: output head (1), "
        "router of experts (2), stacked experts (6)",
        "  kept 1: embedding",
        "parameters take 1.7 MB, the source's 1.9 MB",
        "caches: 2 of 2 layers cached by velox-pack",
        "  spectral:bits=4 (default)",
        "  exact",
        "calibration: 512 tokens of the built-in text, 512 in a sequence",
    ]
    assert not (tmp_path / "b").exists()


def test_verify_lists_every_problem(demo_bundle: Path, tmp_path: Path) -> None:
    bundle = Path(shutil.copytree(demo_bundle, tmp_path / "b"))
    for name in ("config.json", "tokenizer.json"):
        (bundle / name).write_text("{}")
    done = velox("verify", bundle)
    assert [line.partition(":")[0] for line in done.out.splitlines()] == [
        "config.json",
        "tokenizer.json",
    ]
    assert done.error.startswith(f"velox-pack: {bundle}: config.json: is truncated")
    assert done.error.endswith("(and 1 more)")
    assert done.code == 1
    missing = velox("verify", tmp_path / "nowhere")
    assert (missing.out, missing.error) == ("", f"velox-pack: {tmp_path}/nowhere: no such folder")


def test_generate_as_json_and_to_a_pipe(demo_bundle: Path) -> None:
    words = ["generate", demo_bundle, "--prompt", "She opened", "--max-tokens", "5"]
    plain, told = velox(*words), velox(*words, "--json")
    assert plain.err.splitlines() == [f"loading {demo_bundle}", "generating"]
    assert json.loads(told.out) == {"prompt": "She opened", "text": plain.out.removesuffix("\n")}
    assert velox(*words, "--cache", "none").code == 0


def test_a_model_that_says_nothing(demo_bundle: Path, monkeypatch) -> None:
    monkeypatch.setattr("velox_pack.speak.stream_generate", lambda *a, **k: iter(()))
    done = velox("generate", demo_bundle, "--prompt", "x")
    assert (done.code, done.out) == (0, "")
    assert done.error == "(the model ended its text at once)"


def test_prompts(demo_bundle: Path, own_model, tmp_path: Path) -> None:
    """An empty prompt, a chat template, and one that refuses."""
    few = ["--max-tokens", "3"]
    assert velox("generate", demo_bundle, "--prompt", "", *few).code == 0  # it begins with <s>
    templates = {"none": "", "chat": "{{ messages[0].content }}!", "no": "{{ raise_exception(1) }}"}
    found = {}
    for name, template in templates.items():
        source = own_model("llama")
        if template:
            (source / "chat_template.jinja").write_text(template)
        words = ["--cache", "exact", "--weights", "keep", "--overwrite"]
        assert velox("convert", source, "--out", tmp_path / "b", *words).code == 0
        found[name] = velox("generate", tmp_path / "b", "--prompt", "", *few)
    assert found["none"].error.startswith("velox-pack: the prompt is empty")
    assert found["chat"].code == 0
    assert found["no"].error.endswith("the chat template refuses the prompt (1): try --raw")
    assert velox("generate", tmp_path / "b", "--prompt", "hello", "--raw", *few).code == 0


def test_the_help_tells_the_true_defaults() -> None:
    text = " ".join(velox("convert", "--help").out.split())
    assert f"[default: {job.DEFAULT_CACHES[0]}]" in text
    assert f"[default: {job.DEFAULT_TOKENS}]" in text
    assert f"{weights.DEFAULT}. [default: the last" in text


def test_a_pipe_that_closes_early(demo_bundle: Path) -> None:
    """`velox-pack inspect b | head -1` ends quietly."""
    command = [sys.executable, "-c", CLI, "inspect", str(demo_bundle)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(timeout=60) == 1


STOP = """
import sys, time
from velox_pack import conversion
def stop(*args):
    print("here", flush=True)
    time.sleep(60)
conversion.weight_plans.write = stop
"""


def test_ctrl_c(tiny_model, tmp_path: Path) -> None:
    words = ["convert", tiny_model("llama"), "--out", tmp_path / "b", "--cache", "turboquant-mse"]
    process = start_python(STOP + CLI, *words, env=os.environ | {"PYTHONUNBUFFERED": "1"})
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert err.splitlines()[-1] == "velox-pack: interrupted"
    assert "Traceback" not in err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (4.4e6, "4.4 MB"), (1.5e12, "1500.0 GB")],
)
def test_sizes_for_people(count: float, text: str) -> None:
    assert size(count) == text


def test_a_terminal_gets_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    import rich.console

    screen = io.StringIO()
    console = show.Console()
    console._console = rich.console.Console(file=screen, force_terminal=True, width=60)
    with console:
        for line in ("packing [a]", "packing [a]", "packing [b]"):
            console.say(line)
    assert "packing [b]" in screen.getvalue()
    assert screen.getvalue().endswith("\x1b[2K")  # the line is cleared at the end
