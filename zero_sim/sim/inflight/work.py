"""Work: torch.distributed's handle for an operation in flight."""

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
    """A rank's handle for an operation, or for several if coalesced.

    A wait passes on the baton until all are done. `tensors` are the results.
    """

    _unwaited: Sequence[int] = ()
    """Records of calls that the rank must wait for, or see done, before its program returns."""
    timeout_seconds: float | None = None
    """Longest wait, in simulated time. None for no limit."""
    is_of_torch = False
    """True if torch's own code made the call, not the program."""

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
        """Unfinished futures of this work."""
        self.are_futures_done = False
        """True once the futures' callbacks have run."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block this rank until the operation is done. Ignores `timeout`.

        Raises:
            TimedOut: A barrier timed out, on this rank or on another.
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
            if op.awaited.given_up is not None:
                # Another member timed out, so the collective will never complete.
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
            # Wake the other members, which raise `after_another`.
            self._baton.finish(awaited)
            self._mark_waited()
            raise

    def _land(self) -> None:
        if self._landed:
            return
        self._landed = True
        baton = self._baton
        # The operation lands before its buffers, because it checks memory in flight.
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
        """Same as `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Return True if the operation is done; otherwise first let other ranks run.

        A result of True counts as a wait.
        """
        if self._landed:
            return True
        if not self._is_performed():
            return False
        # NCCL returns True only after the device has finished, so the program's later work needs no
        # wait.
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
            # With late timings, polls may be the only calls that could perform the operation.
            op.poll()
            if not op.awaited.done:
                return False
        return all(op.admits() for op in self._ops)

    def require_wait(self) -> None:
        """Require a wait, or a poll that returns True, before the rank's program returns."""
        self._unwaited = [op.record for op in self._ops]
        self._baton.log.unwaited.update(self._unwaited)

    def __del__(self) -> None:
        # torch drops some works without a wait, which is fine if nothing can read their results.
        if self._unwaited and self.is_of_torch and not self._is_result_held():
            self._mark_waited()

    def _is_result_held(self) -> bool:
        """Return True if the program still has a tensor on the results' memory."""
        buffers = [buffer for op in self._ops for buffer in op.buffers]
        # Do not count this work's own tensors and buffers, which also refer to the storage.
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
        """Return `is_completed()`, because a failed operation ends the world."""
        return self.is_completed()

    def get_future(self) -> torch.futures.Future:
        """Return a future for the results. Waiting for it waits for the work."""
        future = SimFuture([self])
        self._futures.append(future)
        # If the calling Python function does not name this method, the caller is C++, such as
        # DistributedDataParallel's reducer. It will block on the future, so wait here; see
        # [Note: C++] in `futures`.
        caller = sys._getframe(1).f_code
        if "get_future" not in (*caller.co_names, *caller.co_consts):
            self.wait()
        self.complete_written()
        return future

    def poll_future(self) -> None:
        """See `FutureSource.poll_future`."""
        if not self.are_futures_done and self._is_performed():
            self._complete_futures()

    def complete_written(self) -> None:
        """See `FutureSource.complete_written`."""
        if self.are_futures_done or all(op.written for op in self._ops):
            self._complete_futures()

    def note_callback(self) -> None:
        """Register this work for waits on plain futures; see `FutureSource.note_callback`."""
        if not self._landed:
            self._buffers.works_with_callbacks[self] = None

    def _complete_futures(self) -> None:
        self.are_futures_done = True
        futures, self._futures = self._futures, []
        # Set all results before any callback, which may read another future of this work.
        for future in futures:
            future.set_result(self._tensors)
        for future in futures:
            future.run_callbacks()

    @contextmanager
    def memory_for_callback(self) -> Iterator[None]:
        """See `FutureSource.memory_for_callback`."""
        for op in self._ops:
            op.land()
        in_flight = [buffer for op in self._ops for buffer in op.buffers]
        in_flight = [buffer for buffer in in_flight if self._buffers.land(buffer)]
        finish_streams(self._tensors)
        try:
            yield
        finally:
            # The rank has not waited, so after the callback the memory is in flight again.
            if not self._landed:
                for buffer in in_flight:
                    self._buffers.add(buffer)

    def result(self) -> list[Tensor]:
        """Return the operation's results."""
        return self._tensors

    def source_rank(self) -> int:
        """Return the sender's group rank for a receive; -1 for a collective."""
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
    """Join at least one work of a rank. The program can still wait for each.

    `result` is the joined work's result; by default all the works' results.
    """
    ops = [op for work in works for op in work._ops]
    tensors = [tensor for work in works for tensor in work._tensors]
    joined = SimWork(baton, rank, ops, tensors if result is None else result, buffers)
    joined._unwaited = [record for work in works for record in work._unwaited]
    return joined
