"""The command line: `velox-pack convert | inspect | verify | eval | generate | recipes`.

Data goes to stdout, progress and errors to stderr. Exit codes: 0, 1 for an error told in one line,
2 for a wrong call, 130 after Ctrl-C.
"""

import json
import math
import os
import sys
from collections.abc import Callable
from typing import Any

import click

from velox_pack import __version__, blas
from velox_pack.manifests.errors import BundleError, VeloxError
from velox_pack.show import Console, show_inspection, show_job, show_measured, show_recipes

INTERRUPTED = 130  # as a shell reports it


class _Group(click.Group):
    """Prints any error that a user can cause as one line; `--debug` shows where it came from."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        given = list(kwargs.get("args") or next(iter(args), None) or sys.argv[1:])
        # Their warnings are about things that we take care of, or that users can do nothing about.
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        blas.preload()
        try:
            code = super().main(*args, **kwargs | {"standalone_mode": False})
        except click.ClickException as error:
            error.show()
            sys.exit(error.exit_code)
        except (click.Abort, KeyboardInterrupt):
            click.echo("velox-pack: interrupted", err=True)
            sys.exit(INTERRUPTED)
        except (VeloxError, OSError, MemoryError) as error:
            if "--debug" in given:
                raise
            click.echo(f"velox-pack: {_one_line(error)}", err=True)
            sys.exit(1)
        sys.exit(code if isinstance(code, int) else 0)


def _one_line(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "out of memory"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}{f': {error.filename}' if error.filename else ''}"
    # Messages are written for Python; here the option is meant.
    return " ".join(str(error).split()).replace('cache="none"', "--cache none")


class _Path(click.Path):
    """A path, or a repo of the Hub, that may not exist but is not empty: unset variables are."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Refuse nothing but spaces; all else is for the commands to judge."""
        if not str(value).strip():
            self.fail("the name is empty", param, ctx)
        return value


_PATH = _Path()


def _common(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options that every command takes, in any place."""
    command = click.option("--debug", is_flag=True, help="Show a trace on errors.")(command)
    return click.option("--json", "as_json", is_flag=True, help="Print data as JSON.")(command)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="velox-pack")
@click.option("--debug", is_flag=True, expose_value=False, help="Show a trace on errors.")
def main() -> None:
    """Prepare language models for MLX once: packed weights, compressed caches, one bundle."""


@main.command()
@click.argument("source", type=_PATH)
@click.option("--out", required=True, type=_PATH, help="Folder of the new bundle.")
@click.option("--revision", help="Branch, tag or commit of a Hub repo.")
@click.option("--cache", "caches", multiple=True, metavar="NAME:KEY=VALUE,...",
              help="Cache recipe (see `recipes`); repeatable, the first is the bundle's default. "
                   "[default: ratequant+joint-spectral]")  # fmt: skip
@click.option("--weights", metavar="ENCODING",
              help="keep, overlay, lloyd:bits=4 or affine:bits=4,group=64. "
                   "[default: the last; keep if SOURCE is quantized already]")  # fmt: skip
@click.option("--calibration", type=_PATH, metavar="FILE",
              help="Text to calibrate on (UTF-8).  [default: built-in]")  # fmt: skip
@click.option("--calibration-tokens", type=click.IntRange(min=1), metavar="N",
              help="Tokens of it to use.  [default: 8192]")  # fmt: skip
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True,
              metavar="N", help="Of every random choice.")  # fmt: skip
@click.option("--overwrite", is_flag=True, help="Replace an existing bundle.")
@click.option("--reuse", type=_PATH, metavar="OLD_BUNDLE",
              help="Take over what would come out the same.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Check all that is cheap, say what would be done.")
@_common
def convert(source: str, out: str, dry_run: bool, as_json: bool, debug: bool, **given: Any) -> None:
    """Calibrate and pack SOURCE (a Hub repo, a folder, or `demo`) into a bundle."""
    from velox_pack.conversion import run
    from velox_pack.job import plan

    options = {k: v for k, v in given.items() if v not in (None, ())}
    with Console() as console:
        job = plan(source, out, report=console.say, **options)
        summary = job.summary()
        console.stop()
        for line in job.warnings:
            click.echo(f"warning: {line}", err=True)
        if not dry_run:
            run(job, console.say)
    if as_json:
        _print_json(summary | {"done": not dry_run})
    else:
        show_job(summary, done=not dry_run)


@main.command()
@click.argument("bundle", type=_PATH)
@click.option("--memory", metavar="SIZE", help="Say what context fits, e.g. 16GB.")
@click.option("--plots", type=_PATH, metavar="DIR", help="Draw what was calibrated, as PNG.")
@_common
def inspect(bundle: str, memory: str | None, plots: str | None, as_json: bool, debug: bool) -> None:
    """Show what is in BUNDLE and where its bytes go."""
    from velox_pack.contents import inspect as look

    found = look(bundle, memory=None if memory is None else _size(memory))
    if plots is not None:
        from velox_pack.plots import draw

        with Console() as console:
            found["plots"] = [str(path) for path in draw(bundle, plots, console.say)]
    if as_json:
        _print_json(found)
    else:
        show_inspection(found)
        click.echo("".join(f"wrote {path}\n" for path in found.get("plots", ())), nl=False)


@main.command()
@click.argument("bundle", type=_PATH)
@_common
def verify(bundle: str, as_json: bool, debug: bool) -> None:
    """Check every byte of BUNDLE against its manifest."""
    from velox_pack.manifests.bundle import verify as check

    with Console() as console:
        problems = check(bundle, "sha256", lambda name, count: console.say(f"hashing {name}"))
    if as_json:
        _print_json({"bundle": bundle, "sound": not problems, "problems": problems})
    elif not problems:
        click.echo(f"{bundle}: sound")
    elif len(problems) > 1:
        click.echo("\n".join(problems))
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        first = problems[0].removeprefix(f"{bundle}: ")
        raise BundleError(f"{bundle}: {first}{more}")


@main.command(name="eval")
@click.argument("bundle", type=_PATH)
@click.option("--text", type=_PATH, metavar="FILE",
              help="Held-out text (UTF-8).  [default: built-in]")  # fmt: skip
@click.option("--tokens", type=click.IntRange(min=2), default=2048, show_default=True,
              metavar="N", help="Tokens to score, in windows of 512.")  # fmt: skip
@click.option("--source", type=_PATH, help="Where the source model lies, if it moved.")
@_common
def evaluate(bundle: str, as_json: bool, debug: bool, **options: Any) -> None:
    """Measure BUNDLE against its source on held-out text; the result goes into velox.json."""
    from velox_pack.evaluation import evaluate as measure

    with Console() as console:
        result = measure(bundle, report=console.say, **options)
    if as_json:
        _print_json(result)
    else:
        show_measured(result)


@main.command()
@click.argument("bundle", type=_PATH)
@click.option("--prompt", required=True, help="Text to go on from.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=100, show_default=True,
              metavar="N", help="Tokens to generate at most.")  # fmt: skip
@click.option("--temp", type=click.FloatRange(min=0), default=0.0, show_default=True,
              metavar="T", help="Sampling temperature; 0 takes the likeliest token.")  # fmt: skip
@click.option("--cache", help="Cache plan; `none` for mlx-lm's own cache.")
@click.option("--revision", help="Branch, tag or commit of a Hub repo.")
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True,
              metavar="N", help="Of sampling.")  # fmt: skip
@click.option("--raw", is_flag=True, help="Do not apply the chat template.")
@_common
def generate(
    bundle: str, prompt: str, cache: str | None, revision: str | None, as_json: bool, debug: bool,
    **options: Any,
) -> None:  # fmt: skip
    """Load BUNDLE (a folder or a Hub repo) and go on from a prompt."""
    from velox_pack.speak import speak

    if not math.isfinite(options["temp"]):
        raise click.BadParameter("--temp must be a finite number")
    pieces = []
    with Console() as console:
        for piece in speak(bundle, prompt, cache, revision, console.say, **options):
            pieces.append(piece)
            if not as_json:
                console.stop()
                click.echo(piece, nl=False)
    if as_json:
        _print_json({"prompt": prompt, "text": "".join(pieces)})
    elif any(pieces):
        click.echo()
    else:
        click.echo("(the model ended its text at once)", err=True)


@main.command()
@_common
def recipes(as_json: bool, debug: bool) -> None:
    """List the cache recipes and their options."""
    from velox_pack.caches.recipes import describe

    rows = describe()
    if as_json:
        _print_json(rows)
    else:
        show_recipes(rows)


def _print_json(data: Any) -> None:
    click.echo(json.dumps(data, indent=2, ensure_ascii=False))


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def _size(text: str) -> int:
    """Bytes of `16GB`, `512M`, `1.5G`; decimal units, as disks and Activity Monitor count."""
    number = text.strip().upper().removesuffix("B")
    unit = number[-1:] if number[-1:] in "KMGT" else ""
    try:
        value = float(number.removesuffix(unit) if unit else number)
        if not 0 < value < 1e9:
            raise ValueError
    except ValueError:
        raise VeloxError(f"--memory {text!r} is not a size such as 16GB") from None
    return int(value * _UNITS[unit])
