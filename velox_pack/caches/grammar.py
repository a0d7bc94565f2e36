"""The grammar of recipes: `name:key=value,key=value+name:...`."""

from dataclasses import dataclass, fields
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from velox_pack.manifests.errors import RecipeError


@dataclass(frozen=True)
class Part:
    """One `name:key=value,...` of a recipe, still text."""

    name: str
    options: tuple[tuple[str, str], ...]


SHOWN = 80  # characters of a user's text that an error repeats


def short(text: str) -> str:
    """`text` for an error message: cut where it is so long that nobody would read it."""
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def parse(text: str) -> list[Part]:
    """Split a recipe into its parts.

    Raises RecipeError for empty parts and options, options without a value or given twice.
    """
    parts = []
    shown = repr(short(text))
    for piece in text.split("+"):
        name, colon, rest = (s.strip() for s in piece.partition(":"))
        if not name:
            raise RecipeError(f"recipe {shown}: a part has no name; write name:key=value+name")
        options: dict[str, str] = {}
        for item in rest.split(",") if colon else ():
            key, equals, value = (s.strip() for s in item.partition("="))
            if not equals or not key or not value:
                raise RecipeError(f"recipe {shown}: {short(item)!r} is not key=value")
            if key in options:
                raise RecipeError(f"recipe {shown}: {short(key)} is given twice")
            options[key] = value
        parts.append(Part(name, tuple(options.items())))
    return parts


def _convert(name: str, key: str, value: str, hint: Any) -> Any:
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    for kind in kinds:
        try:
            if kind in (int, float, str):
                return kind(value)
        except ValueError:
            continue
    names = " or ".join(k.__name__ for k in kinds if k is not type(None))
    raise RecipeError(f"{name}: {key}={short(value)} is not {names}")


def make(cls: type, name: str, options: tuple[tuple[str, str], ...]) -> Any:
    """Build a recipe dataclass from text options; an unknown key lists the valid ones.

    Raises RecipeError.
    """
    hints = get_type_hints(cls)
    known = [f.name for f in fields(cls)]
    given = {}
    for key, value in options:
        if key not in known:
            takes = ", ".join(known) or "none"
            raise RecipeError(f"{name} has no option {short(key)}; it takes {takes}")
        given[key] = _convert(name, key, value, hints[key])
    try:
        return cls(**given)
    except RecipeError as error:
        raise RecipeError(f"{name}: {error}") from None


def _number(value: float) -> str:
    """Short text that reads back as the same number: 3, not 3.0; no `+`, which parts recipes."""
    short = f"{value:g}"
    return (short if float(short) == value else repr(value)).replace("e+", "e")


def write(name: str, recipe: Any) -> str:
    """Canonical text of a recipe part: every option, in declared order, defaults included."""
    options = []
    for f in fields(recipe):
        value = getattr(recipe, f.name)
        if value is not None:
            options.append(f"{f.name}={_number(value) if isinstance(value, float) else value}")
    return f"{name}:{','.join(options)}" if options else name
