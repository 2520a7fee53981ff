"""The simulated cluster: N ranks of unmodified torch.distributed code in one process."""

from __future__ import annotations

import ctypes
import html
import operator
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

from zero_sim.errors import EnvironmentProblem, UsageError
from zero_sim.sim.callsite import here, program_traceback, raising_site, shown_stack, site_of
from zero_sim.sim.comm.process_group import SimProcessGroup
from zero_sim.sim.comm.rendezvous import DEFAULT_GROUP, Group
from zero_sim.sim.comm.store import SimStore
from zero_sim.sim.comm.torch_stores import StoreWaits
from zero_sim.sim.contract.groups import foreign_group
from zero_sim.sim.failures import RankEnded, RankFailed, RankStalled, WorldFailure
from zero_sim.sim.faults import Fault, Injector
from zero_sim.sim.in_flight_buffers import InFlightBuffers
from zero_sim.sim.inflight.backward import drop_unfinished
from zero_sim.sim.inflight.late import build_timing
from zero_sim.sim.inflight.races import RaceDetector
from zero_sim.sim.log import EventLog
from zero_sim.sim.order_backends import ORDERS
from zero_sim.sim.schedule import Recipe, build_schedule
from zero_sim.sim.waits import Awaited
from zero_sim.sim.world import c10d, process_ends, profilers
from zero_sim.sim.world.baton import Baton, RankLocal
from zero_sim.sim.world.cluster import SimCluster
from zero_sim.sim.world.process_state import ProcessState
from zero_sim.sim.world.randomness import Randomness
from zero_sim.sim.world.rank_threads import is_forked
from zero_sim.sim.world.run import PausedClock, Run
from zero_sim.sim.world.settings import WorldSettings, check_program, check_results

_UNWIND_SECONDS = 10.0
_STACK_BYTES = 16 << 20


class World:
    """N rank threads under one baton, reusable for many programs.

    Args:
        world_size: Number of ranks, 1 to 4096.
        order: Summation order in reductions: `linear`, `linear-fp32`, `tree`, `ring`, `gloo`,
            `nccl-ring`, `nccl-sym` or `random-tree`; see `zero_sim.sim.order`.
        schedule: Choice of the next rank to run: `round-robin`, `random`, `pct` (drawn priorities
            that rarely change), a `Replay` of recorded turns, or `Choices`.
        timing: When an operation reads its inputs and writes its outputs. `eager`: when the last
            member issues it. `lazy`: as late as the ranks' waits allow. `hostile`: drawn for each
            operation, anywhere between issue and wait. `lazy` and `hostile` poison or watch memory
            in flight: a program that touches it too early is caught or computes NaN.
        seed: Seed for drawn schedules, hostile timing, random trees and the ranks' random numbers.
            Rank `r` starts every program as after `manual_seed(seed + r)`.
        depth: For `pct`: number of events whose order triggers a bug, at least 1.
        races: True to check each tensor operation for access to memory in flight and for reads of
            undefined outputs.
        stall_seconds: Longest time for a rank to run without calling torch.distributed while others
            wait.
        strict: True to also refuse calls that gloo accepts but NCCL does not: tensors that are not
            contiguous, overlap, or differ in shape or memory format between ranks; buffers that two
            ranks exchanged; asynchronous calls never waited for; and collectives of several groups
            in different orders.
        faults: Planned faults in every run; see `Fault`.
        initialized: True if the default group exists when a program begins. If False, a program
            starts as under torchrun: `is_initialized()` is False until `init_process_group`, which
            joins this world whatever its arguments are.
        rank_local: Moves further process state with the baton.

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
        schedule: str | Recipe = "round-robin",
        timing: str = "eager",
        seed: int = 0,
        depth: int = 3,
        races: bool = False,
        stall_seconds: float = 60.0,
        strict: bool = True,
        faults: Sequence[Fault] = (),
        initialized: bool = True,
        rank_local: RankLocal | None = None,
    ) -> None:
        self.settings = WorldSettings().changed(
            world_size,
            order=order,
            schedule=schedule,
            timing=timing,
            seed=seed,
            depth=depth,
            races=races,
            stall_seconds=stall_seconds,
            strict=strict,
            faults=faults,
            initialized=initialized,
        )
        self.world_size = operator.index(world_size)
        self._rank_local = rank_local
        self.in_flight = [InFlightBuffers() for _ in range(world_size)]
        """Indexed by rank. After a run, only buffers that never landed remain."""
        self._groups: dict[str, Group] = {}
        self._randomness = Randomness()
        self._process_state = ProcessState()
        self._gates = [threading.Lock() for _ in range(world_size)]
        self._store = SimStore(self._wait_in_store, lambda waited: self._baton.finish(waited))
        self._torch_stores = StoreWaits(
            wait=self._wait_in_store,
            poll=self._poll_store,
            wake=lambda waited: self._baton.finish(waited),
        )
        self._program: Callable[[int], Any] | None = None
        self._results: list[Any] = []
        self._closed = False
        self._run = self._new_run(EventLog())
        self._cluster = SimCluster(self._run)
        # Before the threads start, because each thread sets up its c10d state.
        c10d.install()
        process_ends.install()
        self._threads: list[threading.Thread] = []
        try:
            self._start_threads()
        except RuntimeError as error:
            self.close()
            raise EnvironmentProblem(
                f"expected to start {world_size} threads, one per rank, but after "
                f"{len(self._threads)} of them: {error}. Use fewer ranks, or raise the limit on "
                "threads."
            ) from error

    def configure(self, *, rank_local: RankLocal | None = None, **settings: Any) -> None:
        """Change settings from the next run on.

        Args:
            rank_local: The world's argument; None to keep it.
            settings: Other arguments of the world. Omitted settings, and None, keep their values.

        Raises:
            UsageError: An argument has the wrong type or is out of range.
        """
        given = {name: value for name, value in settings.items() if value is not None}
        self.settings = self.settings.changed(self.world_size, **given)
        if rank_local is not None:
            self._rank_local = rank_local

    def keep_apart(self, rank_local: RankLocal | None) -> None:
        """Replace `rank_local` from the next run on. Unlike `configure`, None removes it."""
        self._rank_local = rank_local

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def run(self, program: Callable[[int], Any], *, log: EventLog | None = None) -> list[Any]:
        """Run `program(rank)` on every rank to its end.

        A planned crash raises RankFailed, a planned stall Deadlock. `log.faults` records the
        outcome of every fault.

        Args:
            program: Uses torch.distributed as usual. The default group exists already.
            log: Receives the run's events; must be empty. By default a new log.

        Returns:
            The ranks' return values, in rank order.

        Raises:
            RankFailed: A rank raised; contains its traceback.
            Deadlock: No rank could run; lists all waits and the absent ranks.
            ContractViolation: Two ranks' calls conflict, or a call is wrong by itself; see its
                `aspect`.
            DataRace: With `races`, a rank touched memory in flight; names line and elements.
            RankStalled: A rank kept running without calling torch.distributed.
            InFlightRace: With `lazy` or `hostile` timing, a rank touched memory in flight.
            ScheduleDiverged: The run differs from its recording.
            UsageError: The world is closed, or a rank called this, or the program's body never ran
                because an `async def` or generator function was called.
        """
        if self._closed:
            raise UsageError("expected an open world, got a closed one. Make a new World.")
        if c10d.rank_state.c10d_world is not None:
            raise UsageError("expected World.run to be called outside of a rank, got a rank's call")
        check_program(program)
        self._run = self._cluster.run = self._new_run(EventLog() if log is None else log)
        # Nothing of an earlier program may be visible.
        self._store.clear()
        self._torch_stores.begin()
        # Names of other groups depend on the program, so only the default group outlives it.
        self._groups = {
            name: group for name, group in self._groups.items() if name == DEFAULT_GROUP
        }
        for group in self._groups.values():
            group.reset(strict=self.settings.strict)
        for rank in range(self.world_size):
            self._randomness.seed(rank, self.settings.seed + rank)
            self.in_flight[rank].clear()
        self._program, self._results = program, [None] * self.world_size
        self._baton.start(self._run.timing)
        try:
            self._await_end()
        finally:
            if not self._baton.all_ended.is_set() and not self._closed:
                # A second interrupt, so the caller no longer waits for the rank.
                self._lose()
            self._run.injector.close()
        self._baton.restore_caller()
        results, self._program, self._results = self._results, None, []
        # Before the failures: a body that never ran explains them.
        check_results(results)
        self._run.check_threads()
        if self.settings.strict:
            self._run.check_ended(group_count=len(self._groups))
        if self._baton.failure is not None:
            raise _for_the_caller(self._baton.failure)
        return results

    def close(self) -> None:
        """End the rank threads and restore torch's process-wide state."""
        if self._closed:
            return
        self._closed = True
        # In sequence: thousands of threads that wake at once hinder each other.
        for rank, gate in enumerate(self._gates):
            # The gate is open if its thread could not be started.
            if gate.locked():
                gate.release()
            if rank < len(self._threads):
                self._threads[rank].join(_UNWIND_SECONDS)
        process_ends.uninstall()
        c10d.uninstall()

    def pause_clock(
        self,
        pause: bool = True,
        *,
        watched: bool = True,
        on_error: Callable[[BaseException], None] | None = None,
    ) -> AbstractContextManager[None]:
        """Return a context manager whose time does not count against `stall_seconds`.

        For a harness that runs its own code in a rank's turn. The log marks calls in this block,
        and in blocks nested in it, as the harness's.

        Args:
            pause: False to count time again inside a paused block.
            watched: False to make `races` ignore accesses inside.
            on_error: Called with an exception that leaves the block; may raise another exception.
        """
        run = self._run
        return PausedClock(
            run.program_time,
            rank=run.baton.holder,
            pause=pause,
            watched=watched,
            on_error=on_error,
        )

    def __repr__(self) -> str:
        ranks = f"{self.world_size} rank{'' if self.world_size == 1 else 's'}"
        calls = f"{len(self.log.collectives):,} calls in the latest run"
        state = ", closed" if self._closed else ""
        return f"World({ranks}, order={self.settings.order}, {calls}{state})"

    def _repr_html_(self) -> str:
        """Return a heading and the table of the latest run, which notebooks show."""
        return f"<p>{html.escape(repr(self))}</p>{self.log._repr_html_()}"

    @property
    def closed(self) -> bool:
        """True if the world can run no more programs."""
        return self._closed

    @property
    def log(self) -> EventLog:
        """Events of the latest run."""
        return self._run.log

    @property
    def _baton(self) -> Baton:
        return self._run.baton

    def _new_run(self, log: EventLog) -> Run:
        settings = self.settings
        injector = Injector(settings.faults, seed=settings.seed, log=log)
        schedule = build_schedule(
            settings.schedule,
            seed=settings.seed,
            world_size=self.world_size,
            depth=settings.depth,
        )
        # The user's state moves first, ours last.
        own = [self._randomness, self._process_state]
        baton = Baton(
            self._gates,
            schedule=injector.slow_down(schedule),
            log=log,
            rank_local=own if self._rank_local is None else [self._rank_local, *own],
        )
        timing = build_timing(
            settings.timing,
            seed=settings.seed,
            order=ORDERS[settings.order](settings.seed),
            turns=baton,
            buffers=self.in_flight,
            races=settings.races,
        )
        return Run(
            baton=baton,
            log=log,
            injector=injector,
            timing=timing,
            buffers=self.in_flight,
            races=settings.races,
        )

    def _start_threads(self) -> None:
        # 1,024 ranks fit, because stack memory is only reserved until it is used.
        previous = threading.stack_size(_STACK_BYTES)
        try:
            # Lock the gate first, because the thread waits at it.
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
            rank=rank,
            leave=lambda status: self._leave(rank, status),
            join=lambda: self._join_as_requested(rank),
            make_group=lambda name, ranks, group_rank: self._make_group(name, ranks, group_rank),
            announce=lambda name, ranks: self._announce_group(rank, name, ranks),
            stores=self._torch_stores,
        )
        while True:
            # `close` opens the gates a last time.
            self._gates[rank].acquire()
            if self._closed:
                drop_unfinished()
                c10d.leave_rank_thread()
                return
            self._run_program(rank)

    def _run_program(self, rank: int) -> None:
        baton, error = self._baton, None
        try:
            try:
                baton.enter(rank)
                c10d.rank_state.run = self._run
                c10d.use_one_compute_thread()
                if self.settings.initialized:
                    self._join(rank)
                else:
                    c10d.reset_rank(keep=False)
                assert self._program is not None
                with self._watch(rank):
                    self._results[rank] = self._program(rank)
            except BaseException:
                drop_unfinished()
                raise
            finally:
                if not is_forked():
                    # The group stays warm only if the program did not destroy it.
                    profilers.end_program(rank)
                    keep = (
                        self.settings.initialized and self._run.group_registry.generation(rank) == 0
                    )
                    c10d.reset_rank(keep=keep)
        except BaseException as raised:  # noqa: BLE001  Any exception is a result of the run.
            error = self._translated(rank, raised)
        finally:
            # In a forked child, the program's return must not continue the parent's run.
            if is_forked():
                process_ends.end_forked(error)
            baton.end_rank(rank, error)

    def _watch(self, rank: int) -> AbstractContextManager[object]:
        if not self.settings.races:
            return nullcontext()
        return RaceDetector(rank, buffers=self.in_flight[rank], fail=self._run.fail)

    def _leave(self, rank: int, status: int) -> None:
        """End the world instead of the process, for a rank that called os._exit."""
        error = UsageError(
            f"expected rank {rank} to return or raise, got os._exit({status}) at {here()}, which "
            "would end the process with all ranks and their caller. Call sys.exit, or raise."
        )
        raise self._run.fail(RankFailed(rank, error, shown_stack()))

    def _join_as_requested(self, rank: int) -> None:
        """Join the world for a rank's `init_process_group`."""
        world = c10d.rank_state.c10d_world
        # An initialized world accepts the program's own call of init_process_group.
        if not self.settings.initialized and world is not None and world.default_pg is not None:
            raise ValueError("trying to initialize the default process group twice!")
        self._join(rank)

    def _join(self, rank: int) -> None:
        world = c10d.rank_state.c10d_world
        if world is not None and world.default_pg is None:
            c10d.init_default_group(rank=rank, world_size=self.world_size, store=self._store)

    def _make_group(self, name: str, ranks: Sequence[int], group_rank: int) -> SimProcessGroup:
        default = name == DEFAULT_GROUP and not ranks
        rank = group_rank if default else ranks[group_rank]
        generation = self._run.group_registry.generation(rank)
        # A new generation may use the same name for other ranks.
        key = f"{name}@{generation}" if generation else name
        group = self._groups.get(key)
        if group is None:
            # Only for the group's first caller: a list of all ranks on each rank is slow.
            members = tuple(range(self.world_size)) if default else tuple(ranks)
            label = "world" if default else f"{name} (ranks {', '.join(map(str, members))})"
            if generation:
                label = f"{label}, made anew {generation}"
            group = self._groups[key] = Group(
                name, members, label=label, strict=self.settings.strict
            )
        return SimProcessGroup(self._cluster, group, group_rank)

    def _announce_group(self, rank: int, name: str, ranks: Sequence[int]) -> None:
        try:
            self._run.group_registry.note_made(rank, name, ranks, here())
        except WorldFailure as failure:
            raise self._run.fail(failure) from None

    def _translated(self, rank: int, error: BaseException) -> BaseException:
        """Return a rank's error. If a group is missing, return an error that explains why."""
        if not c10d.is_about_a_missing_group(error):
            return error
        file, line = raising_site(error)
        foreign = _foreign_group_in(error, rank)
        # This rank's c10d world does not know groups of other ranks.
        if foreign is not None:
            raised = foreign_group(rank, foreign.owner, foreign.group_desc, f"at {file}:{line}")
            raised.__cause__ = error
            return self._run.fail(raised)
        failure = self._run.group_registry.use_after_destroy(rank, "used", site_of(file, line))
        if failure is None:
            return error
        failure.__cause__ = error
        return self._run.fail(failure)

    def _wait_in_store(self, waited: Awaited, site: str, timeout_seconds: float | None) -> None:
        baton = self._baton
        baton.advance()
        baton.wait_for(baton.holder, waited, site, timeout_seconds=timeout_seconds)

    def _poll_store(self, waited: Awaited, site: str) -> None:
        baton = self._baton
        baton.advance()
        baton.poll(baton.holder, waited, site)

    def _await_end(self) -> None:
        """Wait until all ranks have ended. Interrupt a rank that keeps the baton too long."""
        baton, time, progress = self._baton, self._run.program_time, (-1, -1)
        stall_seconds = self.settings.stall_seconds
        try:
            while not baton.all_ended.wait(stall_seconds):
                # A woken thread may not run yet. Then it is not stalled.
                latest = (baton.turns, time.changes)
                is_stalled = latest == progress and baton.is_held
                if is_stalled and baton.holder not in time.paused:
                    self._interrupt(_stalled(baton.holder, self._threads, stall_seconds))
                progress = latest
        except KeyboardInterrupt as interrupt:
            try:
                self._interrupt(WorldFailure("interrupted from outside"))
            except WorldFailure:
                # The rank never ended, so the world is lost, but the caller's interrupt matters
                # more.
                raise interrupt from None
            raise

    def _interrupt(self, failure: WorldFailure) -> None:
        baton = self._baton
        baton.fail(failure)
        for _ in range(int(_UNWIND_SECONDS)):
            # A woken thread that does not run yet sees the failure by itself.
            if baton.is_held:
                thread = self._threads[baton.holder]
                # Raises RankEnded in the rank's thread, as soon as it executes Python code.
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(thread.ident or 0), ctypes.py_object(RankEnded)
                )
            if baton.all_ended.wait(1.0):
                return
        # The rank never returns from native code, so its thread and the world are lost.
        self._lose()
        raise failure

    def _lose(self) -> None:
        """Give up the world, because a rank still runs and would hand over to others."""
        self._closed = True
        process_ends.uninstall()
        c10d.uninstall()


def _for_the_caller(failure: WorldFailure) -> WorldFailure:
    """Return a failure with frames of the program only, for `World.run` to raise."""
    if not isinstance(failure, RankFailed):
        # The message already contains everything important about its cause.
        failure.__context__, failure.__cause__ = failure.__cause__ or failure.__context__, None
        failure.__suppress_context__ = True
    return failure.with_traceback(program_traceback(failure))


def _foreign_group_in(error: BaseException, rank: int) -> SimProcessGroup | None:
    """Return the other rank's group on which torch raised an error, or None."""
    traceback = error.__traceback__
    while traceback is not None:
        # torch's functions name their argument `group`.
        group = traceback.tb_frame.f_locals.get("group")
        if isinstance(group, SimProcessGroup) and group.owner != rank:
            return group
        traceback = traceback.tb_next
    return None


def _stalled(rank: int, threads: Sequence[threading.Thread], seconds: float) -> RankStalled:
    frame = sys._current_frames().get(threads[rank].ident or 0)
    stack = shown_stack(frame) if frame is not None else "(no stack)"
    return RankStalled(rank, seconds, stack)
