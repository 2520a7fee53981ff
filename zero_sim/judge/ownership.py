"""Param ownership, as engines report it before the first step."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain, pairwise
from math import prod

from torch import Tensor

from zero_sim.findings.dataflow import Phase
from zero_sim.findings.records import Finding
from zero_sim.judge.drawn import check_drawn
from zero_sim.judge.facts import Facts
from zero_sim.judge.positions import Arrangements, members_of, sum_spans
from zero_sim.reference import Addresses, Holding, Orders, SumSite
from zero_sim.scenario.checks import Check
from zero_sim.scenario.spec import Scenario
from zero_sim.targets import Place

_TIED = (
    "the engine also has this tied param under its other name {other!r}. Register a tied param "
    "once, as module.named_parameters() does"
)


class Ownership:
    """The params and places of each rank in a group.

    Args:
        scenario: The judged case.
        held: Names of the params that each rank must hold, according to the reference.
    """

    def __init__(self, scenario: Scenario, *, held: Sequence[frozenset[str]]) -> None:
        self._scenario = scenario
        self.held = held
        self.places: dict[int, list[Place]] = {}
        """Owned places of optimizer state, by rank."""
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Shapes of all working params."""
        self.can_unwrap = True
        """False if any rank's engine has no `unwrap`."""
        self.arrangements: Arrangements | None = None
        """Observed sum arrangements by communicator ranks; None if not observed."""
        self._addresses: dict[int, Addresses] = {}
        self._starts: dict[int, Mapping[str, str]] = {}
        self.drawn: dict[str, Tensor] = {}
        """Start values drawn by the system, each from the first rank that reported the param."""
        self._tied_parts: dict[str, str] = {}
        """Second name of each tied param that a rank owns under this name, by first name."""

    def note_facts(self, rank: int, facts: Facts) -> None:
        """Record a rank's facts.

        Args:
            rank: Group rank.
            facts: Facts about its engine.
        """
        self.places[rank] = list(facts.places)
        self.can_unwrap &= facts.can_unwrap
        self._addresses[rank] = facts.addresses
        self._starts[rank] = facts.start
        self.shapes |= facts.shapes
        # Keep the values of the first rank; `check_start` compares the others.
        self.drawn = {**facts.drawn, **self.drawn}
        self._tied_parts |= {name: other for other, name in facts.tied_parts.items()}

    @property
    def param_names(self) -> frozenset[str]:
        """Names of all params that the group trains."""
        return frozenset[str]().union(*self.held)

    @property
    def are_all_there(self) -> bool:
        """True if every rank has reported its facts."""
        return len(self.places) == self._scenario.world.size

    @property
    def addresses(self) -> list[Addresses]:
        """Addresses of working params, in rank order."""
        return [self._addresses[rank] for rank in sorted(self._addresses)]

    @cached_property
    def sharings(self) -> list[tuple[tuple[int, ...], frozenset[str]]]:
        """Pairs of ranks and the params that they share: dense params, and each expert group."""
        # Params with the same holders are sharded together.
        names_of: dict[tuple[int, ...], set[str]] = {}
        for name in self.param_names:
            ranks = tuple(rank for rank, names in enumerate(self.held) if name in names)
            names_of.setdefault(ranks, set()).add(name)
        return [(ranks, frozenset(names)) for ranks, names in sorted(names_of.items())]

    def places_beside(self, param: str | None) -> dict[int, list[Place]]:
        """Return the places of all ranks that hold a param, by rank; empty if none does."""
        ranks = next((ranks for ranks, names in self.sharings if param in names), ())
        return {rank: self.places[rank] for rank in ranks if rank in self.places}

    def check(self, step: int, *, has_parts: bool) -> Iterator[Finding]:
        """Check that each element has one owner per replica, and that all ranks start equal.

        Args:
            step: The next step, for findings.
            has_parts: True if engines report owned parts.
        """
        named = {
            # Names of working params and of owned state, because a rank may have either alone.
            rank: {**addresses, **{place.param: None for place in self.places[rank]}}
            for rank, addresses in self._addresses.items()
        }
        yield from check_held(named, held=self.held, step=step)
        yield from check_start(self._starts, step=step)
        yield from check_drawn(self.drawn, self.places, step=step)
        for ranks, names in self.sharings if has_parts else ():
            for finding in check_ownership(
                self._replicas(ranks, names),
                shapes={name: shape for name, shape in self.shapes.items() if name in names},
                step=step,
            ):
                # A tied param that is registered twice is a common cause, so name it.
                other = self._tied_parts.get(finding.param or "")
                why = self._who_owns() if other is None else _TIED.format(other=other)
                yield replace(finding, message=f"{finding.message}; {why}")

    def _who_owns(self) -> str:
        """Explain which ownership is expected, and how a target declares another."""
        system = self._scenario.system
        if system.stage == 0:
            return (
                "expected parts() of every rank to return each element once: at system.stage = 0 "
                "every rank keeps all optimizer state. A target that shards it "
                "declares Capabilities(stages=(1,))"
            )
        copies = (
            f"with system.redundancy = {system.redundancy}, each shard group of "
            f"{self._scenario.world.size // system.redundancy} consecutive ranks shares it"
            if system.redundancy > 1
            else "with system.redundancy = 1, all ranks share it"
        )
        return (
            "expected parts() of the ranks that share state to return each element once: at "
            f"system.stage = {system.stage} {copies}. A target that keeps all of it on every rank "
            "declares Capabilities(stages=(0,)). A target that keeps several replicas follows "
            "scenario.system.redundancy and declares follows=('system.redundancy',). If only some "
            "params are replicated, set replicas in their Place"
        )

    def orders(self) -> Orders:
        """Return each element's position in the calls that add it, by param."""
        orders = {name: [] for name in self.shapes}
        for ranks, names in self.sharings:
            # All replicas have the same layout, so use the first.
            places = _once(self._replicas(ranks, names)[0])
            orders |= sum_spans(
                chain.from_iterable(places.values()),
                replica_count=self._scenario.system.redundancy,
                ranks=ranks,
                arrangements=self.arrangements,
            )
        return orders

    def holdings(self) -> list[list[Holding]]:
        """Return the elements that each rank of a replica owns, for norms of shards."""
        by_rank: dict[int, list[Holding]] = {}
        for ranks, names in self.sharings:
            for rank, places in _once(self._replicas(ranks, names)[0]).items():
                by_rank.setdefault(rank, []).extend(map(_holding, places))
        return [by_rank[rank] for rank in sorted(by_rank)]

    def holding_of(self, rank: int) -> list[Holding]:
        """Return the elements that a rank owns; empty if it has not reported yet."""
        return list(map(_holding, self.places.get(rank, ())))

    def calls(self) -> Iterator[tuple[tuple[int, ...], SumSite]]:
        """Yield calls that add gradients, as communicator ranks and a position in the call."""
        replica_count = self._scenario.system.redundancy
        for ranks, names in self.sharings:
            blocks, shards = members_of(ranks, replica_count=replica_count)
            # All replicas make the same calls, so use the first.
            places = _once(self._replicas(ranks, names)[0])
            for spans in sum_spans(
                chain.from_iterable(places.values()), replica_count=replica_count
            ).values():
                for span in spans:
                    # Every shard group makes the same call.
                    yield from ((block, span.site) for block in blocks)
                    if span.replica_site is not None:
                        # The second sum is over the ranks with this shard, one per group.
                        shard = 0 if span.site.kind == "all_reduce" else span.site.ends_on
                        yield shards[shard], span.replica_site

    def _replicas(
        self, ranks: Sequence[int], names: Collection[str]
    ) -> list[dict[int, list[Place]]]:
        """Return the places of each replica, by rank.

        Args:
            ranks: All ranks that hold these params.
            names: Params to include.
        """
        system = self._scenario.system
        # At stage 0 every rank has all state, so each rank is a replica.
        replica_count = len(ranks) if system.stage == 0 else system.redundancy
        share = len(ranks) // replica_count
        return [
            {
                rank: [place for place in self.places[rank] if place.param in names]
                for rank in ranks[start : start + share]
            }
            for start in range(0, len(ranks), share)
        ]


def _once(held: Mapping[int, Sequence[Place]]) -> dict[int, list[Place]]:
    """Return all places by rank, but replicated places only at their first rank."""
    seen: set[tuple[str, int]] = set()
    once: dict[int, list[Place]] = {}
    for rank, places in held.items():
        once[rank] = [
            place
            for place in places
            if place.replicas == 1 or (place.param, place.start) not in seen
        ]
        seen |= {(place.param, place.start) for place in places}
    return once


def _holding(place: Place) -> Holding:
    # Norms of shards need the offset in the shard. Engines may not report enough for it.
    offset = elems = None
    if place.flat_start is not None and place.shard_start is not None:
        offset = place.flat_start - place.shard_start
    if place.shard_start is not None and place.shard_stop is not None:
        elems = place.shard_stop - place.shard_start
    return Holding(
        param=place.param,
        start=place.start,
        stop=place.stop,
        shard=(place.buffer, place.bucket or 0),
        offset=offset,
        shard_elems=elems,
    )


def check_ownership(
    replicas: Sequence[Mapping[int, Sequence[Place]]],
    *,
    shapes: Mapping[str, tuple[int, ...]],
    step: int,
) -> Iterator[Finding]:
    """Check that each replica owns each element once, or `Place.replicas` times.

    Args:
        replicas: Places by rank, for each replica of the optimizer state.
        shapes: Shapes of all trained params.
        step: The next step, for findings.
    """
    # In rank order, so that findings do not depend on the order of reports.
    for places in replicas:
        owned = [(rank, place) for rank in sorted(places) for place in places[rank]]
        for finding in _check_cover(owned, shapes=shapes):
            yield replace(finding, step=step)


def check_held(
    names: Mapping[int, Iterable[str]], *, held: Sequence[Collection[str]], step: int
) -> Iterator[Finding]:
    """Check that no rank holds a foreign param, such as another rank's expert.

    Args:
        names: Names of the params that a rank has, by rank.
        held: Names that it may have, in rank order.
        step: The next step, for findings.
    """
    for rank in sorted(names):
        for name in names[rank]:
            if name not in held[rank]:
                yield replace(
                    _ownership(name, 0, "this rank holds a param of other ranks"),
                    step=step,
                    rank=rank,
                )


def check_start(starts: Mapping[int, Mapping[str, str]], *, step: int) -> Iterator[Finding]:
    """Check that all holders of a param or buffer start with equal values.

    Args:
        starts: Digests of params and buffers, by rank and name.
        step: The next step, for findings.
    """
    # Compare with the first rank that has this name.
    first: dict[str, int] = {}
    for rank in sorted(starts):
        for name, digest in starts[rank].items():
            holder = first.setdefault(name, rank)
            if digest != starts[holder][name]:
                yield Finding(
                    check=Check.INVARIANT_START,
                    step=step,
                    rank=rank,
                    param=name,
                    message=f"this rank starts with other values than rank {holder}",
                )


def _check_cover(
    owned: Sequence[tuple[int, Place]], *, shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[Finding]:
    # Include params without places, because their elements have no owner.
    by_param: dict[str, list[tuple[int, Place]]] = {name: [] for name in shapes}
    for rank, place in owned:
        by_param.setdefault(place.param, []).append((rank, place))
    for name, held in by_param.items():
        numel = prod(shapes.get(name, (0,)))
        spans = [(place.start, place.stop, rank) for rank, place in held]
        for start, stop, ranks in _stretches(spans, numel=numel):
            # Places of an element must agree on the number of replicas. Without a place, expect 1.
            counts = {p.replicas for _, p in held if p.start < stop and start < p.stop} or {1}
            if counts != {len(ranks)} or len(set(ranks)) != len(ranks):
                of = "" if ranks else f" of {numel}"
                says = f"elements [{start}, {stop}){of} belong to {_owners(ranks)}"
                if counts != {1}:
                    says += f", with replicas = {' and '.join(map(str, sorted(counts)))}"
                yield _ownership(name, start, says, stop=stop)
        last, rank = max(((stop, rank) for _, stop, rank in spans), default=(0, 0))
        # `_stretches` clips places that are longer than their param, so report these here.
        if last > numel:
            says = f"rank {rank} owns elements up to {last} of a param with {numel}"
            yield _ownership(name, numel, says)


def _stretches(
    spans: Iterable[tuple[int, int, int]], *, numel: int
) -> list[tuple[int, int, tuple[int, ...]]]:
    """Cut a param into intervals with equal owners, as (start, stop, ranks).

    Args:
        spans: Start, stop and rank of each place.
        numel: Number of elements.
    """
    # Sweep over all edges and keep the current owners. A rank may occur twice.
    edges: dict[int, list[tuple[bool, int]]] = {0: [], numel: []}
    for start, stop, rank in spans:
        # Empty places own nothing. `_check_cover` reports places beyond the param.
        if start < min(stop, numel):
            edges.setdefault(start, []).append((True, rank))
            edges.setdefault(min(stop, numel), []).append((False, rank))
    found: list[tuple[int, int, tuple[int, ...]]] = []
    owners: list[int] = []
    for start, stop in pairwise(sorted(edges)):
        for begins, rank in edges[start]:
            if begins:
                owners.append(rank)
            else:
                owners.remove(rank)
        ranks = tuple(sorted(owners))
        # Merge neighbours with equal owners.
        before = found.pop() if found and found[-1][2] == ranks else (start, start, ranks)
        found.append((before[0], stop, ranks))
    return found


def _owners(ranks: Sequence[int]) -> str:
    """Describe owners for a message, such as `rank 1 alone`."""
    each = sorted(set(ranks))
    if not each:
        return "no rank"
    if len(each) == 1:
        return f"rank {each[0]}" + (" twice" if len(ranks) > 1 else " alone")
    return f"ranks {', '.join(map(str, each[:-1]))} and {each[-1]}"


def _ownership(param: str, offset: int, message: str, *, stop: int | None = None) -> Finding:
    return Finding(
        check=Check.INVARIANT_OWNERSHIP,
        message=message,
        # `check_ownership` and `check_held` set the step.
        step=0,
        phase=Phase.FORWARD,
        param=param,
        offset_in_param=offset,
        differ_spans=() if stop is None else ((offset, stop),),
    )
