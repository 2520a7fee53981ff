"""Keys of findings: the properties by which two findings count as one cause.

[Note: content of a key]
The first wrong quantity in the order of computation, the manner of the difference, and the part of
the buffer that differs. Step, rank, param, index and values are excluded, because they differ from
case to case. Two causes have one key only if they make the same quantity wrong in the same manner
and in the same part of the layout.

A smaller case must match all parts but the last. It can keep the part of the layout only if it has
that part: with a single bucket, the last bucket is the whole buffer. So all differences must lie
within the part, even if it is the whole buffer (`may_become`).
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
# The world and a group of some ranks must give one template.
_GROUP = re.compile(r"\bgroup (world|#)")
_NUMBER = re.compile(r"[-+]?\b\d[\w.,+-]*|#\d+")
_WORDS_MAX = 24
# `1 rank` and `2 ranks` must give one template.
_PLURAL = re.compile(r"\b(call|collective|element|param|rank|step)s\b")
# Lists of numbers of any length become one `#`.
_SAME_SPAN = re.compile(r"#(?:\W+#)+")


BEYOND_VALUES = 4.0
"""Above any relative difference of two numbers, which is at most 2."""


class Key(NamedTuple):
    """Identity of a finding's cause; see [Note: content of a key]."""

    check: str
    phase: str = ""
    """Phase of the step; for an unexpected error, its type."""
    kind: str = ""
    """Kind of the param, `dense` or `expert`."""
    manner: str = ""
    """Manner of the difference, as `Finding.manner`. For other findings, the message without the
    details of one case."""
    place: str = ""
    """Part of the buffer that contains all differences; empty if that is the only part."""

    @classmethod
    def from_list(cls, values: Iterable[str]) -> Self:
        """Read a key from JSON. Keys of earlier versions have fewer parts."""
        return cls(*values)

    def __str__(self) -> str:
        return "|".join(self)


def key_of(result: CaseResult) -> Key | None:
    """Return the key of a result's first finding; None if nothing is wrong."""
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
        # The first part that is not the whole buffer; later ones are less specific.
        place=next((name for name, tells in _places(result).items() if tells), ""),
    )


def how_far_apart(result: CaseResult) -> float:
    """Return the relative difference of the first finding's values, between 0 and 2.

    Args:
        result: Result of a failing case.

    Returns:
        `BEYOND_VALUES` if the finding is no difference of finite values.
    """
    evidence = result.findings[0].evidence if result.findings else None
    # Shapes or calls differ, so there are no values to compare.
    if evidence is None or evidence.expected.numel() != evidence.got.numel():
        return BEYOND_VALUES
    return min(relative_difference(evidence.expected, evidence.got), BEYOND_VALUES)


def keeps_apart(result: CaseResult, *, before: CaseResult) -> bool:
    """Return True if the values did not shrink to a difference of mere rounding.

    Args:
        result: Result of a smaller case.
        before: Result of the case that it was made from.
    """
    then, now = how_far_apart(before), how_far_apart(result)
    evidence = before.findings[0].evidence if before.findings else None
    # Integers and infinities have no rounding that could explain a smaller difference.
    if evidence is None or not evidence.expected.is_floating_point() or then == BEYOND_VALUES:
        return True
    rounding = torch.finfo(evidence.expected.dtype).eps
    # The midpoint is geometric, because differences compare as factors: now >= sqrt(then * eps).
    return then <= rounding or now**2 >= then * rounding


def may_become(key: Key, result: CaseResult) -> bool:
    """Return True if a smaller case's result has the finding of a key, as far as it can.

    Args:
        key: Key of the larger case.
        result: Result of the smaller one.
    """
    other = key_of(result)
    # All but the place must be equal.
    if other is None or other[:4] != key[:4]:
        return False
    return not key.place or key.place in _places(result)


def places_of(result: CaseResult) -> tuple[str, ...]:
    """Return the parts of the buffer that contain all differences, including a single part."""
    return tuple(_places(result)) if result.findings else ()


def may_shrink(key: Key) -> bool:
    """Return True if smaller cases can have the same finding for the same reason.

    A case's own expectations, such as an accuracy, hold only at its own size: smaller cases would
    miss them because they are smaller.
    """
    return not key.check.startswith("expect.")


def _places(result: CaseResult) -> dict[str, bool]:
    """Return the parts of a buffer that contain all differences, the most specific first.

    The value of each is False if it is the only part of its kind.
    """
    buffer_map = result.strip
    if buffer_map is None or buffer_map.check != result.findings[0].check or buffer_map.differ_cut:
        # A map that is cut, or of another check, cannot locate all differences.
        return {}
    # Neither can a map that shows only a part of the buffer.
    if (buffer_map.start, buffer_map.stop) != (0, buffer_map.elems):
        return {}
    return {name: tells for name, holds, tells in _claims(buffer_map) if holds}


def _claims(buffer_map: BufferMap) -> Iterator[tuple[str, bool, bool]]:
    """Yield the name of a part, True if it contains all differences, True if it is specific."""
    differ = buffer_map.differ
    pads = {start for start, _ in buffer_map.padding}
    used = [_without_padding(shard, pads, buffer_map) for shard in buffer_map.shards]
    used = [(start, stop) for start, stop in used if start < stop]
    # In a shard of one or two elements, each element is its start or its end.
    wide = any(stop - start > 2 for start, stop in used)
    yield "shard start", _within(differ, [(start, start + 1) for start, _ in used]), wide
    yield "shard end", _within(differ, [(stop - 1, stop) for _, stop in used]), wide
    buckets = [(bucket.start, bucket.stop) for bucket in buffer_map.buckets]
    several = len(buckets) > 1
    yield "first bucket", _within(differ, buckets[:1]), several
    yield "last bucket", _within(differ, buckets[-1:]), several
    shards = sorted({shard.index for shard in buffer_map.shards})
    for name, index in (("first shard", shards[:1]), ("last shard", shards[-1:])):
        # A shard has a span in each bucket.
        spans = [(shard.start, shard.stop) for shard in buffer_map.shards if shard.index in index]
        yield name, _within(differ, spans), len(shards) > 1


def _without_padding(shard: MappedShard, pads: set[int], buffer_map: BufferMap) -> tuple[int, int]:
    """Return the span of a shard without its padding."""
    stop = min((pad for pad in pads if shard.start <= pad < shard.stop), default=shard.stop)
    return shard.start, stop


def _within(differ: Iterable[tuple[int, int]], spans: Iterable[tuple[int, int]]) -> bool:
    """Return True if all differences lie in the spans, none of which touch."""
    held = list(spans)
    return all(
        any(start <= first and last <= stop for start, stop in held) for first, last in differ
    )


def _template(message: str) -> str:
    """Remove the details of one case from a message: names, numbers, groups, folders."""
    # Order matters: paths and asides contain numbers, and quoted names may contain both.
    text = _QUOTED.sub("#", message)
    text = _PATH.sub("", text)
    text = _ASIDE.sub("", text)
    text = _SAME_SPAN.sub("#", _NUMBER.sub("#", text))
    text = _PLURAL.sub(r"\1", _GROUP.sub("group", text))
    return " ".join(text.replace("|", "/").split()[:_WORDS_MAX])
