"""The calls around a finding as a table: one a row, in the order of time, and the ranks beside it.

Only the ranks that share a suspect with the finding's own, and only the calls near it: the whole
run is the timeline's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from zero_sim.report.calls import Nearby, NearCall, calls_near, shown_name
from zero_sim.report.kinds import class_of, legend
from zero_sim.report.markup import Markup, element

if TYPE_CHECKING:
    from zero_sim.findings.records import BufferMap, Finding
    from zero_sim.sim import CollectiveRecord, EventLog

RANKS_MAX = 6
"""Ranks beside each other: as many as fit on a small screen."""
SUSPECTS_MAX = 16
"""Suspects in the table; of more, the first ones."""

_Key = tuple[str, tuple[int, ...], int, str]


def near_calls(log: EventLog, finding: Finding, buffer_map: BufferMap | None) -> Markup | None:
    """The table with its legend; None where the finding names no rank with calls.

    Args:
        log: The log of the world that it was found in.
        finding: The finding.
        buffer_map: The buffer that it lies in, if there is one.
    """
    nearby = calls_near(log, finding, buffer_map)
    if nearby is None:
        return None
    suspects = nearby.suspects[:SUSPECTS_MAX]
    calls = sorted((*suspects, *nearby.others), key=lambda call: call.index)
    ranks = _ranks(nearby, suspects)
    # A key takes long where there are thousands of ranks, and a log has many calls.
    near = {(call.record.group, call.record.sequence) for call in calls}
    came = {
        (_key(record), record.rank)
        for record in log.collectives
        if (record.group, record.sequence) in near
    }
    rows = list(_rows(calls, ranks, came=came, finding=finding, refused=log.refused))
    head = ["call, and the ranks that came", *map(str, ranks)]
    cells = [
        element("th", name, class_="own" if name == str(nearby.rank) else None) for name in head
    ]
    top = element("thead", element("tr", *cells))
    marks = [("mark suspect", "suspect")] if suspects else []
    if any("key lacks" in row for row in rows):
        marks.append(("lacks", "never came"))
    left = len(nearby.suspects) - len(suspects)
    parts = [
        element("p", f"Missing: {nearby.missing}", class_="missing") if nearby.missing else "",
        element("p", f"No suspects: {nearby.why_no_suspect}.") if nearby.why_no_suspect else "",
        legend([call.record.kind for call in calls], *marks),
        element("table", top, element("tbody", *rows), class_="near"),
        element("p", f"And {left} more suspects, all in the table below.") if left else "",
    ]
    return element("div", *parts)


def _ranks(nearby: Nearby, suspects: Sequence[NearCall]) -> list[int]:
    """The finding's rank and those that share calls with it, its neighbours first."""
    calls = suspects or nearby.others
    others = {rank for call in calls for rank in call.record.group_ranks} - {nearby.rank}
    near = sorted(others, key=lambda rank: (abs(rank - nearby.rank), rank))
    return sorted([nearby.rank, *near[: RANKS_MAX - 1]])


def _key(record: CollectiveRecord) -> _Key:
    """What the calls of one collective have in common; mail is a rank's own."""
    message = f"{record.kind} {record.rank}" if record.kind in ("send", "recv") else ""
    return record.group, record.group_ranks, record.sequence, message


def _rows(
    calls: Sequence[NearCall],
    ranks: Sequence[int],
    *,
    came: set[tuple[_Key, int]],
    finding: Finding,
    refused: int | None,
) -> Iterator[Markup]:
    step = "step" if finding.step is None else f"step {finding.step}"
    labels, said = {"before": "before", "in": step, "after": "after"}, ""
    for call in calls:
        record, label = call.record, labels[call.when]
        if label != said:
            yield element("tr", element("td", label, colspan=1 + len(ranks)), class_="when")
        said = label
        about = [f"{record.elems:,} {record.dtype}"] if record.elem_bytes else []
        about += [record.detail] if record.detail else []
        about += ["async"] if record.asynchronous else []
        text = element(
            "td",
            element("strong", f"{record.kind} #{record.sequence}"),
            f" {', '.join(about)} ",
            # The folder is long, and the same for nearly all of them.
            element("span", f"at {shown_name(record.file)}:{record.line}", class_="dim"),
        )
        cells = [
            element("td", _cell(call, rank, came=came, refused=refused), class_="rank")
            for rank in ranks
        ]
        class_ = " ".join(["suspect"] * call.suspect + ["step"] * (call.when == "in")) or None
        yield element("tr", text, *cells, class_=class_)


def _cell(
    call: NearCall, rank: int, *, came: set[tuple[_Key, int]], refused: int | None
) -> Markup | str:
    record = call.record
    if rank not in record.group_ranks or (record.kind in ("send", "recv") and rank != record.rank):
        return ""
    if (_key(record), rank) not in came:
        return element("i", class_="key lacks", title=f"rank {rank} never came")
    class_ = f"key {class_of(record.kind)}"
    if call.index == refused and rank == record.rank:
        class_ += " refused"
    return element("i", class_=class_, title=f"rank {rank} came")
