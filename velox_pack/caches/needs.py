"""What recipes want calibrated, by name; the fits themselves are offline (velox_pack.fits)."""

from dataclasses import dataclass
from typing import TypeAlias

Option: TypeAlias = str | int | float


@dataclass(frozen=True, order=True)
class Need:
    """Something to calibrate: the name of a fit and its options, sorted by name.

    Two recipes with the same need share its artifacts.
    """

    name: str
    options: tuple[tuple[str, Option], ...] = ()

    @classmethod
    def of(cls, name: str, **options: Option) -> "Need":
        """`Need.of("vecinfer-keys", sub=4, bits=8)`."""
        return cls(name, tuple(sorted(options.items())))

    @property
    def id(self) -> str:
        """`vecinfer-keys-bits-8-sub-4`, in the letters that ids of artifacts may have."""
        parts = [self.name]
        for key, value in self.options:
            text = f"{value:g}" if isinstance(value, float) else str(value)
            parts += [key, text.replace(".", "_")]
        return "-".join(parts)
