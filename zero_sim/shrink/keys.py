"""Keys of findings: what tells the cause of one apart from that of another.

[Note: what is in a key]
What is wrong first in the order of computation, in which manner it differs, and in which part of
its buffer. Step, rank, param, index and values are not in it: they differ from case to case. Two
causes have one key only where they make the same quantity wrong in the same manner and in the same
part of the layout.

Of a smaller case all but the part of the layout must be the same. That part it can only keep as far
as it has one: where there is one bucket, the last bucket is all there is. So what differs must lie
within it, whether or not anything else is left (`may_become`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Self

import torch

from zero_sim.findings.compare import relative_difference
from zero_sim.findings.records import BufferMap, CaseResult, MappedShard
from zero_sim.scenario.kinds import kind_of

_QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"|<[^>]*>")
_ASIDE = re.compile(r"\([^()]*\)|\[[^][]*\]")
_PATH = re.compile(r"(?:[\w.-]*/)+")
_GROUP = re.compile(r"\bgroup (world|#)")
_NUMBER = re.compile(r"[-+]?\b\d[\w.,+-]*|#\d+")
_WORDS_MAX = 24
_PLURAL = re.compile(r"\b(call|collective|element|param|rank|step)s\b")
_SAME_SPAN = re.compile(r"#(?:\W+#)+")


BEYOND_VALUES = 4.0
"""More than any two numbers differ by, as a part of the larger one."""


class Key(NamedTuple):
    """What makes two findings one; see [Note: what is in a key]."""

    check: str
    phase: str = ""
    """Of the step; of an error that nobody foresaw, its type."""
    kind: str = ""
    """Of the param, `dense` or `expert`."""
    manner: str = ""
    """Of the difference, as `Finding.manner`; of what is no difference of values, the message
    without what is of one case."""
    place: str = ""
    """In which part of the buffer all that differs lies, of parts that there are several of."""

    @classmethod
    def from_list(cls, values: Iterable[str]) -> Self:
        """What JSON has of a key; an earlier version's had fewer parts."""
        return cls(*values)

    def __str__(self) -> str:
        return "|".join(self)


def key_of(result: CaseResult) -> Key | None:
    """What a result found, as far as it tells findings apart; None where nothing is wrong."""
    if result.verdict in ("pass", "inconclusive"):
        return None
    if not result.findings:
        return Key("refused")
    first = result.findings[0]
    return Key(
        check=first.check,
        phase=first.phase or "",
        kind="" if first.param is None else kind_of(first.param),
        manner=first.manner or _template(first.message),
        place=next((name for name, tells in _places(result).items() if tells), ""),
    )


def how_far_apart(result: CaseResult) -> float:
    """Return how far apart the values of the first finding are, between 0 and 2.

    Args:
        result: Of a case that fails.

    Returns:
        `BEYOND_VALUES` if what is wrong is no difference of finite values.
    """
    evidence = result.findings[0].evidence if result.findings else None
    if evidence is None or evidence.expected.numel() != evidence.got.numel():
        return BEYOND_VALUES
    return min(relative_difference(evidence.expected, evidence.got), BEYOND_VALUES)


def keeps_apart(result: CaseResult, *, before: CaseResult) -> bool:
    """Return whether values are nearer to as far apart as they were than to one rounding.

    Args:
        result: Of a smaller case.
        before: Of the case that it was made from.
    """
    then, now = how_far_apart(before), how_far_apart(result)
    evidence = before.findings[0].evidence if before.findings else None
    if evidence is None or not evidence.expected.is_floating_point() or then == BEYOND_VALUES:
        return True
    rounding = torch.finfo(evidence.expected.dtype).eps
    # Distances are factors, so that the middle is the geometric one.
    return then <= rounding or now**2 >= then * rounding


def may_become(key: Key, result: CaseResult) -> bool:
    """Whether a smaller case's result has the finding of a key, as far as it can.

    Args:
        key: Of the larger case.
        result: Of the smaller one.
    """
    other = key_of(result)
    if other is None or other[:4] != key[:4]:
        return False
    return not key.place or key.place in _places(result)


def places_of(result: CaseResult) -> tuple[str, ...]:
    """Parts of its buffer that all that differs lies in, those that are all there is included."""
    return tuple(_places(result)) if result.findings else ()


def may_shrink(key: Key) -> bool:
    """Whether smaller cases can have the same finding for the same reason.

    What a case expects beyond equality, such as an accuracy, it expects at its own size:
    smaller ones would miss it for being smaller.
    """
    return not key.check.startswith("expect.")


def _places(result: CaseResult) -> dict[str, bool]:
    """Parts of a buffer that all that differs lies in, the most telling first.

    Of each, whether it tells anything: not where it is all there is.
    """
    buffer_map = result.strip
    if buffer_map is None or buffer_map.check != result.findings[0].check or buffer_map.differ_cut:
        return {}
    if (buffer_map.start, buffer_map.stop) != (0, buffer_map.elems):
        return {}
    return {name: tells for name, holds, tells in _claims(buffer_map) if holds}


def _claims(buffer_map: BufferMap) -> Iterator[tuple[str, bool, bool]]:
    """Name of a part of the buffer, whether all that differs lies in it, whether that tells."""
    differ = buffer_map.differ
    pads = {start for start, _ in buffer_map.padding}
    used = [_without_padding(shard, pads, buffer_map) for shard in buffer_map.shards]
    used = [(start, stop) for start, stop in used if start < stop]
    wide = any(stop - start > 2 for start, stop in used)
    yield "shard start", _within(differ, [(start, start + 1) for start, _ in used]), wide
    yield "shard end", _within(differ, [(stop - 1, stop) for _, stop in used]), wide
    buckets = [(bucket.start, bucket.stop) for bucket in buffer_map.buckets]
    several = len(buckets) > 1
    yield "first bucket", _within(differ, buckets[:1]), several
    yield "last bucket", _within(differ, buckets[-1:]), several
    shards = sorted({shard.index for shard in buffer_map.shards})
    for name, index in (("first shard", shards[:1]), ("last shard", shards[-1:])):
        spans = [(shard.start, shard.stop) for shard in buffer_map.shards if shard.index in index]
        yield name, _within(differ, spans), len(shards) > 1


def _without_padding(shard: MappedShard, pads: set[int], buffer_map: BufferMap) -> tuple[int, int]:
    """A shard's elements that belong to params."""
    stop = min((pad for pad in pads if shard.start <= pad < shard.stop), default=shard.stop)
    return shard.start, stop


def _within(differ: Iterable[tuple[int, int]], spans: Iterable[tuple[int, int]]) -> bool:
    """Whether all that differs lies in spans, none of which touch."""
    held = list(spans)
    return all(
        any(start <= first and last <= stop for start, stop in held) for first, last in differ
    )


def _template(message: str) -> str:
    """A message without what is of one case: names, numbers, groups, folders."""
    text = _QUOTED.sub("#", message)
    text = _PATH.sub("", text)
    text = _ASIDE.sub("", text)
    text = _SAME_SPAN.sub("#", _NUMBER.sub("#", text))
    text = _PLURAL.sub(r"\1", _GROUP.sub("group", text))
    return " ".join(text.replace("|", "/").split()[:_WORDS_MAX])
