"""docs/format.md lists every kind of artifact as the code has it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from artifact_examples import EXAMPLES

from velox_pack.manifests.artifacts import KINDS

TEXT = (Path(__file__).parents[2] / "docs" / "format.md").read_text("utf-8")
ROWS = {
    cells[0].strip("`"): cells[1:]
    for line in TEXT.partition("**Artifacts.**")[2].splitlines()
    if line.startswith("| `")
    for cells in [[cell.strip() for cell in line.strip("|").split(" | ")]]
}


def test_every_kind_has_a_row() -> None:
    assert set(ROWS) == set(KINDS)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_row_is_true_to_the_code(kind: str) -> None:
    tensors, parameters, what = ROWS[kind]
    documented = {}
    for group in tensors.split("; "):
        found = re.fullmatch(r"(`.+`) (\w+) \[(.+)\]", group)
        assert found, group
        for role in re.findall(r"`(\w+)`", found[1]):
            documented[role] = (found[2], found[3].replace(",", ""))
    assert documented == {role: (f.dtype, f.dims) for role, f in KINDS[kind].forms.items()}
    assert set(EXAMPLES[kind].to_tensors()) <= set(documented)
    assert set(re.findall(r"`(\w+)`", parameters)) == set(EXAMPLES[kind].parameters())
    assert what
