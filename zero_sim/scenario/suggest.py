"""Suggestions for invalid fields: the nearest name or choice, or the value in its right form."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from zero_sim.scenario.fields import (
    choices_of,
    default_at,
    describe_type,
    field_paths,
    fields_of,
    is_table,
    path_of,
    show,
    type_at,
)
from zero_sim.scenario.spec import Scenario

# Similarity from 0 to 1; difflib's default.
_CUTOFF = 0.6

_EXAMPLES = {
    "schema": "Begin the file with schema = 1.",
    "model": 'Add [model] with name = "mlp".',
    "model.name": 'Try name = "mlp".',
    "data.nan.step": "Try step = 0.",
    "data.nan.rank": "Try rank = 0.",
}
"""Suggestions for fields without a default."""


def closest(word: str, names: Iterable[str]) -> str | None:
    """Return the name most similar to `word`, ignoring case; None if none is similar."""
    # In lower case, because difflib is case-sensitive and `AdamW` means `adamw`.
    by_lower = {name.lower(): name for name in names}
    found = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=_CUTOFF)
    return by_lower[found[0]] if found else None


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """Return ` Did you mean 'x'?` to end a message, or nothing if no name is similar."""
    near = closest(word, names)
    return "" if near is None else f" Did you mean {str(near)!r}?"


NAMES_SHOWN_MAX = 5


def nearest(word: str, names: Iterable[str]) -> str:
    """List up to five names, most similar to `word` first, then how many others there are."""
    known = list(names)

    def likeness(name: str) -> float:
        return difflib.SequenceMatcher(None, word.lower(), name.lower()).ratio()

    # A stable sort keeps the order of equally similar names.
    known.sort(key=likeness, reverse=True)
    shown, more = known[:NAMES_SHOWN_MAX], len(known) - NAMES_SHOWN_MAX
    return ", ".join(shown) + (f" or {more} more" if more > 0 else "")


_INSTEAD = {"faults.step": "call"}
"""Right fields for wrong names that users try, if the two are not similar."""


def meant_path(loc: Sequence[str | int]) -> str | None:
    """Return the path of the field that an unknown field probably means.

    Look for a similar name in the same table, then for the same name in another table.
    """
    *parents, last = loc
    word = str(last)
    record = type_at(parents) if parents else Scenario
    if isinstance(record, type) and is_table(record):
        # `matrix` is not a scenario's field, but a table in the file.
        names = [*fields_of(record), *(() if parents else ("matrix",))]
        table = ".".join(str(part) for part in parents if isinstance(part, str))
        # A typing mistake is likelier than a field in the wrong table.
        near = _INSTEAD.get(f"{table}.{word}") or closest(word, names)
        if near:
            return path_of((*parents, near))
    if any(isinstance(part, int) for part in parents):
        return None  # A list entry's field cannot move to another table.
    elsewhere = [path for path in field_paths() if path.rpartition(".")[2] == word]
    return elsewhere[0] if elsewhere else None


def for_unknown(loc: Sequence[str | int]) -> str:
    """Return the suggestion for an unknown field."""
    *parents, last = loc
    meant = meant_path(loc)
    here = path_of(parents)
    if meant is None:
        record = type_at(parents) if parents else Scenario
        known = fields_of(record) if isinstance(record, type) and is_table(record) else {}
        names = ", ".join(f"`{name}`" for name in known)
        # No name is similar, so list all fields of the table.
        return f"{f'[{here}]' if here else 'A scenario'} takes {names}."
    table, _, name = meant.rpartition(".")
    if table == here:
        return f"Did you mean `{name}`?"
    place = f"in [{table}]" if table else "at the top of the file, before the first table"
    return f"`{name}` belongs {place}; move it there." if name == last else f"See `{meant}`."


def for_path(path: str) -> str:
    """Return the suggestion for a dotted path without a field."""
    near = closest(path, field_paths())
    if near is None:
        word = path.rpartition(".")[2]
        # Perhaps the right name in the wrong table.
        near = next((known for known in field_paths() if known.rpartition(".")[2] == word), None)
    return f"Did you mean `{near}`?" if near else "Try a path such as `world.size`."


def for_type(expected: object, value: object, *, path: str) -> str:
    """Return the suggestion for a value with the wrong type or outside the choices."""
    return _rewrite(expected, value, path=path) or _fallback(path)


def for_missing(path: str) -> str:
    """Return the suggestion for an omitted field without a default."""
    return _EXAMPLES.get(path, "")


def _fallback(path: str) -> str:
    if path.startswith("model.shapes"):
        return "Try shapes such as [[3], [2, 4]]."
    # A field with a default may always be omitted.
    default = default_at(path)
    if default is None:
        return for_missing(path) or "Leave it out for none."
    return f"Leave it out for the default, {show(default)}."


def _rewrite(expected: object, value: object, *, path: str) -> str:
    """Return a remedy that writes the value as it was probably meant; empty if unclear."""
    choices = choices_of(expected)
    # Choices first, because `stage = "1"` is a choice in quotes.
    if choices:
        return _for_choice(choices, value)
    if is_table(expected):
        return f"Write its fields under [{path}]."
    # Exclude bool, which is a subclass of int.
    if expected is str and isinstance(value, int | float) and not isinstance(value, bool):
        return f'Write "{value}", in quotes.'
    if expected is bool and str(value).lower() in {"true", "false"}:
        return f"Write {str(value).lower()}, without quotes."
    if expected in (int, float):
        return _for_number(expected, value)
    if not isinstance(value, list | dict) and describe_type(expected).startswith("an array"):
        return "Write it in brackets, as in [1, 2]."
    return ""


def ordered_choices(expected: object, value: object) -> tuple[object, ...]:
    """Return a `Literal` field's choices, most similar to `value` first."""
    choices = choices_of(expected)
    near = closest(value, [str(choice) for choice in choices]) if isinstance(value, str) else None
    return tuple(sorted(choices, key=lambda choice: str(choice) != near)) if near else choices


def _for_choice(choices: Sequence[object], value: object) -> str:
    near = closest(value, [str(choice) for choice in choices]) if isinstance(value, str) else None
    if near is None:
        return ""
    exact = next(choice for choice in choices if str(choice) == near)
    if not isinstance(exact, str):
        return f"Write {exact}, without quotes." if near == value else f"Did you mean {exact}?"
    return f'Did you mean "{near}"?'


def _for_number(expected: object, value: object) -> str:
    number = value
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            return ""
    # An integer in quotes is a float by now, and an integer without quotes is valid.
    if isinstance(number, bool) or not isinstance(number, float):
        return ""
    # Floats beyond 2^53 are not exact, so the intended integer is unknown.
    whole = number.is_integer() and abs(number) < 2**53
    if expected is int and not whole:
        return ""
    # `2.0` means 2.
    written = str(int(number)) if whole else str(value)
    return f"Write {written}, without quotes." if isinstance(value, str) else f"Write {written}."
