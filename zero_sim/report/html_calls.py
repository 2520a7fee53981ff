"""The calls around a finding as a table: one a row, in the order of time, and the ranks beside it.

Only the ranks that share a suspect with the finding's own, and only the calls near it: the whole
run is the timeline's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from zero_sim.report.calls import Nearby, NearCall, calls_near, shown_name
from zero_sim.report.kinds import class_of, legend
from zero_sim.report.markup import Markup, element
from zero_sim.report.text_buffer_map import in_runs

if TYPE_CHECKING:
    from zero_sim.findings.records import BufferMap, Finding
    from zero_sim.sim import CollectiveRecord, EventLog

RANKS_MAX = 6
"""Ranks beside each other: as many as fit on a small screen."""
SUSPECTS_MAX = 16
"""Suspects in the table; of more, the first ones."""

_Key = tuple[str, tuple[int, ...], int, str]


def near_calls(
    log: EventLog, finding: Finding, buffer_map: BufferMap | None, *, shows_grads: bool = False
) -> Markup | None:
    """The table with its legend; None where the finding names no rank with calls.

    Args:
        log: The log of the world that it was found in.
        finding: The finding.
        buffer_map: The buffer that it lies in, if there is one.
        shows_grads: As for `calls_near`.
    """
    nearby = calls_near(log, finding, buffer_map, shows_grads=shows_grads)
    if nearby is None:
        return None
    suspects = nearby.suspects[:SUSPECTS_MAX]
    calls = sorted((*suspects, *nearby.others), key=lambda call: call.index)
    # A key takes long where there are thousands of ranks, and a log has many calls.
    near = {(call.record.group, call.record.sequence) for call in calls}
    came: dict[_Key, set[int]] = {}
    for record in log.collectives:
        if (record.group, record.sequence) in near:
            came.setdefault(_key(record), set()).add(record.rank)
    differ = buffer_map.differ_ranks if buffer_map and buffer_map.check == finding.check else ()
    ranks, left_out = _ranks(nearby, suspects, came=came, differ=differ)
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
        element("p", f"Not shown of the ranks of these calls: {in_runs(left_out)}.")
        if left_out
        else "",
    ]
    return element("div", *parts)


def _ranks(
    nearby: Nearby,
    suspects: Sequence[NearCall],
    *,
    came: Mapping[_Key, set[int]],
    differ: Collection[int],
) -> tuple[list[int], list[int]]:
    """The ranks to show and those left out, of the finding's rank and those in calls with it.

    Ranks that never came to a call go first, then ranks that see a difference, then neighbours.
    """
    calls = suspects or nearby.others
    others = {rank for call in calls for rank in call.record.group_ranks} - {nearby.rank}
    absent = {
        rank
        for call in calls
        if call.record.kind not in ("send", "recv")
        for rank in set(call.record.group_ranks) - came[_key(call.record)]
    }
    order = sorted(
        others,
        key=lambda rank: (rank not in absent, rank not in differ, abs(rank - nearby.rank), rank),
    )
    return sorted([nearby.rank, *order[: RANKS_MAX - 1]]), order[RANKS_MAX - 1 :]


def _key(record: CollectiveRecord) -> _Key:
    """What the calls of one collective have in common; mail is a rank's own."""
    message = f"{record.kind} {record.rank}" if record.kind in ("send", "recv") else ""
    return record.group, record.group_ranks, record.sequence, message


def _rows(
    calls: Sequence[NearCall],
    ranks: Sequence[int],
    *,
    came: Mapping[_Key, set[int]],
    finding: Finding,
    refused: int | None,
) -> Iterator[Markup]:
    step = "step" if finding.step is None else f"step {finding.step}"
    labels, said = {"before": "before", "in": step, "after": "after"}, ""
    for call in calls:
        record, label = call.record, labels[call.when]
        here = came[_key(record)]
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
            element("td", _cell(call, rank, came=here, refused=refused), class_="rank")
            for rank in ranks
        ]
        class_ = " ".join(["suspect"] * call.suspect + ["step"] * (call.when == "in")) or None
        yield element("tr", text, *cells, class_=class_)


def _cell(call: NearCall, rank: int, *, came: set[int], refused: int | None) -> Markup | str:
    record = call.record
    if rank not in record.group_ranks or (record.kind in ("send", "recv") and rank != record.rank):
        return ""
    if rank not in came:
        return element("i", class_="key lacks", title=f"rank {rank} never came")
    class_ = f"key {class_of(record.kind)}"
    if call.index == refused and rank == record.rank:
        class_ += " refused"
    return element("i", class_=class_, title=f"rank {rank} came")
