"""Recognition of values that stand where others should, bit by bit.

Where a number is wrong, it is often a right one that belongs elsewhere: another param's, what was
there before the step, a gradient that nobody reduced. That says what the system did.

[Note: no match by chance]
Elements are compared at their own places, those alone that differ. A match elsewhere is looked for
only for a run of some elements, with two different values in it that are not zero. Where more than
one known thing has the bits, none is named.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import Tensor

from zero_sim.findings.compare import same_bits, spans_of, unequal
from zero_sim.sim.inflight.poison import poisoned

RUN_ELEMS_MIN, RUN_ELEMS_MAX = 4, 64
"""Elements of a run that is looked for elsewhere; all of one that is shorter."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Known:
    """Values that some right system has somewhere."""

    what: str
    """In words, as in `what it was before the step`."""
    values: Tensor
    start: int = 0
    """Offset in `values`, flattened, of what lies at the place that is compared."""
    name: str = ""
    """Of the param that they belong to, if a run may be looked for in all of them."""


def recognize(expected: Tensor, got: Tensor, *, known: Iterable[Known] = ()) -> str:
    """What came in place of what was expected, as in `is zero`; empty where that is not known.

    Args:
        expected: Any shape.
        got: Of the same number of elements and dtype, not the same bits.
        known: What it might be; only gone through where it is neither zero nor poison.
    """
    wanted, came = expected.reshape(-1), got.reshape(-1)
    differs = unequal(wanted, came)
    bad = came[differs]
    if bool(poisoned(bad).all()):
        return "is poison of memory in flight, so it was read before its wait or never written"
    if not bool(bad.any()):
        return "is zero"
    # Step counts may be on the CPU, beside params on a device.
    places = [replace(each, values=each.values.to(came.device)) for each in known]
    matches = [f"is {each.what}" for each in places if _holds(each, came, differs)]
    if not matches:
        matches = _elsewhere(came, differs, places)
    distinct = list(dict.fromkeys(matches))
    return distinct[0] if len(distinct) == 1 else ""


def _holds(known: Known, came: Tensor, differs: Tensor) -> bool:
    """Whether it has, at the place that is compared, what came where that differs."""
    values = known.values.reshape(-1)[known.start : known.start + came.numel()]
    fits = values.dtype == came.dtype and values.numel() == came.numel()
    return fits and same_bits(values[differs], came[differs])


def _elsewhere(came: Tensor, differs: Tensor, places: Iterable[Known]) -> list[str]:
    """Where else the first run of what differs or the longest beginning of it stands."""
    start, stop = spans_of(differs)[0]
    run = came[start : min(stop, start + RUN_ELEMS_MAX)]
    least = min(run.numel(), RUN_ELEMS_MIN)
    found: dict[str, int] = {}
    for each in places:
        values = each.values.reshape(-1)
        if not each.name or values.dtype != run.dtype:
            continue
        for first in (values == run[0]).nonzero().reshape(-1).tolist():
            there = values[first : first + run.numel()]
            unlike = unequal(there, run[: there.numel()]).nonzero()
            length = int(unlike[0]) if len(unlike) else there.numel()
            if length >= least and _tells(run[:length]):
                verb = "is" if length == stop - start == int(differs.sum()) else "begins with"
                what = f"what elements [{first}, {first + length}) of param {each.name!r}"
                found[f"{verb} {what} should have"] = length
    longest = max(found.values(), default=0)
    return [what for what, length in found.items() if length == longest]


def _tells(run: Tensor) -> bool:
    """Whether a run of values is not found in any place by chance."""
    return len(set(run[run != 0].tolist())) > 1
