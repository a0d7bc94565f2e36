"""Running the command line in this process, and Python in another one."""

import contextlib
import io
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

# What every child needs before MLX is imported: a BLAS that is not 50 times slower.
_PRELUDE = "from velox_pack import blas; blas.preload()\n"


@dataclass(frozen=True)
class Result:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The last line on stderr, which every failed command must end with."""
        return self.err.splitlines()[-1] if self.err else ""


def velox(*args: object) -> Result:
    """Run `velox-pack ARGS` in this process."""
    from velox_pack.cli import main

    out, err = io.StringIO(), io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([str(a) for a in args])
        except SystemExit as end:
            code = int(end.code or 0)
    return Result(code, out.getvalue(), err.getvalue())


def start_python(code: str, *args: object, **options: object) -> "subprocess.Popen[str]":
    """Start `code` in a Python of its own, its arguments in sys.argv[1:]."""
    command = [sys.executable, "-c", _PRELUDE + code, *map(str, args)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def python(code: str, *args: object, **options: object) -> Result:
    """Run `code` in a Python of its own to its end."""
    process = start_python(code, *args, **options)
    out, err = process.communicate(timeout=300)
    return Result(process.returncode, out, err)


def snapshot(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, hidden ones too."""
    return {
        p.relative_to(folder).as_posix(): p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }
