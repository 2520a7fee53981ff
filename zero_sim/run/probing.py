"""Order probe: measures how a case's communicators add gradients.

The probe runs before the first step, after every rank has reported its gradients' layout. It
measures each call that adds gradients, with its size and communicator. For NCCL, it first recovers
the communicator's arrangement, which judges use. If a call adds differently from the arrangement,
or from the order's model, the case is not judged by this order.
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
"""Largest call to observe in full if it differs from the model."""

ARRANGED = ("nccl-ring",)
"""Orders in which each communicator has its own arrangement."""

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Recent versions of torch sort a new group's ranks, but group ranks decide the order of addition.
_UNSORTED: dict[str, Any] = (
    {"sort_ranks": False} if "sort_ranks" in signature(dist.new_group).parameters else {}
)


class OrderDrift(ZeroSimError):
    """A backend adds in an order that differs from the model that a case relies on."""

    def __init__(self, drifts: Sequence[str]) -> None:
        self.drifts = tuple(drifts)
        super().__init__("\n".join(drifts))


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """Calls, with equal kind and size, that a case relies on."""

    kind: Kind
    elems: int
    sizes: tuple[int, ...] = ()
    """Elements for each rank, for `reduce_scatter_list`."""


@dataclass(kw_only=True, slots=True)
class Known:
    """Measured order of a communicator, equal in all processes of the job."""

    arrangement: Arrangement | None = None
    verified: set[tuple[Need, str]] = field(default_factory=set)
    """Calls known to add in this order, with the dtype's name."""


def measure_orders(
    contexts: Sequence[GroupContext],
    scenario: Scenario,
    *,
    real_rank: RealRank,
    process_count: int,
    device: str,
    about: str,
) -> list[str]:
    """Measure how a case's communicators add, and set the result in its judges.

    All processes take part, also those outside the case's world. Judges need facts from every rank
    before. The case's order is the backend's own; `about` names this exchange within the case.

    Returns:
        The measured orders, in words.

    Raises:
        OrderDrift: A call adds differently. All processes raise it.
    """
    order = scenario.world.order
    found: list[list[Any]] = []
    needs = needs_of(contexts, order=order)
    # `needs` is sorted alike on all processes, because making a group is a collective call.
    for members, wanted in needs.items():
        known = real_rank.memory.setdefault(members, Known())
        new = [
            (need, dtype)
            for need in wanted
            for dtype in _dtypes_of(scenario)
            if (need, str(dtype)) not in known.verified
        ]
        # An earlier case has verified these calls: communicators of the same ranks add alike.
        if not new:
            continue
        group = _group_of(members, inside=real_rank.rank < scenario.world.size)
        if real_rank.rank in members:
            assert group is not None
            look = _Look(group=group, order=order, device=device, alive=real_rank.channel.alive)
            arrangement, drifts = look.at(known.arrangement, new)
            if real_rank.rank == members[0]:
                words = None if arrangement is None else arrangement.as_dict()
                # Plain lists, because exchanges are JSON.
                found.append([list(members), words, drifts])
        # The case still needs the world's own group.
        if group is not None and group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    # Each communicator's first rank reports, so that all processes know the same.
    all_found = real_rank.channel.exchange(found, size=process_count, about=about)
    drifts = []
    for ranks, words, wrong in (each for one in all_found for each in one):
        known = real_rank.memory[tuple(ranks)]
        known.arrangement = None if words is None else Arrangement.from_dict(words)
        # Later cases skip verified calls only.
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
    """Set the known arrangements in the judges, and return them in words."""
    words = []
    for context in contexts:
        ranks = context.dp_cp_group.ranks
        arrangements = {}
        for members in needs:
            seen = memory[members].arrangement
            if seen is not None and set(members) <= set(ranks):
                # Judges use group ranks.
                arrangements[tuple(ranks.index(rank) for rank in members)] = seen
        context.judge.group.ownership.arrangements = arrangements
    for members in needs:
        seen = memory[members].arrangement
        if seen is not None:
            words.append(f"probe: ranks {list(members)} add as {in_words(seen)}")
    return words


def needs_of(
    contexts: Sequence[GroupContext], *, order: str
) -> dict[tuple[int, ...], tuple[Need, ...]]:
    """Return the calls to measure, by the communicator's world ranks."""
    sites: dict[tuple[int, ...], set[SumSite]] = {}
    for context in contexts:
        ranks = context.dp_cp_group.ranks
        for members, site in context.judge.group.ownership.calls():
            # Two addends have only one order, so there is nothing to measure.
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
            # gloo adds coalesced calls like a single call.
            joined = site.joined_elems if order == "gloo" else None
            yield Need(kind="all_reduce", elems=joined or site.elems)
        elif site.kind == "reduce_scatter":
            yield Need(kind="reduce_scatter", elems=site.elems)
        else:
            entries[site.ends_on].add(site.elems)
    # Each list entry is reduced by itself, so one call can measure several sizes at once.
    columns = [sorted(each, reverse=True) for each in entries]
    for row in range(max(map(len, columns))):
        sizes = tuple(column[row] if row < len(column) else 0 for column in columns)
        yield Need(kind="reduce_scatter_list", elems=sum(sizes), sizes=sizes)


def _dtypes_of(scenario: Scenario) -> list[torch.dtype]:
    """Return the dtypes in which gradients may be added."""
    narrow = _DTYPES.get(scenario.model.dtype)
    return [torch.float32] if narrow is None else [torch.float32, narrow]


def _group_of(members: Sequence[int], *, inside: bool) -> dist.ProcessGroup | None:
    """Return the communicator, which every rank of the world must make; None outside the world."""
    if not inside:
        return None
    if len(members) == dist.get_world_size():
        return dist.group.WORLD
    group = dist.new_group(list(members), **_UNSORTED)
    return group if isinstance(group, dist.ProcessGroup) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Look:
    """Measurement of a communicator by its ranks."""

    group: dist.ProcessGroup
    order: Any
    device: str
    alive: Callable[[], None]

    def at(
        self, arrangement: Arrangement | None, calls: Sequence[tuple[Need, torch.dtype]]
    ) -> tuple[Arrangement | None, list[str]]:
        """Return the arrangement, if any, and the calls that add differently."""
        # Recover it once per communicator, then verify it for every call.
        if self.order in ARRANGED and arrangement is None:
            arrangement, words = arrangement_of(self.group, device=self.device)
            if arrangement is None:
                return None, [f"drift: expected an arrangement of {self.order}, observed {words}"]
        wrong = [each for each in calls if self.first_wrong(arrangement, *each) is not None]
        # Large calls may use more channels than the small call that recovered the arrangement.
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
        """Return a call's expected and observed order, in words."""
        what = f"{need.kind} of {need.elems} elements of {dtype}"
        # Verify again, because the call may not always add in the same order.
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
            # A measurement may take long, so give a sign of life to the other processes.
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
