"""The calls of torch.distributed around a finding, out of the event log."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from zero_sim.sim import CollectiveRecord, EventLog
    from zero_sim.verify.records import Finding

BEFORE = 2
"""Calls shown of those before the bad step."""
OF_STEP = 6
"""Calls shown of those of the bad step up to the finding, the last ones."""
AFTER = 2
"""Calls shown of those after the finding."""

_MARKED = {
    "backward": ("reduce",),
    "reduce": ("reduce",),
    "norm": ("all_reduce",),
    "write-back": ("gather",),
    "gather": ("gather",),
}
"""What is in the name of the collectives that carry what is compared in a phase."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NearCall:
    """A call near a finding."""

    index: int
    """Its place in the log."""
    record: CollectiveRecord
    when: str
    """`before` the bad step began, `in` it up to the finding, or `after` that."""
    suspect: bool
    """Whether it is of the kind that carries what differs, or the call that did not fit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Nearby:
    """The calls of one rank near a finding."""

    rank: int
    calls: tuple[NearCall, ...]
    left_out: int
    """Calls of the bad step that are not shown, before those that are."""


def calls_near(log: EventLog, finding: Finding) -> Nearby | None:
    """The calls of a finding's rank around it.

    Args:
        log: The log of the world that it was found in.
        finding: The finding.

    Returns:
        None where it names no rank or that rank made no call.
    """
    rank = finding.rank
    own = [(i, record) for i, record in enumerate(log.collectives) if record.rank == rank]
    if rank is None or not own:
        return None
    stop = len(log.collectives) if finding.call_stop is None else finding.call_stop
    # What ended a run is at the end of the log: the last calls are those of its step.
    first = own[-OF_STEP:][0][0]
    start = first if finding.call_start is None else finding.call_start
    before = [pair for pair in own if pair[0] < start]
    of_step = [pair for pair in own if start <= pair[0] < stop]
    after = [pair for pair in own if pair[0] >= max(start, stop)]
    chosen = [
        *((pair, "before") for pair in before[-BEFORE:]),
        *((pair, "in") for pair in of_step[-OF_STEP:]),
        *((pair, "after") for pair in after[:AFTER]),
    ]
    words = _MARKED.get(finding.phase or "", ())
    calls = tuple(
        NearCall(
            index=index,
            record=record,
            when=when,
            suspect=index == log.refused
            or (when == "in" and any(word in record.kind for word in words)),
        )
        for (index, record), when in chosen
    )
    return Nearby(rank=rank, calls=calls, left_out=max(0, len(of_step) - OF_STEP))


def render_calls(log: EventLog, finding: Finding) -> list[str]:
    """The same as lines of text; none where there is nothing to show."""
    nearby = calls_near(log, finding)
    if nearby is None:
        return []
    lines = [f"calls of rank {nearby.rank}, suspects marked >:"]
    if not any(call.suspect for call in nearby.calls):
        lines = [f"calls of rank {nearby.rank}:"]
    left_out, said = nearby.left_out, ""
    for call in nearby.calls:
        if call.when == "in" and left_out:
            lines.append(f"  ... {left_out} more of this step")
            left_out = 0
        label = {"before": "before", "in": "step", "after": "after"}[call.when]
        shown, said = ("" if label == said else label), label
        mark = ">" if call.suspect else " "
        lines.append(f"  {shown:<7}{mark} {_told(call)}")
    return lines


def _told(call: NearCall) -> str:
    record = call.record
    # The folder of a call site is long, and the same for nearly all of them.
    text = record._replace(file=record.file.replace("\\", "/").rpartition("/")[2]).text
    return f"{text}, async" if record.asynchronous else text
