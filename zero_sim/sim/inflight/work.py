"""Work: torch.distributed's handle of an operation in flight."""

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
    """One rank's side of an operation. A wait passes on the baton until the operation is done.

    Args:
        baton: The baton of the run.
        rank: World rank.
        ops: The operations, several if coalesced.
        tensors: The tensors that they write.
        buffers: The rank's buffers in flight.
    """

    _unwaited: Sequence[int] = ()
    """Indices of records that must be waited for, or seen done, before the program returns."""
    timeout_seconds: float | None = None
    """Longest wait, in simulated time. None for no limit."""
    is_of_torch = False
    """True if torch's own code holds the work, not a program."""

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
        """Futures that are not done."""
        self.are_futures_done = False
        """True once the futures' callbacks have run."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block this rank until the operation is done. Hangs are reported without a time-out.

        Raises:
            TimedOut: For barriers, if this rank or another one gave up.
        """
        baton = self._baton
        # A wait counts as a call into the world, even if it returns at once.
        baton.advance()
        if not self._landed:
            for op in self._ops:
                baton.log.note(self._rank, "wait", op.record)
        for op in self._ops:
            op.start_wait()
            if not op.awaited.done and op.awaited.given_up is None:
                self._wait_for(op.awaited)
                # Another member timed out: the collective will never complete.
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
            # Wakes the other members, which raise `after_another`.
            self._baton.finish(awaited)
            self._mark_waited()
            raise

    def _land(self) -> None:
        if self._landed:
            return
        self._landed = True
        baton = self._baton
        # Land each operation, then its buffers, so that the memory is checked while still in
        # flight.
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
        """Wait, as `wait` does."""
        self.wait()

    def is_completed(self) -> bool:
        """Return True if the operation is done; otherwise first let other ranks run.

        True counts as a wait. NCCL returns True only after the device has finished, so later work
        of the program runs after the operation without another wait.
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
            # With late timings, a program that polls in a loop may be the only one to perform it.
            op.poll()
            if not op.awaited.done:
                return False
        return all(op.admits() for op in self._ops)

    def require_wait(self) -> None:
        """Require a wait, or a poll that returned True, before the rank's program returns."""
        self._unwaited = [op.record for op in self._ops]
        self._baton.log.unwaited.update(self._unwaited)

    def __del__(self) -> None:
        # torch drops some works whose results cannot be read. Programs cannot change that.
        if self._unwaited and self.is_of_torch and not self._is_result_held():
            self._mark_waited()

    def _is_result_held(self) -> bool:
        """Return True if the program still holds memory, not empty, that the operation writes."""
        buffers = [buffer for op in self._ops for buffer in op.buffers]
        # Tensors of this work and its buffers also refer to the storage, so only more count.
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
        """Return `is_completed()`, because a failed operation ends the world instead."""
        return self.is_completed()

    def get_future(self) -> torch.futures.Future:
        """Return the future of the tensors. A wait for it waits for the work.

        For the C++ reducer of DistributedDataParallel it is done, because the reducer blocks on it.
        """
        future = SimFuture([self])
        # Completed with the work, or at once below.
        self._futures.append(future)
        # If the calling Python function does not name this method, the caller is C++.
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
        """Complete the futures if the outputs are written; `FutureSource.complete_written`."""
        if self.are_futures_done or all(op.written for op in self._ops):
            self._complete_futures()

    def note_callback(self) -> None:
        """Register this work for waits on plain futures; `FutureSource.note_callback`."""
        if not self._landed:
            self._buffers.works_with_callbacks[self] = None

    def _complete_futures(self) -> None:
        self.are_futures_done = True
        futures, self._futures = self._futures, []
        # All results before any callback: a callback may read another future of this work.
        for future in futures:
            future.set_result(self._tensors)
        for future in futures:
            future.run_callbacks()

    @contextmanager
    def memory_for_callback(self) -> Iterator[None]:
        """Write the outputs and take the memory out of flight; `FutureSource`."""
        for op in self._ops:
            op.land()
        in_flight = [buffer for op in self._ops for buffer in op.buffers]
        in_flight = [buffer for buffer in in_flight if self._buffers.land(buffer)]
        finish_streams(self._tensors)
        try:
            yield
        finally:
            # The rank has not waited yet, so after the callback its memory is in flight again.
            if not self._landed:
                for buffer in in_flight:
                    self._buffers.add(buffer)

    def result(self) -> list[Tensor]:
        """Return the tensors that the operation writes."""
        return self._tensors

    def source_rank(self) -> int:
        """Return the group rank of a receive's sender."""
        # -1 for collectives.
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
    """Join several works of a rank into one. Each can still be waited for separately.

    Args:
        works: The works, at least one, all of this rank.
        baton: The baton of the run.
        rank: World rank.
        buffers: The rank's buffers in flight.
        result: Result of the joined work; by default all tensors of the works.
    """
    ops = [op for work in works for op in work._ops]
    tensors = [tensor for work in works for tensor in work._tensors]
    joined = SimWork(baton, rank, ops, tensors if result is None else result, buffers)
    joined._unwaited = [record for work in works for record in work._unwaited]
    return joined
