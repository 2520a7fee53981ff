"""Walkthrough texts from `prose.toml`, filled with values from runs."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from markupsafe import Markup

from zero_sim.report.walks import Cell, Step, Table, Walk


def walk(name: str, steps: Sequence[Step], **values: object) -> Walk:
    """Return a walkthrough with its title and introduction."""
    entry = entry_of(name)
    return Walk(title=entry["title"], about=_joined(entry["about"]).format_map(values), steps=steps)


def step(
    name: str,
    tables: Sequence[Table] = (),
    *,
    picture: Markup | None = None,
    more: Sequence[str] = (),
    **values: object,
) -> Step:
    """Return a step with its title and paragraphs.

    Args:
        name: Table in `prose.toml`, such as `ring.start`.
        tables: Tables below the text.
        picture: Picture above the tables, on pages only.
        more: Further paragraphs.
        values: Values for names in braces.
    """
    entry = entry_of(name)
    # A name without a value raises an error, so texts and runs cannot drift apart.
    text = [_joined(paragraph).format_map(values) for paragraph in entry.get("text", ())]
    return Step(
        title=entry["title"].format_map(values),
        text=[*text, *more],
        tables=tables,
        picture=picture,
    )


def table(
    name: str, rows: Sequence[Sequence[Cell | str]], *, head: Sequence[str] = (), title: str = ""
) -> Table:
    """Return a table with a step's marks, and its heading unless `head` is given."""
    entry = entry_of(name)
    marks = entry.get("marks", {})
    return Table(head=head or entry["head"], rows=rows, marks=marks, title=title)


def entry_of(name: str) -> Mapping[str, Any]:
    """Return a table from `prose.toml`."""
    entry = _read()
    for part in name.split("."):
        entry = entry[part]
    return entry


def _joined(paragraph: str) -> str:
    # Join lines, so that paragraphs in the file can be wrapped anywhere.
    return " ".join(paragraph.split())


# Cached, because every step and table looks up its entry.
@functools.cache
def _read() -> Mapping[str, Any]:
    text = resources.files("zero_sim.walkthrough").joinpath("prose.toml").read_text("utf-8")
    return tomllib.loads(text)
