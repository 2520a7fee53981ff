"""Texts of the walkthroughs from `prose.toml`, filled with values of their runs."""

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
        name: Its table in `prose.toml`, such as `ring.start`.
        tables: Tables below the text.
        picture: Picture above the tables, on pages only.
        more: Further paragraphs.
        values: Values of the names in braces.
    """
    entry = entry_of(name)
    # A name in braces without a value raises, so texts and runs cannot drift apart.
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
    """Return a table with the marks of a step, and its heading unless `head` is given."""
    entry = entry_of(name)
    marks = entry.get("marks", {})
    return Table(head=head or entry["head"], rows=rows, marks=marks, title=title)


def entry_of(name: str) -> Mapping[str, Any]:
    """Return a table of `prose.toml`."""
    entry = _read()
    for part in name.split("."):
        entry = entry[part]
    return entry


def _joined(paragraph: str) -> str:
    return " ".join(paragraph.split())


@functools.cache
def _read() -> Mapping[str, Any]:
    text = resources.files("zero_sim.walkthrough").joinpath("prose.toml").read_text("utf-8")
    return tomllib.loads(text)
