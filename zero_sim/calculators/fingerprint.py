"""Fingerprints: a step's collectives as letters, matched against a grammar per stage.

[Note: letters and grammars]
    A  all-reduce of gradients           C  sum of reduce-scattered shards, over replicas
    R  reduce-scatter                    D  reduce to a single owner
    G  all-gather, or all-to-all         B  broadcast
Control messages (norms, counts) and calls before the first sum or gather are omitted. Stages 1 and
2 gather after the sums. Stage 3 gathers before them, so its step begins with a gather. Stages 1 and
2 have the same calls, because resident gradients cause no call.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from zero_sim.calculators.network import sent_elems

# Norms, flags and counts have at most this many elements; buckets have more.
_FEW_ELEMS = 4
# Norms are often added in float64, which is rare for params. Both spellings, because traces from
# torch's profiler name dtypes as C++ does.
_WIDE_FLOATS = ("float64", "double")
_INTEGERS = ("int64", "long", "long int", "int32", "int")
# The first matching prefix counts, so `reduce_scatter` comes before `reduce`.
_LETTERS: Final = (
    ("reduce_scatter", "R"),
    ("all_reduce", "A"),
    ("all_gather", "G"),
    ("all_to_all", "G"),
    ("broadcast", "B"),
    ("reduce", "D"),
)
GRAMMARS: Final = (
    ("A+", "stage 0", "DDP: every gradient is summed on every rank"),
    ("[RC]+G+", "stage 1 or 2", "sums are scattered, params gathered after the step"),
    ("A+[GB]+", "stage 1 by all-reduce", "each rank receives whole sums and uses its part"),
    ("D+B+", "stage 1 or 2, whole buckets", "each bucket has one owner"),
    ("G[GRC]*[RC]", "stage 3", "params are gathered before use"),
    ("G[GRC]*[RC]G+", "stage 3, gathered after the step", "params are gathered once more"),
)
"""Pattern for a step's letters, the stage that it indicates, and the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservedCall:
    """A rank's call, from a trace, a dump or an event log."""

    kind: str
    ranks: int
    """Group size."""
    elems: int
    """Elements that the rank contributes."""
    elem_bytes: int
    dtype: str
    start: float
    stop: float
    """Times of issue (`start`) and end (`stop`), in any unit; equal if unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint:
    """The repeated step in a rank's calls, and the stage that it indicates."""

    stage: str
    """Empty if no grammar fits."""
    why: str
    letters: str
    """A letter for each call in a step."""
    steps: float
    """Number of repetitions; a fraction if the first step is cut off."""
    copies: int
    """Replicas of the sharded state: the group size of C calls, or 1."""
    overlapping: int
    """Number of calls that were in flight when the next call was issued."""
    calls: int
    odd: Sequence[str]
    """Calls that the stage does not need, as messages."""
    sizes: Sequence[tuple[int, int, int]]
    """Bins of message sizes: lower bound (included) and upper bound (excluded) in bytes, number of
    calls."""

    def as_dict(self) -> dict[str, object]:
        """Return the fields for JSON."""
        return {
            "stage": self.stage,
            "why": self.why,
            "letters": self.letters,
            "steps": self.steps,
            "copies": self.copies,
            "overlapping": self.overlapping,
            "calls": self.calls,
            "odd": list(self.odd),
            "sizes": [
                {"bytes_min": low, "bytes_max": high, "calls": count}
                for low, high, count in self.sizes
            ],
        }


def fingerprint(calls: Sequence[ObservedCall]) -> Fingerprint:
    """Return the fingerprint of a rank's calls.

    Args:
        calls: Calls in issue order.
    """
    # Omit setup before the first sum or gather. DDP, for example, first broadcasts the params.
    large = [call for call in calls if _grows(call)]
    first = next((i for i, call in enumerate(large) if _letter(call) in "RAGD"), len(large))
    large = _without_buffers(large[first:])
    begun, period = _repetition([(call.kind, call.ranks, call.elems) for call in large])
    large = large[begun:]
    step = large[:period]
    letters = _letters(step)
    found = [entry for entry in GRAMMARS if re.fullmatch(entry[0], letters)]
    stage, why = (found[0][1], found[0][2]) if found else ("", "no grammar fits")
    # A step that reshards after forward gathers each bucket twice, but reduces it once.
    if stage == "stage 3" and letters.count("G") <= letters.count("R"):
        why += ", and kept until backward"
    copies = max((c.ranks for c, at in zip(step, letters, strict=True) if at == "C"), default=1)
    return Fingerprint(
        stage=stage,
        why=why,
        letters=letters,
        steps=len(large) / period if period else 0.0,
        copies=copies,
        overlapping=sum(
            call.stop > after.start for call, after in pairwise(large) if call.stop > call.start
        ),
        calls=len(large),
        odd=_odd(step, letters, stage=stage),
        sizes=_sizes(large),
    )


def shortened(letters: str) -> str:
    """Return the letters with run lengths, such as `R3 G3`."""
    runs = [match.group() for match in re.finditer(r"(.)\1*", letters)]
    return " ".join(run[0] if len(run) == 1 else f"{run[0]}{len(run)}" for run in runs)


def _grows(call: ObservedCall) -> bool:
    """Return True if a call moves params or gradients, not a norm, count or index."""
    dtype = call.dtype.lower()
    is_norm = call.elems <= _FEW_ELEMS or dtype in _WIDE_FLOATS
    is_few = dtype in _INTEGERS or (is_norm and call.kind == "all_reduce")
    return _letter(call) != "" and not is_few


def _without_buffers(calls: Sequence[ObservedCall]) -> Sequence[ObservedCall]:
    """Omit broadcasts if they move fewer than half as many elements as the sums."""
    # DDP broadcasts module buffers before each forward. Broadcasts of params, as with a single
    # owner per bucket, have as many elements as the gradients.
    sums = sum(call.elems for call in calls if _letter(call) in "ARD")
    if 2 * sum(call.elems for call in calls if _letter(call) == "B") >= sums:
        return calls
    return [call for call in calls if _letter(call) != "B"]


def _letter(call: ObservedCall) -> str:
    return next((letter for start, letter in _LETTERS if call.kind.startswith(start)), "")


def _letters(calls: Sequence[ObservedCall]) -> str:
    # An all-reduce adds shards across replicas if it is as long as a reduce-scatter's output.
    left = {(c.elems // c.ranks) for c in calls if _letter(c) == "R" and c.ranks}
    return "".join(
        "C" if _letter(call) == "A" and call.elems in left else _letter(call) for call in calls
    )


def _repetition(tokens: Sequence[tuple[str, int, int]]) -> tuple[int, int]:
    """Return start and length of the shortest sequence that repeats up to the end.

    If nothing repeats: 0 and the number of tokens.
    """
    count = len(tokens)
    later = (0, count)
    for length in range(1, count):
        # Count the tokens at the end that repeat with this period. The last `length` always do.
        same = length
        while same < count and tokens[count - 1 - same] == tokens[count - 1 - same + length]:
            same += 1
        if same == count:
            return 0, length
        # Else the first step may differ, because DDP then rebuilds its buckets. Two complete
        # repetitions must follow, and the shortest such period counts.
        whole = same - same % length
        is_shortest = later[0] == 0 and length * 2 <= whole
        if is_shortest and _is_first_step(tokens, begun=count - whole, length=length):
            later = count - whole, length
    return later


def _is_first_step(tokens: Sequence[tuple[str, int, int]], *, begun: int, length: int) -> bool:
    """Return True if the tokens before a repetition are a different first step."""
    # Both need calls of each kind, or equal gathers at the end of a step would count as steps.
    kinds = {kind for kind, _, _ in tokens}
    parts = tokens[:begun], tokens[len(tokens) - length :]
    return begun <= 2 * length and all({kind for kind, _, _ in part} == kinds for part in parts)


def _odd(step: Sequence[ObservedCall], letters: str, *, stage: str) -> list[str]:
    found: list[str] = []
    if stage == "stage 1 by all-reduce":
        sent = sum(c.elems * c.elem_bytes for c, at in zip(step, letters, strict=True) if at == "A")
        found.append(f"all-reduces of {sent:,} bytes, although reduce-scatters would send half")
    if stage == "stage 3, gathered after the step":
        found.append("gathers after the step, which the next forward repeats")
    if not stage:
        found.append("no stage of ZeRO has this sequence")
    # Keys are group size and bucket elements, so that gathers pair with their sums.
    sums = Counter((c.ranks, c.elems) for c, at in zip(step, letters, strict=True) if at == "R")
    gathers = Counter(
        (c.ranks, c.elems * c.ranks)
        for c, at in zip(step, letters, strict=True)
        if at == "G" and c.kind.startswith("all_gather")
    )
    if sums and stage.startswith("stage"):
        # The median bucket shows how often this step gathers a bucket. Stage 3 gathers once, or
        # twice if it reshards after forward. Stages 1 and 2 gather once.
        rounds = [gathers[key] / count for key, count in sums.items() if gathers[key]]
        usual = max(1, round(sorted(rounds)[len(rounds) // 2])) if rounds else 1
        usual = min(usual, 1) if stage == "stage 1 or 2" else usual
        for key, count in gathers.items():
            if sums[key] and count > usual * sums[key]:
                found.append(
                    f"{count - usual * sums[key]} gathers too many of {key[1]:,} elements on "
                    f"{key[0]} ranks"
                )
    return found


def _sizes(calls: Sequence[ObservedCall]) -> list[tuple[int, int, int]]:
    """Count calls by message size on a ring, in bins with powers of four."""
    bins: Counter[int] = Counter()
    for call in calls:
        sent = float(sent_elems(call.kind, call.elems, call.ranks) * call.elem_bytes)
        if call.ranks < 2 or not sent:
            continue
        each, power = sent / max(1, call.ranks - 1), 1
        while each >= power * 4:
            power *= 4
        bins[power] += 1
    return [(power, power * 4, count) for power, count in sorted(bins.items())]
