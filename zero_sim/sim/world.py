"""The simulated cluster: N ranks of unmodified torch.distributed code in one process."""

from __future__ import annotations

import ctypes
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Self

from torch import Tensor

from zero_sim.errors import EnvironmentProblem, UsageError
from zero_sim.sim import c10d
from zero_sim.sim.baton import Baton
from zero_sim.sim.callsite import call_site
from zero_sim.sim.collectives import Call
from zero_sim.sim.failures import ContractViolation, RankEnded, RankStalled, WorldFailure
from zero_sim.sim.log import CollectiveRecord, EventLog
from zero_sim.sim.meeting import Group, Message
from zero_sim.sim.order_backends import ORDERS
from zero_sim.sim.process_group import SimProcessGroup
from zero_sim.sim.randomness import Randomness
from zero_sim.sim.schedule import SCHEDULES, build_schedule
from zero_sim.sim.store import KeyWait, SimStore
from zero_sim.sim.work import SimWork

WORLD_SIZE_MAX = 4096
_DEFAULT_GROUP = "0"
_UNWIND_SECONDS = 10.0
_STACK_BYTES = 16 << 20


class World:
    """N rank threads under one baton, reusable from program to program.

    Args:
        world_size: Number of ranks, 1 to 4096.
        order: Order model of every reduction: `linear`, `linear-fp32`, `tree`, `ring`, `gloo`,
            `nccl-ring`, `nccl-sym` or `random-tree`; see `zero_sim.sim.order`.
        schedule: Which ready rank runs next: `round-robin` or `random`.
        seed: Seed of the random schedule, of random trees and of the ranks' random numbers; rank
            `r` starts every program as after `manual_seed(seed + r)`.
        stall_seconds: How long one rank may run without reaching torch.distributed while others
            wait, before that is an error.

    Raises:
        UsageError: An argument is out of range.

    Example:
        >>> import torch, torch.distributed as dist
        >>> def program(rank):
        ...     x = torch.tensor([float(rank)])
        ...     dist.all_reduce(x)
        ...     return x.item()
        >>> with World(4) as world:
        ...     world.run(program)
        [6.0, 6.0, 6.0, 6.0]
    """

    def __init__(
        self,
        world_size: int,
        *,
        order: str = "linear",
        schedule: str = "round-robin",
        seed: int = 0,
        stall_seconds: float = 60.0,
    ) -> None:
        if not 1 <= world_size <= WORLD_SIZE_MAX:
            raise UsageError(
                f"expected world_size between 1 and {WORLD_SIZE_MAX}, got {world_size}"
            )
        self.world_size = world_size
        self.stall_seconds = stall_seconds
        self.configure(order=order, schedule=schedule, seed=seed)
        self.log = EventLog()
        self._groups: dict[str, Group] = {}
        self._randomness = Randomness()
        self._gates = [threading.Lock() for _ in range(world_size)]
        self._store = SimStore(self._wait_in_store, lambda waited: self._baton.finish(waited))
        self._program: Callable[[int], Any] | None = None
        self._results: list[Any] = []
        self._closed = False
        self._baton = self._new_baton()
        c10d.install()
        self._threads: list[threading.Thread] = []
        try:
            self._start_threads()
        except RuntimeError as error:
            self.close()
            raise EnvironmentProblem(
                f"expected to start {world_size} threads, one a rank, but after "
                f"{len(self._threads)} of them: {error}. Try fewer ranks, or raise the limit on "
                "threads."
            ) from error

    def configure(
        self, *, order: str | None = None, schedule: str | None = None, seed: int | None = None
    ) -> None:
        """Change what the next run does; what is left out stays.

        Raises:
            UsageError: An unknown order or schedule, with the known ones.
        """
        if order is not None and order not in ORDERS:
            raise UsageError(f"expected order to be one of {sorted(ORDERS)}, got {order!r}")
        if schedule is not None:
            if schedule not in SCHEDULES:
                raise UsageError(
                    f"expected schedule to be one of {list(SCHEDULES)}, got {schedule!r}"
                )
            self.schedule = schedule
        if seed is not None:
            self.seed = seed
        # After the seed, which some orders draw from.
        self.order = ORDERS[order or self.order.name](self.seed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def run(self, program: Callable[[int], Any]) -> list[Any]:
        """Run `program(rank)` on every rank to its end.

        Args:
            program: Uses torch.distributed as it would anywhere; the default group exists already.

        Returns:
            What each rank returned, in rank order.

        Raises:
            RankFailed: A rank raised; names it and carries its traceback.
            Deadlock: No rank could run; says who waits for what, and who never came.
            ContractViolation: Two ranks' calls did not fit each other.
            RankStalled: A rank ran on without ever calling torch.distributed.
            UsageError: The world is closed, or a rank called this.
        """
        if self._closed:
            raise UsageError("expected an open world, got one that is closed; make a new World")
        if c10d.rank_state.c10d_world is not None:
            raise UsageError("expected World.run to be called outside of a rank, got a rank's call")
        self.log = EventLog()
        self._baton = self._new_baton()
        self._store.clear()
        # Names of groups depend on the program, so only the default group outlives it.
        self._groups = {
            name: group for name, group in self._groups.items() if name == _DEFAULT_GROUP
        }
        for group in self._groups.values():
            group.reset()
        for rank in range(self.world_size):
            self._randomness.seed(rank, self.seed + rank)
        self._program, self._results = program, [None] * self.world_size
        self._baton.start()
        self._await_end()
        self._baton.restore_caller()
        results, self._program, self._results = self._results, None, []
        if self._baton.failure is not None:
            raise self._baton.failure
        return results

    def close(self) -> None:
        """End the rank threads and give torch its own process-wide state back."""
        if self._closed:
            return
        self._closed = True
        for gate in self._gates:
            gate.release()
        for thread in self._threads:
            thread.join(_UNWIND_SECONDS)
        c10d.uninstall()

    @property
    def closed(self) -> bool:
        """Whether it can no longer run anything."""
        return self._closed

    def _new_baton(self) -> Baton:
        schedule = build_schedule(self.schedule, seed=self.seed)
        return Baton(self._gates, schedule=schedule, log=self.log, randomness=self._randomness)

    def _start_threads(self) -> None:
        # 1,024 ranks fit because a thread's stack is only reserved, not used, until it is needed.
        previous = threading.stack_size(_STACK_BYTES)
        try:
            for rank, gate in enumerate(self._gates):
                gate.acquire()
                thread = threading.Thread(
                    target=self._rank_thread, args=(rank,), name=f"rank-{rank}", daemon=True
                )
                thread.start()
                self._threads.append(thread)
        finally:
            threading.stack_size(previous)

    def _rank_thread(self, rank: int) -> None:
        c10d.enter_rank_thread(
            join=lambda: self._join(rank),
            make_group=lambda name, ranks, group_rank: self._make_group(name, ranks, group_rank),
        )
        while True:
            self._gates[rank].acquire()
            if self._closed:
                return
            self._run_program(rank)

    def _run_program(self, rank: int) -> None:
        baton, error = self._baton, None
        try:
            try:
                baton.enter(rank)
                c10d.use_one_compute_thread()
                self._join(rank)
                assert self._program is not None
                self._results[rank] = self._program(rank)
            finally:
                c10d.reset_rank()
        except BaseException as raised:  # noqa: BLE001  Whatever a rank raises is the run's result.
            error = raised
        finally:
            baton.end_rank(rank, error)

    def _join(self, rank: int) -> None:
        world = c10d.rank_state.c10d_world
        if world is not None and world.default_pg is None:
            c10d.init_default_group(rank=rank, world_size=self.world_size, store=self._store)

    def _make_group(self, name: str, ranks: Sequence[int], group_rank: int) -> SimProcessGroup:
        default = name == _DEFAULT_GROUP and not ranks
        members = tuple(range(self.world_size)) if default else tuple(ranks)
        label = "world" if default else f"{name} (ranks {', '.join(map(str, members))})"
        group = self._groups.setdefault(name, Group(name, members, label=label))
        if group.ranks != members:
            rank, other = members[group_rank], group.ranks[0]
            raise self._baton.fail(
                ContractViolation(
                    f"groups created in different order: rank {rank} makes group {name} of ranks "
                    f"{list(members)}, where rank {other} made it of {list(group.ranks)}. "
                    "Call new_group on every rank, in one order.",
                    rank=rank,
                    other_rank=other,
                )
            )
        return SimProcessGroup(self, group, group_rank)

    def issue(self, group: Group, group_rank: int, call: Call, *, asynchronous: bool) -> SimWork:
        """Issue one rank's side of a collective; `Cluster.issue`."""
        rank = group.ranks[group_rank]
        self._baton.check_alive()
        call.file, call.line = call_site()
        try:
            collective, sequence = group.issue(group_rank, call, self.order)
        except WorldFailure as failure:
            raise self._baton.fail(failure) from None
        self._record(rank, group, call, sequence, asynchronous, _detail(call))
        if collective.done:
            self._baton.finish(collective)
        return SimWork(self._baton, rank, [collective], call.outputs or call.inputs)

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

    def join_works(self, rank: int, works: Sequence[SimWork]) -> SimWork:
        """One work for several; `Cluster.join_works`."""
        operations = [operation for work in works for operation in work._operations]
        tensors = [tensor for work in works for tensor in work._tensors]
        return SimWork(self._baton, rank, operations, tensors)

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
        self._baton.check_alive()
        call.file, call.line = call_site()
        try:
            message, completed = post(group_rank, peer, tag=tag, call=call)
        except WorldFailure as failure:
            raise self._baton.fail(failure) from None
        whom = "any" if peer is None else str(group.ranks[peer])
        self._record(rank, group, call, tag, True, f"peer {whom}")
        if completed is not None:
            self._baton.finish(completed)
        return SimWork(self._baton, rank, [message], call.outputs or call.inputs)

    def _record(
        self, rank: int, group: Group, call: Call, sequence: int, asynchronous: bool, detail: str
    ) -> None:
        tensors = call.inputs or call.outputs
        self.log.collectives.append(
            CollectiveRecord(
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
            )
        )

    def _wait_in_store(self, waited: KeyWait, site: str) -> None:
        self._baton.wait_for(self._baton.holder, waited, site)

    def _await_end(self) -> None:
        """Wait until every rank has ended; a rank that never lets go is interrupted and named."""
        baton, turns = self._baton, -1
        try:
            while not baton.all_ended.wait(self.stall_seconds):
                if baton.turns == turns:
                    self._interrupt(_stalled(baton.holder, self._threads, self.stall_seconds))
                turns = baton.turns
        except KeyboardInterrupt as interrupt:
            try:
                self._interrupt(WorldFailure("interrupted from outside"))
            except WorldFailure:
                # The rank could not be ended and the world is lost; that is not what was asked.
                raise interrupt from None
            raise

    def _interrupt(self, failure: WorldFailure) -> None:
        baton = self._baton
        baton.fail(failure)
        for _ in range(int(_UNWIND_SECONDS)):
            thread = self._threads[baton.holder]
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread.ident or 0), ctypes.py_object(RankEnded)
            )
            if baton.all_ended.wait(1.0):
                return
        # The rank sits in native code that never returns: its thread is lost, and so is the world.
        self._closed = True
        c10d.uninstall()
        raise failure


def _stalled(rank: int, threads: Sequence[threading.Thread], seconds: float) -> RankStalled:
    frame = sys._current_frames().get(threads[rank].ident or 0)
    stack = "".join(traceback.format_stack(frame)) if frame is not None else "(no stack)"
    return RankStalled(rank, seconds, stack)


def _detail(call: Call) -> str:
    if call.reduce_op is not None:
        name = call.reduce_op.name
        return f"{name} root {call.root}" if call.kind == "reduce" else name
    return f"root {call.root}" if call.kind in ("broadcast", "scatter", "gather") else ""
