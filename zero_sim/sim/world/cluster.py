"""Entry point for all calls of process groups into the simulated world."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zero_sim.errors import UsageError
from zero_sim.sim.call import IN_PLACE, SPARSE, Call
from zero_sim.sim.callsite import call_site, here, is_of_torch, site_of
from zero_sim.sim.comm.backend_options import present_devices
from zero_sim.sim.comm.rendezvous import DEFAULT_GROUP, Group, Message
from zero_sim.sim.contract.groups import foreign_group
from zero_sim.sim.failures import WorldFailure
from zero_sim.sim.faults import DueFault, InjectedCrash, StalledByPlan
from zero_sim.sim.inflight.poison import poison
from zero_sim.sim.inflight.timing import aside
from zero_sim.sim.inflight.work import SimWork, join_works
from zero_sim.sim.log import CollectiveRecord
from zero_sim.sim.roles import overwritten_inputs
from zero_sim.sim.streams import finish_streams
from zero_sim.sim.waits import Pending
from zero_sim.sim.world.rank_threads import running_rank, starter
from zero_sim.sim.world.run import Run


class SimCluster:
    """Implements `Cluster` for simulated process groups."""

    def __init__(self, run: Run) -> None:
        # The world replaces it for each program.
        self.run = run

    def note_destroyed(self, group: Group, group_rank: int) -> None:
        """See `Cluster.note_destroyed`."""
        world = group.name == DEFAULT_GROUP
        self.run.group_registry.note_destroyed(
            group.ranks[group_rank], group.label, here(), world=world
        )

    def note_aborted(self, group: Group, group_rank: int) -> None:
        """Do nothing, because no call needs an abort to end."""

    def device_kinds(self) -> Sequence[str]:
        """Return the CPU and the kind of this machine's accelerator, if any."""
        return present_devices()

    def used_after_destroy(self, group: Group, group_rank: int, kind: str) -> WorldFailure:
        """See `Cluster.used_after_destroy`."""
        rank = group.ranks[group_rank]
        failure = self.run.group_registry.use_after_destroy(rank, kind, here(), label=group.label)
        assert failure is not None
        return self.run.fail(failure)

    def issue(self, group: Group, group_rank: int, call: Call, *, asynchronous: bool) -> SimWork:
        """See `Cluster.issue`."""
        rank = group.ranks[group_rank]
        self._check_own(rank, group, call.kind)
        # Other ranks' threads will read this memory; see `zero_sim.sim.streams`.
        finish_streams((*call.inputs, *call.outputs))
        # Due writes of late operations come before the new call reads its inputs.
        self.run.baton.advance()
        due_faults = (
            self._due_faults(rank, group, group_rank, call) if self.run.injector.faults else ()
        )
        try:
            with aside(self.run.races):
                collective, sequence = group.issue(group_rank, call)
        except WorldFailure as failure:
            error = self.run.fail(failure)
            # Log this call too, or the log would not show why the run ended.
            sequence = group.issued_by(group_rank) - 1
            self._record(rank, group, call, sequence, asynchronous, _detail(call))
            self.run.log.refused = len(self.run.log.collectives) - 1
            raise error from None
        if due_faults:
            # These are faults in data: crashes and stalls have happened above.
            collective.add_faults(group_rank, due_faults)
        if group.strict:
            self._spoil_overwritten(call, group_rank=group_rank, group_size=len(group.ranks))
        self._record(rank, group, call, sequence, asynchronous, _detail(call))
        work = self._work(collective, call, rank=rank, member=group_rank)
        work.timeout_seconds = call.timeout_seconds
        if asynchronous:
            work.is_of_torch = is_of_torch()
            work.require_wait()
        return work

    def _spoil_overwritten(self, call: Call, *, group_rank: int, group_size: int) -> None:
        """Poison inputs that NCCL may overwrite before it sends them."""
        if call.kind != "all_gather_list":
            return
        spoiled = overwritten_inputs(call, group_rank=group_rank, group_size=group_size)
        if spoiled:
            with aside(self.run.races), torch.inference_mode():
                for tensor in spoiled:
                    poison(tensor)

    def _check_own(self, rank: int, group: Group, kind: str) -> None:
        """Check that the calling thread is the rank that owns this side of the group."""
        try:
            caller = running_rank()
        except UsageError as error:
            # The program may swallow an error in its own thread, so the run remembers it.
            if (by := starter()) is not None and by.run is self.run:
                self.run.refuse(by.rank, error)
            raise
        # A group object kept in a global may reach another rank's thread.
        if caller != rank:
            raise self.run.fail(foreign_group(caller, rank, group.label, f"{kind} at {here()}"))

    def _work(self, awaited: Pending, call: Call, *, rank: int, member: int) -> SimWork:
        """Hand the last logged call to the timing, which performs it."""
        record = len(self.run.log.collectives) - 1
        op = self.run.timing.issue(awaited, call, rank=rank, member=member, record=record)
        tensors = call.outputs or call.inputs
        return SimWork(self.run.baton, rank, [op], tensors, self.run.buffers[rank])

    def _due_faults(
        self, rank: int, group: Group, group_rank: int, call: Call
    ) -> Sequence[DueFault]:
        """Carry out crashes and stalls due at a call, and return faults in its data."""
        what = f"{call.kind} #{group.issued_by(group_rank)} of group {group.label}"
        due_faults = self.run.injector.due(rank, call, what=what)
        for due in due_faults:
            if due.fault.kind == "crash":
                due.fired("the rank raised InjectedCrash")
                raise InjectedCrash(f"crashed by plan {due.when}")
            if due.fault.kind == "stall":
                due.fired("the rank never came to it")
                # This wait never ends, so the run ends in a deadlock that names the plan.
                stalled = StalledByPlan(due.when)
                self.run.baton.wait_for(rank, stalled, site_of(call.file, call.line))
        if call.kind == SPARSE:
            for due in due_faults:
                # Sparse data is indices and values, without elements to flip or drop.
                due.missed("the tensors of this call are sparse, whose data no fault changes")
            return ()
        return due_faults

    def send(
        self, group: Group, group_rank: int, peer: int, *, tag: int, tensor: Tensor
    ) -> SimWork:
        """See `Cluster.send`."""
        file, line = call_site()
        call = Call(kind="send", inputs=[tensor], file=file, line=line)
        return self._exchange(group, group_rank, peer, tag, call, group.send)

    def receive(
        self, group: Group, group_rank: int, peer: int | None, *, tag: int, tensor: Tensor
    ) -> SimWork:
        """See `Cluster.receive`."""
        file, line = call_site()
        call = Call(kind="recv", inputs=[], outputs=[tensor], file=file, line=line)
        return self._exchange(group, group_rank, peer, tag, call, group.receive)

    def join_works(
        self, rank: int, works: Sequence[SimWork], *, result: Sequence[Any] | None = None
    ) -> SimWork:
        """See `Cluster.join_works`."""
        buffers = self.run.buffers[rank]
        return join_works(works, baton=self.run.baton, rank=rank, buffers=buffers, result=result)

    def _exchange(
        self,
        group: Group,
        group_rank: int,
        peer: int | None,
        tag: int,
        call: Call,
        post: Callable[..., Message],
    ) -> SimWork:
        rank = group.ranks[group_rank]
        self._check_own(rank, group, call.kind)
        finish_streams((*call.inputs, *call.outputs))
        self.run.baton.advance()
        # Messages to the user always contain world ranks.
        whom = "any" if peer is None else str(group.ranks[peer])
        try:
            with aside(self.run.races):
                message = post(group_rank, peer, tag=tag, call=call)
        except WorldFailure as failure:
            error = self.run.fail(failure)
            self._record(rank, group, call, tag, True, f"peer {whom}")
            self.run.log.refused = len(self.run.log.collectives) - 1
            raise error from None
        self._record(rank, group, call, tag, True, f"peer {whom}")
        # Even for synchronous calls, because dist.send and dist.recv wait for the work themselves.
        work = self._work(message, call, rank=rank, member=0 if call.kind == "send" else 1)
        work.require_wait()
        return work

    def _record(
        self, rank: int, group: Group, call: Call, sequence: int, asynchronous: bool, detail: str
    ) -> None:
        tensors = call.inputs or call.outputs
        # In-place kinds have no outputs and write into their inputs.
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
        self.run.log.add(record, of_harness=self.run.program_time.blocks[rank] > 0)
        if self.run.log.watch is not None:
            self.run.log.watch(record, call)
        self.run.log.note(rank, "issue", len(self.run.log.collectives) - 1)


def _detail(call: Call) -> str:
    if call.reduce_op is not None:
        name = call.reduce_op.name
        return f"{name} root {call.root}" if call.kind == "reduce" else name
    return f"root {call.root}" if call.kind in ("broadcast", "scatter", "gather") else ""
