"""Recognition of wrong values as correct values from elsewhere, bit by bit.

Examples are another param's values, the values before the step, and an unreduced gradient. Such a
match identifies the mistake.

[Note: no match by chance]
Only differing elements are compared, at their own positions. At other positions, a match must be a
run of several elements with two different nonzero values. If several known tensors match, none is
reported.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import Tensor

from zero_sim.findings.compare import same_bits, spans_of, unequal
from zero_sim.sim.inflight.poison import poisoned

RUN_ELEMS_MIN, RUN_ELEMS_MAX = 4, 64
"""Length limits of a run that is searched at other positions. Shorter runs must match in full."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Known:
    """A correct tensor, as a candidate for a match."""

    what: str
    """Description, such as `that from before the step`."""
    values: Tensor
    start: int = 0
    """Offset of the compared position in the flattened `values`."""
    name: str = ""
    """Param name. If empty, values match only at `start`, not at other positions."""


def recognize(expected: Tensor, got: Tensor, *, known: Iterable[Known] = ()) -> str:
    """Describe the observed values, such as `is zero`; empty if they are not recognised.

    Args:
        expected: Any shape.
        got: Same number of elements and dtype, different bits.
        known: Candidates, used only if the values are neither zero nor poison.
    """
    wanted, came = expected.reshape(-1), got.reshape(-1)
    differs = unequal(wanted, came)
    # Equal elements are not evidence of where the others come from.
    bad = came[differs]
    if bool(poisoned(bad).all()):
        return "is poison of memory in flight, so it was read before its wait or never written"
    if not bool(bad.any()):
        return "is zero"
    # Step counts may be on the CPU although params are on a device.
    places = [replace(each, values=each.values.to(came.device)) for each in known]
    matches = [f"is {each.what}" for each in places if _holds(each, came, differs)]
    if not matches:
        # Same position first: a match elsewhere is weaker.
        matches = _elsewhere(came, differs, places)
    distinct = list(dict.fromkeys(matches))
    # Ambiguous matches identify nothing.
    return distinct[0] if len(distinct) == 1 else ""


def _holds(known: Known, came: Tensor, differs: Tensor) -> bool:
    """Return True if a candidate equals the observed values at all differing elements."""
    values = known.values.reshape(-1)[known.start : known.start + came.numel()]
    fits = values.dtype == came.dtype and values.numel() == came.numel()
    return fits and same_bits(values[differs], came[differs])


def _elsewhere(came: Tensor, differs: Tensor, places: Iterable[Known]) -> list[str]:
    """Describe the longest matches of the first differing run, or its beginning, elsewhere."""
    start, stop = spans_of(differs)[0]
    # A limit on the run bounds the search time.
    run = came[start : min(stop, start + RUN_ELEMS_MAX)]
    least = min(run.numel(), RUN_ELEMS_MIN)
    found: dict[str, int] = {}
    for each in places:
        values = each.values.reshape(-1)
        if not each.name or values.dtype != run.dtype:
            continue
        # A match can only begin at a position that has the run's first value.
        for first in (values == run[0]).nonzero().reshape(-1).tolist():
            there = values[first : first + run.numel()]
            unlike = unequal(there, run[: there.numel()]).nonzero()
            length = int(unlike[0]) if len(unlike) else there.numel()
            if length >= least and _is_distinctive(run[:length]):
                # "is" only if the run covers every differing element.
                verb = "is" if length == stop - start == int(differs.sum()) else "begins with"
                what = f"the expected elements [{first}, {first + length}) of param {each.name!r}"
                found[f"{verb} {what}"] = length
    # Longer matches are stronger evidence; ties are left to the caller.
    longest = max(found.values(), default=0)
    return [what for what, length in found.items() if length == longest]


def _is_distinctive(run: Tensor) -> bool:
    """Return True if a run has two different nonzero values, so it cannot match by chance."""
    return len(set(run[run != 0].tolist())) > 1
