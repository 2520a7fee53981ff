"""Keys of findings. Findings with the same key count as the same cause.

[Note: content of a key]
A key contains the first wrong quantity in order of computation, the manner of the difference, and
the part of the buffer that differs. It excludes step, rank, param, index and values, because these
vary from case to case. So two causes only share a key if they corrupt the same quantity in the same
manner and in the same part of the layout.

When a case shrinks, all fields except `place` must stay equal. `place` may become the whole buffer:
with a single bucket, for example, this is also the last bucket. So for `place`, it is enough that
all differences lie within it (`may_become`).
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
# Messages about the world and about other groups must give the same template.
_GROUP = re.compile(r"\bgroup (world|#)")
_NUMBER = re.compile(r"[-+]?\b\d[\w.,+-]*|#\d+")
_WORDS_MAX = 24
# `1 rank` and `2 ranks` must give the same template.
_PLURAL = re.compile(r"\b(call|collective|element|param|rank|step)s\b")
# Lists of numbers of any length become one `#`.
_SAME_SPAN = re.compile(r"#(?:\W+#)+")


BEYOND_VALUES = 4.0
"""Greater than any relative difference, which is at most 2."""


class Key(NamedTuple):
    """Identity of a finding's cause; see [Note: content of a key]."""

    check: str
    phase: str = ""
    """Phase of the step, or the type of an unexpected error."""
    kind: str = ""
    """Kind of the param, `dense` or `expert`."""
    manner: str = ""
    """`Finding.manner`. If this is empty, the message without case-specific details."""
    place: str = ""
    """Part of the buffer that contains all differences, such as `last bucket`. Empty if no part
    does, or it is the whole buffer."""

    @classmethod
    def from_list(cls, values: Iterable[str]) -> Self:
        """Read a key from JSON. Keys of earlier versions have fewer fields."""
        return cls(*values)

    def __str__(self) -> str:
        return "|".join(self)


def key_of(result: CaseResult) -> Key | None:
    """Return the key of a result's first finding; None if the system is not wrong."""
    # An inconclusive case only has doubts about itself.
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
        # The first part that is not the whole buffer, because later parts are less specific.
        place=next((name for name, is_specific in _places(result).items() if is_specific), ""),
    )


def how_far_apart(result: CaseResult) -> float:
    """Return the relative difference in the first finding's values, between 0 and 2.

    Args:
        result: Result of a failing case.

    Returns:
        `BEYOND_VALUES` without finite values to compare.
    """
    evidence = result.findings[0].evidence if result.findings else None
    # If shapes or calls differ, there are no values to compare.
    if evidence is None or evidence.expected.numel() != evidence.got.numel():
        return BEYOND_VALUES
    return min(relative_difference(evidence.expected, evidence.got), BEYOND_VALUES)


def keeps_apart(result: CaseResult, *, before: CaseResult) -> bool:
    """Return True unless the difference has shrunk to rounding.

    Args:
        result: Result of a smaller case.
        before: Result of the original case.
    """
    then, now = how_far_apart(before), how_far_apart(result)
    evidence = before.findings[0].evidence if before.findings else None
    # For integers and infinities, rounding cannot explain a smaller difference.
    if evidence is None or not evidence.expected.is_floating_point() or then == BEYOND_VALUES:
        return True
    rounding = torch.finfo(evidence.expected.dtype).eps
    # Use the geometric mean as limit, because differences are factors: now >= sqrt(then * eps).
    return then <= rounding or now**2 >= then * rounding


def may_become(key: Key, result: CaseResult) -> bool:
    """Return True if a smaller case has the same finding; see [Note: content of a key].

    Args:
        key: Key of the larger case.
        result: Result of the smaller case.
    """
    other = key_of(result)
    # All fields except `place` must be equal.
    if other is None or other[:4] != key[:4]:
        return False
    return not key.place or key.place in _places(result)


def places_of(result: CaseResult) -> tuple[str, ...]:
    """Return all parts of the buffer that contain all differences."""
    return tuple(_places(result)) if result.findings else ()


def may_shrink(key: Key) -> bool:
    """Return True if smaller cases can have the same finding for the same reason."""
    # A case's expectations, such as an accuracy, only hold at its own size. Smaller cases would
    # miss them because they are smaller.
    return not key.check.startswith("expect.")


def _places(result: CaseResult) -> dict[str, bool]:
    """Return the parts that contain all differences, most specific first.

    The value is False if a part is the only part of its kind, so it is the whole buffer.
    """
    buffer_map = result.strip
    if buffer_map is None or buffer_map.check != result.findings[0].check or buffer_map.differ_cut:
        # A cut map or another check's map cannot locate all differences.
        return {}
    # Neither can a map of a part of the buffer.
    if (buffer_map.start, buffer_map.stop) != (0, buffer_map.elems):
        return {}
    return {name: is_specific for name, holds, is_specific in _claims(buffer_map) if holds}


def _claims(buffer_map: BufferMap) -> Iterator[tuple[str, bool, bool]]:
    """Yield each part: its name, True if it contains all differences, True if it is specific."""
    differ = buffer_map.differ
    pads = {start for start, _ in buffer_map.padding}
    used = [_without_padding(shard, pads, buffer_map) for shard in buffer_map.shards]
    used = [(start, stop) for start, stop in used if start < stop]
    # In a shard of one or two elements, each element is a start or an end.
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
    """Return a shard's span without its padding."""
    stop = min((pad for pad in pads if shard.start <= pad < shard.stop), default=shard.stop)
    return shard.start, stop


def _within(differ: Iterable[tuple[int, int]], spans: Iterable[tuple[int, int]]) -> bool:
    """Return True if all differences lie in the spans, which must not touch each other."""
    held = list(spans)
    return all(
        any(start <= first and last <= stop for start, stop in held) for first, last in differ
    )


def _template(message: str) -> str:
    """Remove case-specific details from a message: names, numbers, groups, folders."""
    # In this order, because paths and asides contain numbers, and quoted names may contain both.
    text = _QUOTED.sub("#", message)
    text = _PATH.sub("", text)
    text = _ASIDE.sub("", text)
    text = _SAME_SPAN.sub("#", _NUMBER.sub("#", text))
    text = _PLURAL.sub(r"\1", _GROUP.sub("group", text))
    return " ".join(text.replace("|", "/").split()[:_WORDS_MAX])
