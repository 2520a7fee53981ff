"""Closed form of grad units: gradients that share a reduce buffer, and their owners.

It needs only the scenario and param sizes, not the code under test.
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
    """A grad unit: gradients that are reduced together. All ranks have the same units."""

    names: tuple[str, ...]
    """Params in the expected order of arrival."""
    kind: str
    turn: int
    """Index among units with the same kind and dtype."""
    runs: tuple[int, ...]
    """Elements in each contiguous run with a single owner."""
    buffer_elems: int
    """Elements in memory: a reduce buffer, or only these gradients if `has_own_memory`."""
    has_own_memory: bool
    is_summed_unsharded: bool
    group_size: int
    grad_dtype: str
    grad_bytes: int

    @property
    def elems(self) -> int:
        """Elements in the unit."""
        return sum(self.runs)

    @property
    def sum_calls(self) -> list[Call]:
        """Calls that reduce the unit."""
        if self.is_summed_unsharded:
            return [("all_reduce", self.group_size, self.elems)]
        # A reduce per run, because each owner receives only its own runs.
        return [("reduce", self.group_size, elems) for elems in self.runs]


def grad_forms(
    sizes: Sequence[ParamSize], *, scenario: Scenario, rank: int
) -> tuple[GradForm, ...]:
    """Return all grad units as backward completes them; arguments as for `bucket_forms`."""
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
        # Each kind and dtype has its own buffers, as in `forms.by_buffer`.
        if sum(elems_of[name] for name in waiting.get(lane, ())) + size.elems > longest:
            # Close the unit rather than split the gradient. A gradient longer than the buffer gets
            # its own unit.
            flush(lane)
        waiting.setdefault(lane, []).append(size.name)
    for lane in [*waiting]:
        flush(lane)
    # A unit is complete at its last arrival, so sort by these, over all lanes.
    return tuple(sorted(made, key=lambda form: last_of[form.names[-1]]))


def buffer_turns(scenario: Scenario) -> int:
    """Return how many reduce buffers there are."""
    # With overlap, one buffer is reduced while the other fills.
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
    # A gradient that is longer than the buffer, or is not copied, stays in its own memory.
    is_own = sum(elems) > system.reduce_buffer_elems or not system.contiguous_grads
    return GradForm(
        names=tuple(names),
        kind=homes[0].kind,
        turn=turn,
        runs=tuple(
            # Adjacent parts with the same owner are one run, even over several params.
            sum(count for _, count in run)
            for _, run in groupby(owned, key=lambda each: each[0])
        ),
        buffer_elems=sum(elems) if is_own else system.reduce_buffer_elems,
        has_own_memory=is_own,
        is_summed_unsharded=homes[0].is_summed_unsharded,
        group_size=homes[0].group_size,
        grad_dtype=homes[0].grad_dtype,
        grad_bytes=homes[0].grad_bytes,
    )


def _owners(name: str, home: BucketForm, elems: int) -> Iterator[tuple[int, int]]:
    """Yield (shard, elements) for the owners of a param, in order."""
    start = dict(home.starts)[name]
    return home.cuts.owners_of(start, start + elems)
