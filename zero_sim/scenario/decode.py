"""Decoder from a parsed TOML table to a `Scenario`, with all its problems at once.

Only this module in the package imports pydantic. Pydantic finds invalid fields; messages and
suggestions are our own.
"""

from __future__ import annotations

import copy
import datetime
import functools
import itertools
import json
from collections.abc import Iterator

from pydantic import TypeAdapter, ValidationError

from zero_sim.errors import Problem
from zero_sim.scenario import suggest
from zero_sim.scenario.fields import (
    Loc,
    choices_of,
    describe_type,
    describe_value,
    is_table,
    path_of,
    show,
    type_at,
)
from zero_sim.scenario.kinds import is_own_model
from zero_sim.scenario.rules import check_scenario
from zero_sim.scenario.spec import Scenario

HALVES = "halves"
"""Our kind of problem for strings with lone surrogates, which cannot be encoded."""
UNKNOWN = "unexpected_keyword_argument"
"""Pydantic's kind of problem for unknown fields."""

PROBLEMS_MAX = 100
"""Most problems listed. A file with more is probably no scenario."""

_REQUIRED: dict[str, object] = {
    "schema": 1,
    "model": {"name": "mlp"},
    "model.name": "mlp",
    "data.nan.step": 0,
    "data.nan.rank": 0,
}
"""Replacements for fields without a default, used only to find further problems."""


@functools.cache
def adapter() -> TypeAdapter[Scenario]:
    """Return the validator. It is cached because building it takes longer than a small case."""
    return TypeAdapter(Scenario)


def decode(raw: dict[str, object]) -> tuple[Scenario | None, list[Problem]]:
    """Decode a case from a parsed table.

    Args:
        raw: Table from `tomllib`, without the matrix.

    Returns:
        The scenario and no problems, or None and at least one problem.
    """
    unfit = {**dict(_unfit_values(raw, ())), **dict(_halves(raw, ()))}
    # First pass: find unknown fields and wrong types.
    scenario, faults = _validate(_repaired(raw, unfit))
    faults = {**unfit, **faults}
    listed = itertools.islice(faults.items(), PROBLEMS_MAX)
    problems = [_problem(loc, kind, raw) for loc, kind in listed]
    if len(faults) > PROBLEMS_MAX:
        more = f"{len(faults) - PROBLEMS_MAX:,} more fields are unknown or of another type."
        return None, [*problems, Problem(path="", message=more, suggestion="Is it a scenario?")]
    if faults:
        # Second pass: replace invalid fields, so that rules over the other fields are checked too.
        scenario, _ = _validate(_repaired(raw, faults))
    if scenario is not None:
        problems.extend(check_scenario(scenario, known_bad=_known_bad(faults, raw)))
    return (None, problems) if problems else (scenario, [])


def _validate(raw: dict[str, object]) -> tuple[Scenario | None, dict[Loc, str]]:
    # In JSON mode, because strict Python mode refuses lists for tuples and dicts for records.
    try:
        return adapter().validate_json(json.dumps(raw, default=str), strict=True), {}
    except ValidationError as error:
        faults: dict[Loc, str] = {}
        for detail in error.errors(include_url=False, include_context=False, include_input=False):
            loc, kind = detail["loc"], detail["type"]
            # Pydantic reports the missing item in a short tuple; report the tuple instead.
            if kind == "missing" and isinstance(loc[-1], int):
                loc, kind = loc[:-1], "too_short"
            # All members in a union report errors at the same place; the first is enough.
            faults.setdefault(loc, kind)
        return None, faults


def _unfit_values(value: object, loc: Loc) -> Iterator[tuple[Loc, str]]:
    """Yield locations that pydantic would accept or misreport, with the kind of problem."""
    expected = type_at(loc)
    if isinstance(value, dict):
        if not is_table(expected):
            yield loc, "wrong_type"
            return
        for key, item in value.items():
            if type_at((*loc, key)) is None:
                yield (*loc, key), UNKNOWN
            else:
                yield from _unfit_values(item, (*loc, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            if type_at((*loc, index)) is not None:
                yield from _unfit_values(item, (*loc, index))
    elif isinstance(value, datetime.date | datetime.time) or (
        isinstance(value, int) and not -(2**63) <= value < 2**63
    ):
        # JSON has no dates, and tomllib also returns integers with more than TOML's 64 bits.
        yield loc, "wrong_type"
    else:
        choices = choices_of(expected)
        # By type, because `True in (0, 1)` holds, but `True` is no stage.
        is_choice = type(value) in {type(choice) for choice in choices}
        if loc == ("model", "name"):
            is_choice = value in choices or is_own_model(value)
        if choices and not is_choice:
            yield loc, "literal_error"


def _halves(value: object, loc: Loc) -> Iterator[tuple[Loc, str]]:
    """Yield strings with lone surrogates, which are valid in JSON, but not in a file."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _halves(item, (*loc, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _halves(item, (*loc, index))
    elif isinstance(value, str) and any("\ud800" <= char <= "\udfff" for char in value):
        yield loc, HALVES


def _problem(loc: Loc, kind: str, raw: dict[str, object]) -> Problem:
    path = path_of(loc)
    expected = type_at(loc)
    if kind == HALVES:
        message = f"expected whole characters, got {describe_value(_value_at(raw, loc))}."
        return Problem(path=path, message=message, suggestion="Remove the lone surrogates.")
    if kind == UNKNOWN or expected is None:
        return Problem(path=path, message="unknown field.", suggestion=suggest.for_unknown(loc))
    if kind == "missing":
        return Problem(
            path=path,
            message=f"missing; expected {describe_type(expected)}.",
            suggestion=suggest.for_missing(path),
        )
    value = _value_at(raw, loc)
    # Another version is not a typing mistake, so it gets its own remedy.
    if path == "schema" and type(value) is int:
        return Problem(
            path=path,
            message=f"expected 1, the format that this version reads, got {describe_value(value)}.",
            suggestion="Write schema = 1, or upgrade zero_sim if the file is for a newer one.",
        )
    choices = suggest.ordered_choices(expected, value)
    if len(choices) > 1:
        wanted = f"one of {', '.join(show(choice) for choice in choices)}"
    else:
        wanted = describe_type(expected)
    if isinstance(value, int) and expected is int and not isinstance(value, bool):
        # The type is right, so only the size can be wrong.
        wanted = "an integer of at most 64 bits"
    return Problem(
        path=path,
        message=f"expected {wanted}, got {describe_value(value)}.",
        suggestion=suggest.for_type(expected, value, path=path),
    )


def _value_at(raw: object, loc: Loc) -> object:
    for part in loc:
        raw = raw[part]  # type: ignore[index]
    return raw


def _is_given(raw: object, path: str) -> bool:
    for name in path.split("."):
        if not isinstance(raw, dict) or name not in raw:
            return False
        raw = raw[name]
    return True


def _field_loc(loc: Loc) -> tuple[str, ...]:
    """Return the location without indices, because an array is removed as a whole."""
    names: list[str] = []
    for part in loc:
        if isinstance(part, int):
            break
        names.append(part)
    return tuple(names)


def _repaired(raw: dict[str, object], faults: dict[Loc, str]) -> dict[str, object]:
    if not faults:
        return raw
    fixed = copy.deepcopy(raw)
    for loc in faults:
        names = _field_loc(loc)
        table: object = fixed
        for name in names[:-1]:
            table = table.get(name) if isinstance(table, dict) else None
        if not isinstance(table, dict):
            continue
        # Removed, so that its default is used.
        table.pop(names[-1], None)
        path = path_of(names)
        if path in _REQUIRED:
            table[names[-1]] = copy.deepcopy(_REQUIRED[path])
    return fixed


def _known_bad(faults: dict[Loc, str], raw: dict[str, object]) -> set[str]:
    bad = {path_of(_field_loc(loc)) for loc in faults}
    for loc, kind in faults.items():
        # `shape = [...]` is a single mistake: do not report `shapes` as missing as well.
        meant = suggest.meant_path(loc) if kind == UNKNOWN else None
        if meant and not _is_given(raw, meant):
            bad.add(meant)
    return bad
