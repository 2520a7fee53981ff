"""Order probe of a case: measures how its communicators add gradients.

The probe runs before the first step, after every rank has reported its gradients' layout. It
measures each call that adds gradients, in its size, over its communicator. The arrangement of a
NCCL communicator is recovered first and given to the judges. If a call adds differently from the
arrangement, or from the model of the order, the case is not judged by that order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero_sim.backends.arranging import arrangement_of, in_words, with_channels
from zero_sim.backends.probe import Kind, Pieces, Reduction, Values, by_calling, observe, verify
from zero_sim.backends.probe_models import pieces_of, text_of
from zero_sim.backends.real import RealRank
from zero_sim.errors import ZeroSimError
from zero_sim.reference import Arrangement, SumSite
from zero_sim.run.program import GroupContext
from zero_sim.scenario.spec import Scenario

OBSERVED_ELEMS_MAX = 4096
"""Largest call whose order is fully observed if it differs from the model."""

ARRANGED = ("nccl-ring",)
"""Orders whose communicators have their own arrangements."""

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Group ranks decide the order of addition. Recent versions of torch sort ranks by default.
_UNSORTED: dict[str, Any] = (
    {"sort_ranks": False} if "sort_ranks" in signature(dist.new_group).parameters else {}
)


class OrderDrift(ZeroSimError):
    """A backend adds in another order than the model that a case relies on."""

    def __init__(self, drifts: Sequence[str]) -> None:
        self.drifts = tuple(drifts)
        super().__init__("\n".join(drifts))


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """Calls of one size that a case relies on."""

    kind: Kind
    elems: int
    sizes: tuple[int, ...] = ()
    """Elements for each rank, for `reduce_scatter_list`."""


@dataclass(kw_only=True, slots=True)
class Known:
    """Measured order of a communicator, equal in all processes of the job."""

    arrangement: Arrangement | None = None
    verified: set[tuple[Need, str]] = field(default_factory=set)
    """Calls that add as known, with the name of their dtype."""


def measure_orders(
    contexts: Sequence[GroupContext],
    scenario: Scenario,
    *,
    real_rank: RealRank,
    process_count: int,
    device: str,
    about: str,
) -> list[str]:
    """Measure how all communicators of a case add, and give the result to its judges.

    Args:
        contexts: Contexts of the case, with facts of every rank.
        scenario: The case; its order is the backend's own.
        real_rank: This process, inside or outside the world of the case.
        process_count: Number of processes that take part.
        device: Device of the data.
        about: Name of this exchange within the case.

    Returns:
        The measured orders, in words.

    Raises:
        OrderDrift: A call adds differently. Raised by all processes.
    """
    order = scenario.world.order
    found: list[list[Any]] = []
    needs = needs_of(contexts, order=order)
    # In the same order on all processes, because making a group is a collective call.
    for members, wanted in needs.items():
        known = real_rank.memory.setdefault(members, Known())
        new = [
            (need, dtype)
            for need in wanted
            for dtype in _dtypes_of(scenario)
            if (need, str(dtype)) not in known.verified
        ]
        # Verified by an earlier case: communicators of the same ranks add alike.
        if not new:
            continue
        group = _group_of(members, inside=real_rank.rank < scenario.world.size)
        if real_rank.rank in members:
            assert group is not None
            look = _Look(group=group, order=order, device=device, alive=real_rank.channel.alive)
            arrangement, drifts = look.at(known.arrangement, new)
            if real_rank.rank == members[0]:
                told = None if arrangement is None else arrangement.as_dict()
                # As plain lists, because exchanges are JSON.
                found.append([list(members), told, drifts])
        # The world's own group is still needed by the case.
        if group is not None and group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    # Only the first rank of each communicator reports, and all processes learn the same.
    all_found = real_rank.channel.exchange(found, size=process_count, about=about)
    drifts = []
    for ranks, told, wrong in (each for one in all_found for each in one):
        known = real_rank.memory[tuple(ranks)]
        known.arrangement = None if told is None else Arrangement.from_dict(told)
        # Only verified calls are skipped in later cases.
        if not wrong:
            for need in needs[tuple(ranks)]:
                known.verified |= {(need, str(dtype)) for dtype in _dtypes_of(scenario)}
        drifts += [f"{drift}, over ranks {list(ranks)}" for drift in wrong]
    if drifts:
        raise OrderDrift(drifts)
    return _set_arrangements(contexts, needs, real_rank.memory)


def _set_arrangements(
    contexts: Sequence[GroupContext],
    needs: Mapping[tuple[int, ...], Sequence[Need]],
    memory: Mapping[tuple[int, ...], Known],
) -> list[str]:
    """Give the known arrangements to the judges; return them in words."""
    told = []
    for context in contexts:
        ranks = context.dp_cp_group.ranks
        arrangements = {}
        for members in needs:
            seen = memory[members].arrangement
            if seen is not None and set(members) <= set(ranks):
                # Judges count ranks within their group.
                arrangements[tuple(ranks.index(rank) for rank in members)] = seen
        context.judge.group.ownership.arrangements = arrangements
    for members in needs:
        seen = memory[members].arrangement
        if seen is not None:
            told.append(f"probe: ranks {list(members)} add as {in_words(seen)}")
    return told


def needs_of(
    contexts: Sequence[GroupContext], *, order: str
) -> dict[tuple[int, ...], tuple[Need, ...]]:
    """Return the calls that add gradients, by the world ranks of their communicator.

    Communicators of two ranks are omitted.
    """
    sites: dict[tuple[int, ...], set[SumSite]] = {}
    for context in contexts:
        ranks = context.dp_cp_group.ranks
        for members, site in context.judge.group.ownership.calls():
            # Two addends have one order only.
            if len(members) > 2:
                sites.setdefault(tuple(ranks[rank] for rank in members), set()).add(site)
    return {
        members: tuple(sorted(set(_needs_of(of, size=len(members), order=order)), key=_sorting))
        for members, of in sorted(sites.items())
    }


def _sorting(need: Need) -> tuple[Any, ...]:
    return need.kind, need.elems, need.sizes


def _needs_of(sites: set[SumSite], *, size: int, order: str) -> Iterator[Need]:
    # A list has an entry for each rank.
    entries: list[set[int]] = [set() for _ in range(size)]
    for site in sites:
        if site.kind == "all_reduce":
            # gloo adds a coalesced call as one.
            joined = site.joined_elems if order == "gloo" else None
            yield Need(kind="all_reduce", elems=joined or site.elems)
        elif site.kind == "reduce_scatter":
            yield Need(kind="reduce_scatter", elems=site.elems)
        else:
            entries[site.ends_on].add(site.elems)
    # Each entry is reduced by itself, whichever others are in its list.
    columns = [sorted(each, reverse=True) for each in entries]
    for row in range(max(map(len, columns))):
        sizes = tuple(column[row] if row < len(column) else 0 for column in columns)
        yield Need(kind="reduce_scatter_list", elems=sum(sizes), sizes=sizes)


def _dtypes_of(scenario: Scenario) -> list[torch.dtype]:
    """Return the dtypes in which gradients may be added."""
    narrow = _DTYPES.get(scenario.model.dtype)
    return [torch.float32] if narrow is None else [torch.float32, narrow]


def _group_of(members: Sequence[int], *, inside: bool) -> dist.ProcessGroup | None:
    """Return the communicator, made by every rank of the world; None outside the world."""
    if not inside:
        return None
    if len(members) == dist.get_world_size():
        return dist.group.WORLD
    group = dist.new_group(list(members), **_UNSORTED)
    return group if isinstance(group, dist.ProcessGroup) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Look:
    """Measurement of one communicator by its ranks."""

    group: dist.ProcessGroup
    order: Any
    device: str
    alive: Callable[[], None]

    def at(
        self, arrangement: Arrangement | None, calls: Sequence[tuple[Need, torch.dtype]]
    ) -> tuple[Arrangement | None, list[str]]:
        """Return its arrangement, if it has one, and the calls that add differently."""
        # Recovered once per communicator, then verified for every call.
        if self.order in ARRANGED and arrangement is None:
            arrangement, told = arrangement_of(self.group, device=self.device)
            if arrangement is None:
                return None, [f"drift: expected an arrangement of {self.order}, observed {told}"]
        wrong = [each for each in calls if self.first_wrong(arrangement, *each) is not None]
        # Large calls may use more channels than those recovered from a small call.
        if wrong and arrangement is not None and len(arrangement.rings) == 1:
            for wider in with_channels(arrangement):
                if all(self.first_wrong(wider, *each) is None for each in wrong) and all(
                    self.first_wrong(wider, *each) is None for each in calls
                ):
                    return wider, []
        return arrangement, [self.drift(arrangement, *each) for each in wrong]

    def first_wrong(
        self, arrangement: Arrangement | None, need: Need, dtype: torch.dtype
    ) -> int | None:
        """Return the first element that a call adds differently; None if there is none."""
        return verify(
            self._reduction(need),
            self._pieces(arrangement, need, dtype),
            rank_count=self.group.size(),
            elems=need.elems,
            dtype=dtype,
        )

    def drift(self, arrangement: Arrangement | None, need: Need, dtype: torch.dtype) -> str:
        """Return the expected and the observed order of a call, in words."""
        what = f"{need.kind} of {need.elems} elements of {dtype}"
        # Once more, because the call may not add in the same order each time.
        element = self.first_wrong(arrangement, need, dtype)
        if element is None:
            return f"{what}: drift: expected the same order each time, got another one before"
        wanted = next(
            text_of(tree)
            for start, stop, tree in self._pieces(arrangement, need, dtype)
            if start <= element < stop
        )
        got = "another one"
        if need.elems <= OBSERVED_ELEMS_MAX:
            seen = observe(
                self._reduction(need), rank_count=self.group.size(), elems=need.elems, dtype=dtype
            )
            got = f"tree {seen.tree_of(element)}"
            if seen.accumulator != "data":
                got += f" with partial sums {seen.accumulator}"
        return (
            f"{what}: drift: expected {wanted} as in {self.order}, observed {got}, "
            f"at element {element}"
        )

    def _reduction(self, need: Need) -> Reduction:
        reduce = by_calling(
            need.kind, group=self.group, elems=need.elems, device=self.device, sizes=need.sizes
        )

        def signed(values: Values) -> Tensor:
            # A measurement may take long, so show the others that this process is alive.
            self.alive()
            return reduce(values)

        return signed

    def _pieces(self, arrangement: Arrangement | None, need: Need, dtype: torch.dtype) -> Pieces:
        return pieces_of(
            need.kind,
            order=self.order,
            rank_count=self.group.size(),
            elems=need.elems,
            sizes=need.sizes,
            elem_bytes=dtype.itemsize,
            arrangement=arrangement,
        )
