"""The handle that torch.distributed gives for an operation in flight."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work

from zero_sim.sim.callsite import call_site, site_of
from zero_sim.sim.comm.plain_memory import count_holders
from zero_sim.sim.comm.timeouts import after_another
from zero_sim.sim.failures import TimedOut
from zero_sim.sim.in_flight_buffers import InFlightBuffers
from zero_sim.sim.inflight.futures import SimFuture
from zero_sim.sim.inflight.timing import RankOp
from zero_sim.sim.streams import finish_streams
from zero_sim.sim.waits import Pending, Turns


class SimWork(Work):
    """One rank's side of an operation; waiting hands the baton on until the operation is done.

    Args:
        baton: The baton of the run.
        rank: World rank.
        ops: The operations, more than one where they were coalesced.
        tensors: What they write.
        buffers: What the rank has in flight.
    """

    _unwaited: Sequence[int] = ()
    """Indices of the records that must be waited for, or seen done, before the program returns."""
    timeout_seconds: float | None = None
    """How long a wait for it may take, in simulated time."""
    is_of_torch = False
    """Whether torch's own code has it, and not a program."""

    def __init__(
        self,
        baton: Turns,
        rank: int,
        ops: Sequence[RankOp],
        tensors: Sequence[Tensor],
        buffers: InFlightBuffers,
    ) -> None:
        super().__init__()
        self._baton = baton
        self._rank = rank
        self._ops = ops
        self._tensors = list(tensors)
        self._buffers = buffers
        self._landed = False
        self._futures: list[SimFuture] = []
        """Those that are not done."""
        self.are_futures_done = False
        """True once their callbacks have run."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block this rank until the operation is done; a hang is named without any timeout.

        Raises:
            TimedOut: It is a barrier, and this rank or another one has given it up.
        """
        baton = self._baton
        baton.advance()
        if not self._landed:
            for op in self._ops:
                baton.log.note(self._rank, "wait", op.record)
        for op in self._ops:
            op.start_wait()
            if not op.awaited.done and op.awaited.given_up is None:
                self._wait_for(op.awaited)
            if op.awaited.given_up is not None:
                self._mark_waited()
                raise after_another(op.awaited.given_up)
        baton.check_alive()
        self._land()
        return True

    def _wait_for(self, awaited: Pending) -> None:
        file, line = call_site()
        seconds = self.timeout_seconds
        try:
            self._baton.wait_for(self._rank, awaited, site_of(file, line), timeout_seconds=seconds)
        except TimedOut as error:
            awaited.given_up = error
            self._baton.finish(awaited)
            self._mark_waited()
            raise

    def _land(self) -> None:
        if self._landed:
            return
        self._landed = True
        baton = self._baton
        for op in self._ops:
            op.land()
            for buffer in op.buffers:
                self._buffers.land(buffer)
            baton.log.note(self._rank, "land", op.record)
        finish_streams(self._tensors)
        self._mark_waited()
        self._buffers.works_with_callbacks.pop(self, None)
        self._complete_futures()

    def synchronize(self) -> None:
        """As `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the operation is done; lets the other ranks run before it says no.

        A yes counts as a wait. NCCL says yes only after the device has finished, so that all that
        the program does afterwards comes after the operation, without another wait.
        """
        if self._landed:
            return True
        if not self._is_performed():
            return False
        self._land()
        return True

    def _is_performed(self) -> bool:
        baton = self._baton
        baton.advance()
        for op in self._ops:
            if op.awaited.done:
                continue
            file, line = call_site()
            if baton.poll(self._rank, op.awaited, site_of(file, line)):
                continue
            op.poll()
            if not op.awaited.done:
                return False
        return all(op.admits() for op in self._ops)

    def require_wait(self) -> None:
        """Be the work that must be waited for, or seen done, before the rank's program returns."""
        self._unwaited = [op.record for op in self._ops]
        self._baton.log.unwaited.update(self._unwaited)

    def __del__(self) -> None:
        # torch itself drops works whose results nobody can read, and no program can change that.
        if self._unwaited and self.is_of_torch and not self._is_result_held():
            self._mark_waited()

    def _is_result_held(self) -> bool:
        """Whether the program still has memory, other than none, that the operation writes."""
        buffers = [buffer for op in self._ops for buffer in op.buffers]
        own = {id(tensor): tensor for tensor in self._tensors}
        own |= {id(buffer.tensor): buffer.tensor for buffer in buffers}
        own |= {id(buffer.whole): buffer.whole for buffer in buffers if buffer.whole is not None}
        of_storage = Counter(tensor.untyped_storage()._cdata for tensor in own.values())
        return any(
            tensor.numel() and count_holders(tensor) > of_storage[tensor.untyped_storage()._cdata]
            for tensor in self._tensors
        )

    def _mark_waited(self) -> None:
        if self._unwaited:
            self._baton.log.unwaited.difference_update(self._unwaited)
            self._unwaited = ()

    def is_success(self) -> bool:
        """Whether the operation is done: one that fails ends the world instead."""
        return self.is_completed()

    def get_future(self) -> torch.futures.Future:
        """The future of the tensors; a wait for it is a wait for the work.

        The C++ reducer of DistributedDataParallel gets one that is done, because it blocks on it.
        """
        future = SimFuture([self])
        self._futures.append(future)
        # If the running Python function does not name this method, C++ calls it.
        caller = sys._getframe(1).f_code
        if "get_future" not in (*caller.co_names, *caller.co_consts):
            self.wait()
        self.complete_written()
        return future

    def poll_future(self) -> None:
        """Complete the futures if the operation was performed; `FutureSource.poll_future`."""
        if not self.are_futures_done and self._is_performed():
            self._complete_futures()

    def complete_written(self) -> None:
        """Complete the futures if the outputs are there; `FutureSource.complete_written`."""
        if self.are_futures_done or all(op.written for op in self._ops):
            self._complete_futures()

    def note_callback(self) -> None:
        """Let waits for plain futures find this work; `FutureSource.note_callback`."""
        if not self._landed:
            self._buffers.works_with_callbacks[self] = None

    def _complete_futures(self) -> None:
        self.are_futures_done = True
        futures, self._futures = self._futures, []
        for future in futures:
            future.set_result(self._tensors)
        for future in futures:
            future.run_callbacks()

    @contextmanager
    def memory_for_callback(self) -> Iterator[None]:
        """Bring the outputs and take the memory out of flight; `FutureSource`."""
        for op in self._ops:
            op.land()
        in_flight = [buffer for op in self._ops for buffer in op.buffers]
        in_flight = [buffer for buffer in in_flight if self._buffers.land(buffer)]
        finish_streams(self._tensors)
        try:
            yield
        finally:
            if not self._landed:
                for buffer in in_flight:
                    self._buffers.add(buffer)

    def result(self) -> list[Tensor]:
        """The tensors that the operation writes."""
        return self._tensors

    def source_rank(self) -> int:
        """Group rank that a receive came from."""
        return getattr(self._ops[0].awaited, "source", -1)

    _source_rank = source_rank


def join_works(
    works: Sequence[SimWork],
    *,
    baton: Turns,
    rank: int,
    buffers: InFlightBuffers,
    result: Sequence[Any] | None = None,
) -> SimWork:
    """One work for several of a rank, each of which may still be waited for by itself.

    Args:
        works: The works to join, at least one, all of this rank.
        baton: The baton of the run.
        rank: World rank.
        buffers: What the rank has in flight.
        result: What it writes, where that is not what they do.
    """
    ops = [op for work in works for op in work._ops]
    tensors = [tensor for work in works for tensor in work._tensors]
    joined = SimWork(baton, rank, ops, tensors if result is None else result, buffers)
    joined._unwaited = [record for work in works for record in work._unwaited]
    return joined
