"""Calls of torch.distributed around a finding, from the event log.

Suspects come first: calls that may have carried the wrong values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zero_sim.findings.dataflow import Phase
from zero_sim.findings.records import UNOBSERVED
from zero_sim.scenario.checks import Check

if TYPE_CHECKING:
    from zero_sim.findings.records import BufferMap, Finding, MappedBucket
    from zero_sim.sim import CollectiveRecord, EventLog

BEFORE = 2
"""Number of calls to show from before the bad step."""
OF_STEP = 6
"""Number of unsuspected calls to show from the end of the bad step."""
AFTER = 2
"""Number of calls to show from after the finding."""
SUSPECTS_UNFOLDED = 12
"""If there are more suspects, those from the same line of code share a line of text."""

# Substrings: "reduce" matches all_reduce, reduce and reduce_scatter.
_REDUCING, _GATHERING = ("reduce",), ("gather", "all_to_all", "broadcast")
_CARRYING = (*_REDUCING, *_GATHERING, "scatter", "send", "recv")
# Collectives that carry the values compared in each phase, as substrings.
_MARKED: dict[str, tuple[str, ...]] = {
    Phase.BACKWARD: _REDUCING,
    Phase.REDUCE: _REDUCING,
    Phase.NORM: ("all_reduce",),
    Phase.WRITE_BACK: _GATHERING,
    Phase.GATHER: _GATHERING,
}

_NOT_REPORTED = (
    "the system reports only its params, so the update itself may be wrong; implement parts() to "
    "find out"
)
_GRADS_AGREE = (
    "the reported gradients are right, so the update itself may be wrong; implement parts() "
    "to compare masters and optimizer state"
)
_VERBS: dict[str, str] = {Phase.REDUCE: "reduces", Phase.GATHER: "gathers"}


@dataclass(frozen=True, kw_only=True, slots=True)
class NearCall:
    """A call near a finding."""

    index: int
    """Position in the log."""
    record: CollectiveRecord
    when: str
    """`before` the bad step, `in` it up to the finding, or `after` the finding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Nearby:
    """A rank's calls near a finding."""

    rank: int
    suspects: tuple[NearCall, ...]
    """Suspects and the refused call, in log order."""
    others: tuple[NearCall, ...]
    """Some calls around the suspects, in log order."""
    left_out: int
    """Number of further calls in the bad step."""
    missing: str
    """Description of a call that the bad step lacks; may be empty."""
    why_no_suspect: str = ""
    """Reason why no call is a suspect, although some carried data; may be empty."""


def calls_near(
    log: EventLog,
    finding: Finding,
    buffer_map: BufferMap | None = None,
    *,
    shows_grads: bool = False,
) -> Nearby | None:
    """Return the calls of a finding's rank around the finding.

    Args:
        log: Log of the finding's world.
        finding: The finding.
        buffer_map: Buffer with the finding; None if unknown.
        shows_grads: True if reduced gradients were observed; see `observed_grads`.

    Returns:
        None if the finding has no rank, or its rank made no call.
    """
    rank = finding.rank
    own = [(i, record) for i, record in enumerate(log.collectives) if record.rank == rank]
    if rank is None or not own:
        return None
    stop = len(log.collectives) if finding.call_stop is None else finding.call_stop
    # A finding without a log interval ended the run, so the last calls belong to its step.
    first = own[-OF_STEP:][0][0]
    start = first if finding.call_start is None else finding.call_start
    before = [pair for pair in own if pair[0] < start]
    of_step = [pair for pair in own if start <= pair[0] < stop]
    after = [pair for pair in own if pair[0] >= max(start, stop)]
    buffer_map = (
        buffer_map if buffer_map is not None and buffer_map.check == finding.check else None
    )
    bucket = None if buffer_map is None else _bucket_of(finding, buffer_map)
    # If only params were observed, a wrong update looks like a wrong gather.
    is_reported = shows_grads or buffer_map is not None
    # The finding's phase determines the kind of suspects, the buffer map their size in elements.
    carrying = [pair for pair in of_step if _carries(pair[1], finding, is_reported=is_reported)]
    sizes = set() if buffer_map is None or bucket is None else _sizes(buffer_map, bucket)
    # A gather takes a shard and returns a bucket, a reduce-scatter the reverse.
    fitting = [p for p in carrying if sizes & {p[1].elems, p[1].output_elems}]
    # If no size fits, suspect all calls that could carry at least the smallest shard.
    least = min(sizes, default=0)
    fitting = fitting or [p for p in carrying if max(p[1].elems, p[1].output_elems) >= least]
    # `refused` may be None, which is not an index.
    marked = {index for index, _ in fitting} | {log.refused}
    others = [pair for pair in of_step if pair[0] not in marked]

    def near(index: int, record: CollectiveRecord) -> NearCall:
        when = "before" if index < start else "in" if index < stop else "after"
        return NearCall(index=index, record=record, when=when)

    around = [*before[-BEFORE:], *others[-OF_STEP:], *after[:AFTER]]
    suspects = tuple(near(*pair) for pair in own if pair[0] in marked)
    missing = ""
    if buffer_map is not None and bucket is not None and finding.call_start is not None:
        missing = _missing(finding, buffer_map, bucket, carrying=[record for _, record in carrying])
    return Nearby(
        rank=rank,
        suspects=suspects,
        others=tuple(near(*pair) for pair in around if pair[0] not in marked),
        left_out=max(0, len(others) - OF_STEP),
        missing=missing,
        why_no_suspect=_why_no_suspect(finding, buffer_map, shows_grads) if not suspects else "",
    )


def observed_grads(notes: Iterable[str]) -> bool:
    """Return True if a case observed reduced gradients.

    Args:
        notes: Notes of the case, which list unobserved quantities.
    """
    from zero_sim.targets.adapt import GRADIENTS  # Imports torch, which the command line defers.

    # From notes, because bundles keep no other record of this.
    silent = (note.removeprefix(UNOBSERVED) for note in notes if note.startswith(UNOBSERVED))
    return not any(GRADIENTS in each.split(", ") for each in silent)


def _carries(record: CollectiveRecord, finding: Finding, *, is_reported: bool) -> bool:
    """True if a call of this kind carries the values compared in the finding's phase."""
    words = _MARKED.get(finding.phase or "", ())
    if finding.check == Check.EQUALITY_SCALE:
        words = _REDUCING
    elif finding.phase == Phase.GATHER and not is_reported:
        # If only params are reported, a wrong local update would also show there first, so the
        # gather is not suspect.
        words = () if finding.check == Check.EQUALITY_PARAMS else _CARRYING
    return any(word in record.kind for word in words)


def _why_no_suspect(finding: Finding, buffer_map: BufferMap | None, shows_grads: bool) -> str:
    if finding.check != Check.EQUALITY_PARAMS or buffer_map is not None:
        return ""
    return _GRADS_AGREE if shows_grads else _NOT_REPORTED


def _bucket_of(finding: Finding, buffer_map: BufferMap) -> MappedBucket | None:
    """Return the bucket of the first differing element; None if its offset is unknown."""
    offset = finding.flat_offset
    # If the finding has an offset in a param instead, look for its fragment.
    if offset is None and finding.offset_in_param is not None:
        at = finding.offset_in_param
        offset = next(
            (
                piece.start + at - piece.param_start
                for piece in buffer_map.pieces
                if piece.param == finding.param
                and 0 <= at - piece.param_start < piece.stop - piece.start
            ),
            None,
        )
    if offset is None:
        return None
    return next((each for each in buffer_map.buckets if each.start <= offset < each.stop), None)


def _sizes(buffer_map: BufferMap, bucket: MappedBucket) -> set[int]:
    """Return possible sizes of calls for a bucket, in elements: the bucket, or a shard."""
    shards = [shard for shard in buffer_map.shards if shard.bucket == bucket.index]
    # Drop 0, the size of an empty shard, which would fit every call without output.
    return {bucket.stop - bucket.start, *(shard.stop - shard.start for shard in shards)} - {0}


def _missing(
    finding: Finding,
    buffer_map: BufferMap,
    bucket: MappedBucket,
    *,
    carrying: Sequence[CollectiveRecord],
) -> str:
    """Describe a call that the bad step lacks; empty if none is known."""
    elems = bucket.stop - bucket.start
    verb = _VERBS.get(finding.phase or "")
    if verb is None or not elems:
        return ""
    seen = sum(elems in (record.elems, record.output_elems) for record in carrying)
    what = f"bucket {bucket.index}, elements [{bucket.start}, {bucket.stop})"
    if not seen:
        return f"no call in this step {verb} {elems} elements, the size of {what}; was it issued?"
    # Several buckets may have this size, so compare counts. This needs a map of the whole buffer.
    alike = [each for each in buffer_map.buckets if each.stop - each.start == elems]
    if (buffer_map.start, buffer_map.stop) != (0, buffer_map.elems) or seen >= len(alike):
        return ""
    calls = "1 call" if seen == 1 else f"{seen} calls"
    return (
        f"{calls} in this step {verb} {elems} elements, but {len(alike)} buckets have this size; "
        f"was a call issued for {what}?"
    )


def render_calls(
    log: EventLog,
    finding: Finding,
    buffer_map: BufferMap | None = None,
    *,
    shows_grads: bool = False,
) -> list[str]:
    """Render the calls around a finding as lines; arguments as for `calls_near`."""
    nearby = calls_near(log, finding, buffer_map, shows_grads=shows_grads)
    if nearby is None:
        return []
    lines = [f"calls of rank {nearby.rank}:"]
    if nearby.why_no_suspect:
        lines = [f"calls of rank {nearby.rank}, none of them a suspect: {nearby.why_no_suspect}"]
    if nearby.suspects:
        lines = [f"calls of rank {nearby.rank}, suspects first, marked >:"]
    if nearby.missing:
        lines.append(f"  missing  {nearby.missing}")
    shown = [(call.when, ">", described) for call, described in _folded(nearby.suspects)]
    cut = nearby.left_out
    for call in nearby.others:
        if call.when == "in" and cut:
            shown.append(("in", " ", f"... {cut} more in this step"))
            cut = 0
        shown.append((call.when, " ", _describe_call(call.record)))
    # Consecutive lines with the same label and mark show the label once.
    labels = {"before": "before", "in": "step", "after": "after"}
    last = None
    for when, mark, described in shown:
        label = "" if (when, mark) == last else labels[when]
        last = when, mark
        lines.append(f"  {label:<7}{mark} {described}")
    return lines


def _folded(calls: Sequence[NearCall]) -> Iterator[tuple[NearCall, str]]:
    """Yield suspects with their text. If there are many, merge those from one line of code."""
    if len(calls) <= SUSPECTS_UNFOLDED:
        yield from ((call, _describe_call(call.record)) for call in calls)
        return
    alike: dict[object, list[NearCall]] = {}
    for call in calls:
        # Ignore number and size, so that calls in a loop over buckets are merged.
        key = call.when, call.record._replace(sequence=0, elems=0, output_elems=0)
        alike.setdefault(key, []).append(call)
    for run in alike.values():
        described = _describe_call(run[0].record)
        if len(run) > 1:
            elems = [call.record.elems for call in run]
            described += f"; {len(run)} such calls, to #{run[-1].record.sequence}"
            described += (
                f", of {min(elems)} to {max(elems)} elements" if len(set(elems)) > 1 else ""
            )
        yield run[0], described


def shown_name(file: str) -> str:
    """Return a call site's file name without its folder, which most call sites share."""
    return file.replace("\\", "/").rpartition("/")[2]


def _describe_call(record: CollectiveRecord) -> str:
    short = record._replace(file=shown_name(record.file))
    return f"{short.text}, async" if record.asynchronous else short.text
