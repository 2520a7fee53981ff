"""Ownership, rank by rank: who holds what, and where, as engines report before the first step."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain

from zero_sim.findings.records import Finding
from zero_sim.judge.checks import invariants
from zero_sim.judge.facts import Facts
from zero_sim.judge.positions import Arrangements, members_of, sum_spans
from zero_sim.reference import Addresses, Holding, Orders, SumSite
from zero_sim.scenario.copies import state_copies
from zero_sim.scenario.spec import Scenario
from zero_sim.targets import Place

_TIED = (
    "the engine has this tied param under its other name {other!r}, too. Register a tied param "
    "once, as module.named_parameters() does"
)


class Ownership:
    """The ranks of a group, and what each of them holds.

    Args:
        scenario: The case that is judged.
        held: For every rank, the names of the params that it is to hold. It is the reference that
            knows that, never the system.
    """

    def __init__(self, scenario: Scenario, *, held: Sequence[frozenset[str]]) -> None:
        self._scenario = scenario
        self.held = held
        self.places: dict[int, list[Place]] = {}
        """By rank: what it owns of the optimizer."""
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Of all working params."""
        self.arrangements: Arrangements | None = None
        """How communicators add, by the ranks of each; None where nobody looked."""
        self._addresses: dict[int, Addresses] = {}
        self._starts: dict[int, Mapping[str, str]] = {}
        self._tied_parts: dict[str, str] = {}
        """Another name of each tied param that some rank owns under it, by its first name."""

    def note_facts(self, rank: int, facts: Facts) -> None:
        """Note what a rank's engine says.

        Args:
            rank: The rank, within the group.
            facts: What it says.
        """
        self.places[rank] = list(facts.places)
        self._addresses[rank] = facts.addresses
        self._starts[rank] = facts.start
        self.shapes |= facts.shapes
        self._tied_parts |= {name: other for other, name in facts.tied_parts.items()}

    @property
    def are_all_there(self) -> bool:
        """Whether every rank has built its engine and told of it."""
        return len(self.places) == self._scenario.world.size

    @property
    def addresses(self) -> list[Addresses]:
        """Where the working params of each rank lie."""
        return [self._addresses[rank] for rank in sorted(self._addresses)]

    @cached_property
    def sharings(self) -> list[tuple[tuple[int, ...], frozenset[str]]]:
        """The ranks that hold params together, and which: dense ones, and each share of experts."""
        names_of: dict[tuple[int, ...], set[str]] = {}
        for name in frozenset[str]().union(*self.held):
            ranks = tuple(rank for rank, names in enumerate(self.held) if name in names)
            names_of.setdefault(ranks, set()).add(name)
        return [(ranks, frozenset(names)) for ranks, names in sorted(names_of.items())]

    def places_beside(self, param: str | None) -> dict[int, list[Place]]:
        """What each of the ranks that hold a param owns, by rank; empty if none holds it.

        Args:
            param: Its name.
        """
        ranks = next((ranks for ranks, names in self.sharings if param in names), ())
        return {rank: self.places[rank] for rank in ranks if rank in self.places}

    def check(self, step: int, *, tell_parts: bool) -> Iterator[Finding]:
        """Check that each element of a param has one owner a replica, and that holders begin alike.

        Args:
            step: The step before which this is.
            tell_parts: Whether engines say what they own.
        """
        named = {
            rank: {**addresses, **{place.param: None for place in self.places[rank]}}
            for rank, addresses in self._addresses.items()
        }
        yield from invariants.check_held(named, held=self.held, step=step)
        yield from invariants.check_start(self._starts, step=step)
        for ranks, names in self.sharings if tell_parts else ():
            for finding in invariants.check_ownership(
                self._replicas(ranks, names),
                shapes={name: shape for name, shape in self.shapes.items() if name in names},
                step=step,
            ):
                other = self._tied_parts.get(finding.param or "")
                why = self._who_owns() if other is None else _TIED.format(other=other)
                yield replace(finding, message=f"{finding.message}; {why}")

    def _who_owns(self) -> str:
        """Who is to own what, by what the case asks for, and how a target says otherwise."""
        system = self._scenario.system
        if system.stage == 0:
            return (
                "expected parts() of every rank to give each element once: at system.stage = 0 "
                "every rank keeps all optimizer state; a target that shards it "
                "declares Capabilities(stages=(1,))"
            )
        copies = (
            f"with system.redundancy = {system.redundancy}, each block of "
            f"{self._scenario.world.size // system.redundancy} consecutive ranks shares it out"
            if state_copies(system) > 1
            else "with system.state_over = 'all', all ranks together share it out"
            if system.redundancy > 1
            else "with system.redundancy = 1, all ranks together share it out"
        )
        return (
            "expected parts() of the ranks that share state to give each element once: at "
            f"system.stage = {system.stage} {copies}; a target that keeps all of it on every rank "
            "declares Capabilities(stages=(0,)), and one that keeps several copies follows "
            "scenario.system.redundancy and declares follows=('system.redundancy',)"
        )

    def orders(self) -> Orders:
        """Where every element of every param stands in the calls that add it."""
        orders = {name: [] for name in self.shapes}
        for ranks, names in self.sharings:
            # Replicas say the same; one of them is enough.
            places = self._replicas(ranks, names)[0].values()
            orders |= sum_spans(
                chain.from_iterable(places),
                replica_count=self._scenario.system.redundancy,
                ranks=ranks,
                arrangements=self.arrangements,
            )
        return orders

    def holdings(self) -> list[list[Holding]]:
        """What each rank of one replica owns, for norms that ranks take of that."""
        by_rank: dict[int, list[Holding]] = {}
        for ranks, names in self.sharings:
            for rank, places in self._replicas(ranks, names)[0].items():
                by_rank.setdefault(rank, []).extend(map(_holding, places))
        return [by_rank[rank] for rank in sorted(by_rank)]

    def holding_of(self, rank: int) -> list[Holding]:
        """Return what a rank owns; nothing if it has not reported that yet."""
        return list(map(_holding, self.places.get(rank, ())))

    def calls(self) -> Iterator[tuple[tuple[int, ...], SumSite]]:
        """The calls that add gradients: the ranks of the communicator, and a site in each call."""
        replica_count = self._scenario.system.redundancy
        for ranks, names in self.sharings:
            blocks, shards = members_of(ranks, replica_count=replica_count)
            places = self._replicas(ranks, names)[0].values()
            for spans in sum_spans(
                chain.from_iterable(places), replica_count=replica_count
            ).values():
                for span in spans:
                    yield from ((block, span.site) for block in blocks)
                    if span.replica_site is not None:
                        shard = 0 if span.site.kind == "all_reduce" else span.site.ends_on
                        yield shards[shard], span.replica_site

    def _replicas(
        self, ranks: Sequence[int], names: Collection[str]
    ) -> list[dict[int, list[Place]]]:
        """The ranks that hold all state of some params between them, replica by replica.

        Args:
            ranks: All that hold these params.
            names: The params; places of others are left out.
        """
        system = self._scenario.system
        replica_count = len(ranks) if system.stage == 0 else state_copies(system)
        share = len(ranks) // replica_count
        return [
            {
                rank: [place for place in self.places[rank] if place.param in names]
                for rank in ranks[start : start + share]
            }
            for start in range(0, len(ranks), share)
        ]


def _holding(place: Place) -> Holding:
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
