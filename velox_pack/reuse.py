"""Taking artifacts over from another bundle where they would come out the same.

An artifact is a function of the source's files, the text that was run, the seed, and the options of
its fit. The hash of these is its fingerprint, and the manifest keeps it.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from velox_pack import __version__
from velox_pack.caches.needs import Need
from velox_pack.manifests import strict_json
from velox_pack.manifests.artifacts import KINDS, Artifact
from velox_pack.manifests.bundle import Bundle, open_bundle

if TYPE_CHECKING:
    from velox_pack.job import Job


def fingerprint(need: Need, job: "Job", hashes: dict[str, str]) -> str:
    """Hex SHA-256 of everything that `need`'s artifacts depend on.

    The version of velox-pack is part of it, since a fit may change with it.
    """
    text = job.text
    facts = {
        "velox-pack": __version__,
        "need": need.name,
        "options": dict(need.options),
        "source": hashes,
        "seed": job.seed,
        "text": None if text is None else text.sha256,
        "tokens": None if text is None else list(text.tokens.shape),
    }
    return hashlib.sha256(strict_json.dumps(facts)).hexdigest()


@dataclass(frozen=True)
class Old:
    """A bundle to take artifacts from."""

    bundle: Bundle

    @classmethod
    def open(cls, path: str | Path) -> "Old":
        """Open a bundle; every byte is checked, since its artifacts go into another one.

        Raises BundleError.
        """
        return cls(open_bundle(Path(path).expanduser(), verify="sha256"))

    def find(self, wanted: str) -> list[Artifact]:
        """The artifacts of a fingerprint, as NumPy; [] if there are none."""
        found = []
        for record in self.bundle.manifest.artifacts:
            if record.fingerprint == wanted:
                kind = KINDS.get(record.kind)
                if kind is None or kind.kind_version != record.kind_version:
                    return []
                lazy = self.bundle.tensors(record.id)
                arrays: dict[str, Any] = {role: np.array(a) for role, a in lazy.items()}
                found.append(kind.from_tensors(record.parameters, tuple(record.layers), arrays))
        return found

    def told(self, taken: list[str], anew: list[str], hashes: dict[str, str]) -> str:
        """One line: what is taken over, what is not, and why not where that can be told."""
        name = self.bundle.path
        if not taken:
            return f"nothing of {name} can be taken over: {self._difference(hashes)}"
        rest = f"; made anew: {', '.join(anew)}" if anew else ""
        return f"taken over from {name}: {', '.join(taken)}{rest}"

    def _difference(self, hashes: dict[str, str]) -> str:
        manifest = self.bundle.manifest
        if manifest.source.files != hashes:
            return f"it is of other weights ({manifest.source.name})"
        if manifest.producer.get("velox-pack") != __version__:
            return "another velox-pack wrote it"
        return "its text, tokens, seed or options are others"
