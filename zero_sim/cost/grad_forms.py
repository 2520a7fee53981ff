"""Closed form of grad units: gradients that share a reduce buffer, and their owners.

Derived from the scenario and the sizes of the params only, without the code of the layout under
test.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from zero_sim.cost.forms import BucketForm, Call, ParamSize, bucket_forms
from zero_sim.scenario.derived import overlaps_grads
from zero_sim.scenario.spec import Scenario


@dataclass(frozen=True, kw_only=True, slots=True)
class GradForm:
    """Gradients that are reduced together; equal on all ranks."""

    names: tuple[str, ...]
    """Their params, in the expected order of arrival."""
    kind: str
    turn: int
    """Index among units of its kind and dtype."""
    runs: tuple[int, ...]
    """Elements of each contiguous run with a single owner."""
    buffer_elems: int
    """Length of their memory in elements: that of a reduce buffer, or their own length if
    `has_own_memory`."""
    has_own_memory: bool
    is_summed_whole: bool
    group_size: int
    grad_dtype: str
    grad_bytes: int

    @property
    def elems(self) -> int:
        """Number of elements."""
        return sum(self.runs)

    @property
    def sum_calls(self) -> list[Call]:
        """The calls that reduce the unit."""
        if self.is_summed_whole:
            return [("all_reduce", self.group_size, self.elems)]
        # One reduce per owner: each owner receives its runs only.
        return [("reduce", self.group_size, elems) for elems in self.runs]


def grad_forms(
    sizes: Sequence[ParamSize], *, scenario: Scenario, rank: int
) -> tuple[GradForm, ...]:
    """Return all grad units in order of completion; none without reduce buffers.

    Args:
        sizes: Trained params of the rank, in registration order.
        scenario: The case as its dp-cp group sees it.
        rank: Rank in the dp-cp group.
    """
    longest = scenario.system.reduce_buffer_elems
    if longest is None:
        return ()
    homes = {
        name: form
        for form in bucket_forms(sizes, scenario=scenario, rank=rank)
        for name in form.names_with_elems
    }
    elems_of = {size.name: size.elems for size in sizes}
    waiting: dict[tuple[str, str], list[str]] = {}
    made: list[GradForm] = []
    turns: dict[tuple[str, str], int] = {}
    last_of: dict[str, int] = {}

    def flush(lane: tuple[str, str]) -> None:
        names = waiting.pop(lane, [])
        if names:
            turn = turns[lane] = turns.get(lane, -1) + 1
            own = [homes[name] for name in names]
            made.append(
                _form(names, own, [elems_of[name] for name in names], turn, scenario=scenario)
            )

    # Backward reaches the last registered param first.
    for index, size in enumerate(reversed(sizes)):
        home = homes.get(size.name)
        if home is None:
            # An empty param moves nothing.
            continue
        last_of[size.name] = index
        lane = (home.kind, home.grad_dtype)
        # Kinds have different groups and dtypes different widths, so neither can share a buffer.
        if sum(elems_of[name] for name in waiting.get(lane, ())) + size.elems > longest:
            # Close the unit instead of splitting the gradient; a longer one gets its own unit.
            flush(lane)
        waiting.setdefault(lane, []).append(size.name)
    for lane in [*waiting]:
        flush(lane)
    # By last arrival, across lanes: the order in which units are complete.
    return tuple(sorted(made, key=lambda form: last_of[form.names[-1]]))


def buffer_turns(scenario: Scenario) -> int:
    """Return the number of reduce buffers: two if one is reduced while the other fills."""
    return 2 if overlaps_grads(scenario.system) else 1


def _form(
    names: Sequence[str],
    homes: Sequence[BucketForm],
    elems: Sequence[int],
    turn: int,
    *,
    scenario: Scenario,
) -> GradForm:
    system = scenario.system
    assert system.reduce_buffer_elems is not None
    owned = [
        each
        for name, home, count in zip(names, homes, elems, strict=True)
        for each in _owners(name, home, count)
    ]
    # Gradients longer than a buffer, and those not copied into one, keep autograd's memory.
    is_own = sum(elems) > system.reduce_buffer_elems or not system.contiguous_grads
    return GradForm(
        names=tuple(names),
        kind=homes[0].kind,
        turn=turn,
        runs=tuple(
            # Adjacent parts of one owner are one run, across params.
            sum(count for _, count in run)
            for _, run in groupby(owned, key=lambda each: each[0])
        ),
        buffer_elems=sum(elems) if is_own else system.reduce_buffer_elems,
        has_own_memory=is_own,
        is_summed_whole=homes[0].is_summed_whole,
        group_size=homes[0].group_size,
        grad_dtype=homes[0].grad_dtype,
        grad_bytes=homes[0].grad_bytes,
    )


def _owners(name: str, home: BucketForm, elems: int) -> Iterator[tuple[int, int]]:
    """Yield (shard, elements) for the owners of a param, in order."""
    start = dict(home.starts)[name]
    return home.cuts.owners_of(start, start + elems)
