"""The tables of the HTML report: values around the first difference, and calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from zero_sim.findings.compare import find_difference
from zero_sim.report.markup import Markup, element

if TYPE_CHECKING:
    from torch import Tensor

    from zero_sim.findings.records import Evidence, Finding
    from zero_sim.sim import EventLog

VALUES_BEFORE = 8
VALUES_AFTER = 40
"""Elements shown from the first difference on."""
CALLS_MAX = 500
"""Calls listed; of a longer log, those around the finding."""


def table(head: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]) -> Markup:
    """A table in a box of its own, in which it can be scrolled.

    Args:
        head: Names of the columns.
        rows: For each, its class, or nothing, and its cells.
    """
    body = [
        element("tr", *(element("td", cell) for cell in cells), class_=class_ or None)
        for class_, cells in rows
    ]
    top = element("thead", element("tr", *(element("th", cell) for cell in head)))
    return element("div", element("table", top, element("tbody", *body)), class_="scroll tall")


def values_table(finding: Finding, evidence: Evidence) -> Markup:
    """What was expected and what came around the first difference, element by element."""
    differ, first = _differing(evidence)
    start = max(0, first - VALUES_BEFORE)
    stop = first + VALUES_AFTER
    expected, got = _values(evidence.expected[start:stop]), _values(evidence.got[start:stop])
    rows = []
    for i, (wanted, came) in enumerate(zip_longest(expected, got), start=start):
        of_param = finding.offset_in_param
        flat = finding.flat_offset
        cells = [
            str(evidence.start + i),
            "" if of_param is None else str(of_param - first + i),
            "" if flat is None else str(flat - first + i),
            *(_decimal(value) for value in (wanted, came)),
            *(_bits(value) for value in (wanted, came)),
        ]
        rows.append(("bad" if i in differ else "", cells))
    head = ("element", "of param", "of buffer", "expected", "got", "expected bits", "got bits")
    return table(head, rows)


def calls_table(log: EventLog, finding: Finding) -> tuple[Markup, str]:
    """The calls of all ranks around a finding, and a sentence that says which of them."""
    total = len(log.collectives)
    start = finding.call_start
    if start is None:
        start = total if finding.call_stop is None else finding.call_stop
    first = max(0, min(start - CALLS_MAX // 4, total - CALLS_MAX))
    rows = []
    for index, record in enumerate(log.collectives[first : first + CALLS_MAX], start=first):
        in_step = (
            finding.call_start is not None
            and finding.call_stop is not None
            and finding.call_start <= index < finding.call_stop
        )
        own = "own" if in_step and record.rank == finding.rank else ""
        text = f"{record.kind}{', async' if record.asynchronous else ''}"
        cells = (
            str(index),
            str(record.rank),
            text,
            f"{record.group} #{record.sequence}",
            f"{record.elems:,} {record.dtype}" if record.elem_bytes else "",
            record.detail,
            record.site,
        )
        rows.append(("bad" if index == log.refused else own, cells))
    head = ("call", "rank", "collective", "group", "elements", "detail", "where")
    said = f"all {total} calls" if total <= CALLS_MAX else f"{CALLS_MAX} of {total} calls"
    return table(head, rows), said


def _differing(evidence: Evidence) -> tuple[frozenset[int], int]:
    """Indices of the evidence that differ, the first ones, and the first of all."""
    expected, got = evidence.expected, evidence.got
    if expected.dtype != got.dtype or expected.numel() != got.numel():
        return frozenset(), 0
    difference = find_difference(expected, got)
    if difference is None:
        return frozenset(), 0
    spans = difference.spans
    return frozenset(i for a, b in spans for i in range(a, b)), difference.first


def _values(part: Tensor) -> list[float | int | bool]:
    return part.double().tolist() if part.is_floating_point() else part.tolist()


def _decimal(value: float | int | bool | None) -> str:
    return "" if value is None else repr(value)


def _bits(value: float | int | bool | None) -> str:
    return float(value).hex() if isinstance(value, float) else ""
