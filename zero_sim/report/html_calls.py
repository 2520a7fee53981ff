"""Calls around a finding as HTML: a matrix of near calls by rank, and a table of all calls.

The matrix only contains ranks that share a suspect with the finding's rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from zero_sim.report import pages
from zero_sim.report.calls import Nearby, NearCall, calls_near, shown_name
from zero_sim.report.text_buffer_map import in_runs

if TYPE_CHECKING:
    from zero_sim.findings.records import BufferMap, Finding
    from zero_sim.sim import CollectiveRecord, EventLog

RANKS_MAX = 6
"""Ranks in the matrix: as many as fit on a small screen."""
SUSPECTS_MAX = 16
"""Suspects in the matrix."""
CALLS_MAX = 500
"""Calls in the table. If the log is longer, it shows those around the finding."""
# Name prefix, CSS class for the colour, and name in the legend.
_KINDS = (
    ("reduce_scatter", "rs", "reduce_scatter"),
    ("all_reduce", "ar", "all_reduce"),
    ("all_gather", "ag", "all_gather"),
    ("all_to_all", "aa", "all_to_all"),
    ("broadcast", "bc", "broadcast"),
    ("send", "mail", "send, recv"),
    ("recv", "mail", "send, recv"),
    ("", "other", "other"),
)

_Key = tuple[str, tuple[int, ...], int, str]


def class_of(kind: str) -> str:
    """Return the CSS class for a collective's colour."""
    # The last prefix is empty, so it always matches.
    return next(class_ for start, class_, _ in _KINDS if kind.startswith(start))


def legend(kinds: Iterable[str], *marks: tuple[str, str]) -> Markup:
    """Render a legend of collectives and further marks.

    Args:
        kinds: Names of the collectives.
        marks: CSS class and meaning of each further mark.
    """
    # Only classes that occur, in the fixed order of `_KINDS`.
    used = {class_of(kind) for kind in kinds}
    named = dict.fromkeys((class_, meaning) for _, class_, meaning in _KINDS if class_ in used)
    return pages.render("legend.html", entries=[*named, *marks])


def near_calls(
    log: EventLog, finding: Finding, buffer_map: BufferMap | None, *, shows_grads: bool = False
) -> Markup | None:
    """Render the matrix of near calls with its legend.

    Args:
        log: Log of the finding's world.
        finding: The finding.
        buffer_map: Buffer with the finding, if known.
        shows_grads: See `calls_near`.

    Returns:
        None if the finding has no rank, or its rank made no call.
    """
    nearby = calls_near(log, finding, buffer_map, shows_grads=shows_grads)
    if nearby is None:
        return None
    suspects = nearby.suspects[:SUSPECTS_MAX]
    calls = sorted((*suspects, *nearby.others), key=lambda call: call.index)
    # Filter before building keys, because a key contains all ranks of a group, maybe thousands.
    near = {(call.record.group, call.record.sequence) for call in calls}
    came: dict[_Key, set[int]] = {}
    for record in log.collectives:
        if (record.group, record.sequence) in near:
            came.setdefault(_key(record), set()).add(record.rank)
    differ = buffer_map.differ_ranks if buffer_map and buffer_map.check == finding.check else ()
    ranks, left_out = _ranks(nearby, suspects, came=came, differ=differ)
    rows = list(_rows(calls, ranks, suspects, came=came, finding=finding, refused=log.refused))
    marks = [("mark suspect", "suspect")] if suspects else []
    if any(class_ == "lacks" for row in rows for _, class_, _ in row["marks"]):
        marks.append(("lacks", "never came"))
    return pages.render(
        "near_calls.html",
        nearby=nearby,
        legend=legend([call.record.kind for call in calls], *marks),
        ranks=ranks,
        rows=rows,
        more_suspects=len(nearby.suspects) - len(suspects),
        left_out=in_runs(left_out),
    )


def _ranks(
    nearby: Nearby,
    suspects: Sequence[NearCall],
    *,
    came: Mapping[_Key, set[int]],
    differ: Collection[int],
) -> tuple[list[int], list[int]]:
    """Return the ranks to show and the omitted ranks, among the members of near calls."""
    # Without suspects, use the calls around the finding.
    calls = suspects or nearby.others
    others = {rank for call in calls for rank in call.record.group_ranks} - {nearby.rank}
    absent = {
        rank
        for call in calls
        # A message has only two ends, so other ranks of its group are not absent.
        if call.record.kind not in ("send", "recv")
        for rank in set(call.record.group_ranks) - came[_key(call.record)]
    }
    # Absent ranks first, then ranks with a difference, then neighbours.
    order = sorted(
        others,
        key=lambda rank: (rank not in absent, rank not in differ, abs(rank - nearby.rank), rank),
    )
    return sorted([nearby.rank, *order[: RANKS_MAX - 1]]), order[RANKS_MAX - 1 :]


def _key(record: CollectiveRecord) -> _Key:
    """Return a key that is equal for all calls of a collective. Each message has its own key."""
    # Sends and receives have a tag as sequence number, which several messages may share.
    message = f"{record.kind} {record.rank}" if record.kind in ("send", "recv") else ""
    return record.group, record.group_ranks, record.sequence, message


def _rows(
    calls: Sequence[NearCall],
    ranks: Sequence[int],
    suspects: Sequence[NearCall],
    *,
    came: Mapping[_Key, set[int]],
    finding: Finding,
    refused: int | None,
) -> Iterator[dict[str, Any]]:
    step = "step" if finding.step is None else f"step {finding.step}"
    labels, last = {"before": "before", "in": step, "after": "after"}, ""
    for call in calls:
        record, label = call.record, labels[call.when]
        here = came[_key(record)]
        about = [f"{record.elems:,} {record.dtype}"] if record.elem_bytes else []
        about += [record.detail] if record.detail else []
        about += ["async"] if record.asynchronous else []
        yield {
            "label": "" if label == last else label,
            "class": " ".join(["suspect"] * (call in suspects) + ["step"] * (call.when == "in")),
            "call": f"{record.kind} #{record.sequence}",
            "about": ", ".join(about),
            "site": f"{shown_name(record.file)}:{record.line}",
            "marks": [_mark(call, rank, came=here, refused=refused) for rank in ranks],
        }
        last = label


def _mark(
    call: NearCall, rank: int, *, came: set[int], refused: int | None
) -> tuple[int, str, str]:
    """Return a rank, the CSS class of its mark, and its meaning; both empty without a mark."""
    record = call.record
    # Send and receive are separate rows, so only the calling rank has a mark.
    if rank not in record.group_ranks or (record.kind in ("send", "recv") and rank != record.rank):
        return rank, "", ""
    if rank not in came:
        return rank, "lacks", "never came"
    is_refused = call.index == refused and rank == record.rank
    return rank, f"{class_of(record.kind)}{' refused' if is_refused else ''}", "came"


def calls_table(log: EventLog, finding: Finding) -> tuple[Markup, str]:
    """Render a table of all ranks' calls around a finding, and describe its extent."""
    total = len(log.collectives)
    first = first_shown(total, finding, most=CALLS_MAX)
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
    extent = f"all {total} calls" if total <= CALLS_MAX else f"{CALLS_MAX} of {total} calls"
    return pages.render("table.html", head=head, rows=rows), extent


def first_shown(total: int, finding: Finding, *, most: int) -> int:
    """Return the first index of a window of at most `most` calls around a finding."""
    start = finding.call_start
    if start is None:
        start = total if finding.call_stop is None else finding.call_stop
    # Put only a quarter before the step, because the step's own calls matter most.
    return max(0, min(start - most // 4, total - most))
