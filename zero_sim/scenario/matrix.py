"""The `[matrix]` table, which makes many cases from one file, with the same ids in every run.

A key is a field path, with a list of values for the field:

    [matrix]
    "world.size" = [1, 2, 3]
    optimizer = [{ name = "adamw" }, { name = "sgd", momentum = 0.9 }]

The cases are the product of all lists, in file order; the last key varies fastest. A table in a
list is merged into the file's own table. No case is drawn or skipped.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from zero_sim.errors import Problem
from zero_sim.scenario import suggest
from zero_sim.scenario.fields import describe_value, field_paths, show

CASES_MAX = 10_000
"""Most cases per file. A larger matrix is a slip, or a job for a fuzzing campaign."""

VALUES_MAX = 500_000
"""Most values in a file's cases together, because all are parsed and kept."""

_FIXED = ("schema", "name")
"""Fields that cannot vary, because they belong to the file."""
_ID_VALUE_MAX = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """A case before validation."""

    label: str
    """Values of the matrix, such as `size=3,dtype=bf16`, to append to the case id; empty without a
    matrix."""
    raw: dict[str, object]


def expand(raw: Mapping[str, object]) -> tuple[list[Variant], list[Problem]]:
    """Expand all cases in a parsed file.

    Args:
        raw: Table from `tomllib`, with or without a `matrix`.

    Returns:
        The variants in order, and the matrix's problems. The product omits invalid axes, so
        that the rest of the file is still checked.
    """
    # The file's own fields, because a case has no matrix.
    base = {key: value for key, value in raw.items() if key != "matrix"}
    if "matrix" not in raw:
        return [Variant(label="", raw=base)], []
    matrix = raw["matrix"]
    if not isinstance(matrix, dict):
        problem = Problem(
            path="matrix",
            message=f"expected a table of lists, got {describe_value(matrix)}.",
            suggestion='Try [matrix] with "world.size" = [1, 2, 3].',
        )
        return [Variant(label="", raw=base)], [problem]
    axes = dict(_axes(matrix, ""))
    # First limit the keys, because `_overlaps` compares all pairs.
    if len(axes) > len(field_paths()):
        message = f"expected at most {len(field_paths())} keys, one per field, got {len(axes):,}."
        problem = Problem(path="matrix", message=message, suggestion="Remove unknown fields.")
        return [Variant(label="", raw=base)], [problem]
    problems = [problem for path, values in axes.items() for problem in _check(path, values)]
    problems.extend(_overlaps(tuple(axes)))
    # Go on with the valid axes, to find their cases' problems in the same run.
    bad = {problem.path.removeprefix("matrix.") for problem in problems}
    sound = {
        path: values
        for path, values in axes.items()
        if path not in bad and isinstance(values, list)
    }
    count = math.prod(len(values) for values in sound.values())
    if count > CASES_MAX:
        message = f"expected at most {CASES_MAX:,} cases, got {count:,}."
        problems.append(
            Problem(path="matrix", message=message, suggestion="Split the file or drop values.")
        )
        # Still check the fields, with one value per axis.
        sound = {path: values[:1] for path, values in sound.items()}
    elif count * _size(base) > VALUES_MAX:
        message = f"expected at most {VALUES_MAX:,} values in all cases, got {count:,} cases of "
        message += f"{_size(base):,}."
        problems.append(
            Problem(path="matrix", message=message, suggestion="Split the file or drop values.")
        )
        sound = {path: values[:1] for path, values in sound.items()}
    return _product(base, sound), problems


def _size(value: object) -> int:
    if isinstance(value, dict):
        return 1 + sum(map(_size, value.values()))
    return 1 + sum(map(_size, value)) if isinstance(value, list) else 1


def _axes(table: Mapping[str, object], prefix: str) -> Iterator[tuple[str, object]]:
    # An unquoted key `world.size = [...]` is parsed as nested tables, but means the same.
    for key, value in table.items():
        if isinstance(value, dict) and value:
            # A table with keys is part of a path; an empty table is a value.
            yield from _axes(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _check(path: str, values: object) -> Iterator[Problem]:
    where = f"matrix.{path}"
    if path in _FIXED:
        yield Problem(
            path=where,
            message=f"`{path}` must be the same for all cases of a file.",
            suggestion="Remove it from the matrix.",
        )
    elif path not in field_paths():
        yield Problem(path=where, message="unknown field.", suggestion=suggest.for_path(path))
    elif not isinstance(values, list):
        yield Problem(
            path=where,
            message=f"expected a list of values, got {describe_value(values)}.",
            suggestion=f"Write [{show(values)}] for one value.",
        )
    elif not values:
        yield Problem(
            path=where,
            message="expected at least one value, got an empty list.",
            suggestion="Remove the line, or list the values to try.",
        )
    else:
        # Values with the same label would give two cases the same id.
        labels = Counter(_in_id(value, index) for index, value in enumerate(values))
        yield from (
            Problem(
                path=where,
                message=f"expected different values, got {label} {times} times.",
                suggestion="Remove the repetition, because case ids must differ.",
            )
            for label, times in labels.items()
            if times > 1
        )


def _overlaps(paths: Sequence[str]) -> Iterator[Problem]:
    for outer, inner in itertools.permutations(paths, 2):
        if inner.startswith(f"{outer}."):
            yield Problem(
                path=f"matrix.{inner}",
                message=f"`{outer}` varies as a whole already.",
                suggestion=f"Vary either `{outer}` or `{inner}`.",
            )


def _product(base: Mapping[str, object], axes: Mapping[str, Sequence[object]]) -> list[Variant]:
    names = _short_names(tuple(axes))
    variants: list[Variant] = []
    # Enumerated, because an id has the index if a value is too long.
    for picks in itertools.product(*(enumerate(values) for values in axes.values())):
        raw = copy.deepcopy(dict(base))
        parts: list[str] = []
        for path, (index, value) in zip(axes, picks, strict=True):
            _assign(raw, path, value)
            parts.append(f"{names[path]}={_in_id(value, index)}")
        variants.append(Variant(label=",".join(parts), raw=raw))
    return variants


def _short_names(paths: Sequence[str]) -> dict[str, str]:
    lasts = Counter(path.rpartition(".")[2] for path in paths)
    # An id has only a path's last part, unless two axes share it.
    return {path: last if lasts[last := path.rpartition(".")[2]] == 1 else path for path in paths}


def _assign(raw: dict[str, object], path: str, value: object) -> None:
    *parents, last = path.split(".")
    table = raw
    for name in parents:
        inner = table.setdefault(name, {})
        if not isinstance(inner, dict):
            return  # Not a table. Validation reports it.
        table = inner
    before = table.get(last)
    # Variants must not share tables, because the next assignment would change the others.
    value = copy.deepcopy(value)
    table[last] = (
        # Tables are merged: `optimizer = [{ name = "sgd" }]` keeps the file's learning rate.
        {**before, **value} if isinstance(before, dict) and isinstance(value, dict) else value
    )


def _in_id(value: object, index: int) -> str:
    """Return a value as written in a case id, or its index (`#0`) if it is too long."""
    text = _compact(value)
    return text if len(text) <= _ID_VALUE_MAX else f"#{index}"


def _compact(value: object) -> str:
    if isinstance(value, dict):
        return "+".join(f"{key}:{_compact(item)}" for key, item in value.items())
    if isinstance(value, list):
        if not value:
            return "none"
        # Shapes: `[[3], [2, 4]]` becomes `3+2x4`.
        if any(isinstance(item, list) for item in value):
            return "+".join(_compact(item) if item else "scalar" for item in value)
        return "x".join(_compact(item) for item in value)
    return value if isinstance(value, str) else show(value)
