"""The simulated cluster as its process groups see it: every call into the world comes in here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zero_sim.errors import UsageError
from zero_sim.sim.call import IN_PLACE, SPARSE, Call
from zero_sim.sim.callsite import call_site, here, is_of_torch, site_of
from zero_sim.sim.comm.rendezvous import DEFAULT_GROUP, Group, Message, deliver
from zero_sim.sim.contract.groups import foreign_group
from zero_sim.sim.failures import WorldFailure
from zero_sim.sim.faults import InjectedCrash, StalledByPlan
from zero_sim.sim.inflight.races import unwatched
from zero_sim.sim.inflight.snapshots import flights_of
from zero_sim.sim.inflight.work import Leg, SimWork
from zero_sim.sim.log import CollectiveRecord
from zero_sim.sim.world.outside import running_rank
from zero_sim.sim.world.rank_threads import starter
from zero_sim.sim.world.run import Run


class SimCluster:
    """What process groups need of the world; `Cluster`.

    Args:
        run: The run that goes on; the world puts another one in its place for the next program.
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    def note_destroyed(self, group: Group, group_rank: int) -> None:
        """Note that a member destroyed its side of a group; `Cluster.note_destroyed`."""
        world = group.name == DEFAULT_GROUP
        self.run.book.note_destroyed(group.ranks[group_rank], group.label, here(), world=world)

    def used_after_destroy(self, group: Group, group_rank: int, kind: str) -> WorldFailure:
        """The error for using a destroyed group; `Cluster.used_after_destroy`."""
        rank = group.ranks[group_rank]
        failure = self.run.book.use_after_destroy(rank, kind, here(), label=group.label)
        assert failure is not None
        return self.run.fail(failure)

    def issue(self, group: Group, group_rank: int, call: Call, *, asynchronous: bool) -> SimWork:
        """Issue one rank's side of a collective; `Cluster.issue`."""
        rank = group.ranks[group_rank]
        self._check_own(rank, group, call.kind)
        baton = self.run.baton
        baton.advance()
        call.file, call.line = call_site()
        self._strike(rank, group, group_rank, call)
        try:
            with unwatched():
                collective, sequence = group.issue(group_rank, call)
        except WorldFailure as failure:
            error = self.run.fail(failure)
            # A log that lacks the call which ended the run would not show why it ended.
            sequence = group.issued_by(group_rank) - 1
            self._record(rank, group, call, sequence, asynchronous, _detail(call))
            self.run.log.refused = len(self.run.log.collectives) - 1
            raise error from None
        full = not collective.missing_count
        record = self._record(rank, group, call, sequence, asynchronous, _detail(call))
        # A sparse tensor's memory is made anew by what is written to it, so nothing can be lent.
        at_once = baton.timing is None or call.kind == SPARSE
        if at_once and full:
            with unwatched(), torch.inference_mode():
                collective.perform(self.run.order)
            baton.finish(collective)
        leg = Leg(collective, len(self.run.log.collectives) - 1)
        if call.kind != SPARSE and (baton.timing is not None or self.run.races):
            self._lend(
                leg,
                call,
                rank=rank,
                place=group_rank,
                group_size=len(group.ranks),
                what=f"{call.kind} #{sequence} of group {group.label}",
                key=f"{group.name}|{sequence}",
                full=full,
            )
        work = SimWork(baton, rank, [leg], call.outputs or call.inputs, self.run.flights[rank])
        work.timeout_seconds = call.timeout_seconds
        if asynchronous:
            work.is_of_torch = is_of_torch()
            work.promise([self.run.promises.make(record)])
        return work

    def _check_own(self, rank: int, group: Group, kind: str) -> None:
        """Check that a rank uses its own side of a group.

        Raises:
            ContractViolation: It is another rank's.
            UsageError: The thread that calls is no rank.
        """
        try:
            caller = running_rank()
        except UsageError as error:
            if (by := starter()) is not None and by.run is self.run:
                self.run.refuse(by.rank, error)
            raise
        if caller != rank:
            raise self.run.fail(foreign_group(caller, rank, group.label, f"{kind} at {here()}"))

    def _strike(self, rank: int, group: Group, group_rank: int, call: Call) -> None:
        """Let the faults happen that are due at a call; those of its data go with it."""
        what = f"{call.kind} #{group.issued_by(group_rank)} of group {group.label}"
        strikes = self.run.injector.due(rank, call, what=what)
        for strike in strikes:
            if strike.fault.kind == "crash":
                strike.fired("the rank raised InjectedCrash")
                raise InjectedCrash(f"crashed by plan {strike.when}")
            if strike.fault.kind == "stall":
                strike.fired("the rank never came to it")
                stalled = StalledByPlan(strike.when)
                self.run.baton.wait_for(rank, stalled, site_of(call.file, call.line))
        if call.kind == SPARSE:
            for strike in strikes:
                strike.missed("the tensors of this call are sparse, whose data no fault changes")
            return
        call.strikes = strikes

    def send(
        self, group: Group, group_rank: int, peer: int, *, tag: int, tensor: Tensor
    ) -> SimWork:
        """Issue a send; `Cluster.send`."""
        call = Call(kind="send", inputs=[tensor])
        return self._exchange(group, group_rank, peer, tag, call, group.send)

    def receive(
        self, group: Group, group_rank: int, peer: int | None, *, tag: int, tensor: Tensor
    ) -> SimWork:
        """Issue a receive; `Cluster.receive`."""
        call = Call(kind="recv", inputs=[], outputs=[tensor])
        return self._exchange(group, group_rank, peer, tag, call, group.receive)

    def join_works(
        self, rank: int, works: Sequence[SimWork], *, result: Sequence[Any] | None = None
    ) -> SimWork:
        """One work for several; `Cluster.join_works`."""
        legs = [leg for work in works for leg in work._legs]
        tensors = [tensor for work in works for tensor in work._tensors]
        tensors = tensors if result is None else result
        joined = SimWork(self.run.baton, rank, legs, tensors, self.run.flights[rank])
        joined.promise([promise for work in works for promise in work._promises])
        return joined

    def _exchange(
        self,
        group: Group,
        group_rank: int,
        peer: int | None,
        tag: int,
        call: Call,
        post: Callable[..., tuple[Message, Message | None]],
    ) -> SimWork:
        rank = group.ranks[group_rank]
        self._check_own(rank, group, call.kind)
        baton = self.run.baton
        baton.advance()
        call.file, call.line = call_site()
        whom = "any" if peer is None else str(group.ranks[peer])
        try:
            with unwatched():
                message, met = post(group_rank, peer, tag=tag, call=call)
        except WorldFailure as failure:
            error = self.run.fail(failure)
            self._record(rank, group, call, tag, True, f"peer {whom}")
            self.run.log.refused = len(self.run.log.collectives) - 1
            raise error from None
        side = "to" if call.kind == "send" else "from"
        record = self._record(rank, group, call, tag, True, f"peer {whom}")
        if baton.timing is None and met is not None:
            with unwatched(), torch.inference_mode():
                deliver(message, met)
            baton.finish(met)
        leg = Leg(message, len(self.run.log.collectives) - 1)
        if baton.timing is not None or self.run.races:
            self._lend(
                leg,
                call,
                rank=rank,
                place=0 if call.kind == "send" else 1,
                group_size=2,
                what=f"{call.kind} {side} rank {whom} in group {group.label}",
                key=f"{group.name}|{group_rank}|{group.count_message(group_rank)}",
                joins=met,
                full=met is not None,
            )
        work = SimWork(baton, rank, [leg], call.outputs or call.inputs, self.run.flights[rank])
        work.promise([self.run.promises.make(record)])
        return work

    def _lend(
        self,
        leg: Leg,
        call: Call,
        *,
        rank: int,
        place: int,
        group_size: int,
        what: str,
        key: str,
        full: bool,
        joins: Message | None = None,
    ) -> None:
        """Note what memory an operation has until it is waited for; leave the rest to the timing.

        The arguments are those of `Timing.issue`.
        """
        timing = self.run.baton.timing
        if timing is not None:
            leg.side = timing.issue(
                leg.awaited,
                call,
                rank=rank,
                place=place,
                group_size=group_size,
                record=leg.record,
                what=what,
                key=key,
                joins=joins,
                full=full,
            )
            leg.flights = leg.side.loan.flights
            return
        leg.flights = flights_of(call, what=what, group_rank=place, group_size=group_size)
        for flight in leg.flights:
            self.run.flights[rank].take_off(flight)

    def _record(
        self, rank: int, group: Group, call: Call, sequence: int, asynchronous: bool, detail: str
    ) -> CollectiveRecord:
        tensors = call.inputs or call.outputs
        # Without outputs of their own, these write into their inputs.
        written = call.inputs if call.kind in IN_PLACE else call.outputs
        record = CollectiveRecord(
            rank,
            call.kind,
            group.label,
            group.ranks,
            sequence,
            str(tensors[0].dtype).removeprefix("torch.") if tensors else "none",
            sum(tensor.numel() for tensor in tensors),
            tensors[0].element_size() if tensors else 0,
            detail,
            asynchronous,
            call.file,
            call.line,
            sum(tensor.numel() for tensor in written),
        )
        self.run.log.add(record)
        self.run.log.note(rank, "issue", len(self.run.log.collectives) - 1)
        return record


def _detail(call: Call) -> str:
    if call.reduce_op is not None:
        name = call.reduce_op.name
        return f"{name} root {call.root}" if call.kind == "reduce" else name
    return f"root {call.root}" if call.kind in ("broadcast", "scatter", "gather") else ""
