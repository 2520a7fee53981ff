"""The race detector, which finds tensor operations on a collective's memory before the wait.

A detector sees every tensor operation of a rank. It is a `TorchDispatchMode`, which torch calls for
each operation, also in autograd, hooks and torch's C++ code. It does not see access to memory
without an operation: `numpy()`, `tolist()`, `data_ptr()`, `torch.save`, pickling, `print` (torch
hides it from modes), and the program's own threads.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Self

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from zero_sim.sim import dispatch
from zero_sim.sim.callsite import call_site, site_of
from zero_sim.sim.failures import Access, ContractViolation, DataRace, WorldFailure
from zero_sim.sim.in_flight_buffers import InFlightBuffer, InFlightBuffers
from zero_sim.sim.inflight import backward
from zero_sim.sim.inflight.uses import is_training, uses_of
from zero_sim.sim.shared_memory import extent, shared_elems


class _Running(threading.local):
    """The running thread's detector, if it is a watched rank."""

    detector: RaceDetector | None = None


_running = _Running()
_NOTHING = nullcontext()


# [Note: an unwatched simulator] The simulator moves all ranks' data in a single rank's thread, and
# the judge reads any memory. Neither is an access by the program. Inside `unwatched`, the detector
# leaves the stack of modes. If it is not on top, it stays there and ignores operations.
def unwatched() -> AbstractContextManager[object]:
    """Return a context for tensor operations that do not count as the program's.

    Without a race detector, and outside a rank, it does nothing.
    """
    detector = _running.detector
    return _NOTHING if detector is None else _Aside(detector)


class _Aside:
    """The context of `unwatched`."""

    def __init__(self, detector: RaceDetector) -> None:
        self._detector = detector
        self._was_on_top = False

    def __enter__(self) -> None:
        self._detector.paused += 1
        # A mode below others cannot be popped. It checks `paused` instead.
        self._was_on_top = dispatch.top_mode() is self._detector
        if self._was_on_top:
            dispatch.pop_mode()

    def __exit__(self, *exception: object) -> None:
        if self._was_on_top:
            dispatch.push_mode(self._detector)
        self._detector.paused -= 1
        # Memory may have been lent or have landed inside.
        self._detector.come_or_go()


class _Ranges:
    """Disjoint address ranges, for a fast overlap test."""

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        for start, stop in sorted(ranges):
            # Merge overlapping and adjacent ranges.
            if self._stops and start <= self._stops[-1]:
                self._stops[-1] = max(self._stops[-1], stop)
            else:
                self._starts.append(start)
                self._stops.append(stop)

    def meet(self, start: int, stop: int) -> bool:
        """Return True if `start` to `stop` (half-open) overlaps any range."""
        # The ranges are disjoint, so the last range that begins before `stop` reaches farthest.
        before = bisect_left(self._starts, stop) - 1
        return before >= 0 and self._stops[before] > start


class RaceDetector(TorchDispatchMode):
    """Watches a rank while the context is open. Entered in the rank's thread."""

    supports_higher_order_operators = True

    def __init__(
        self, rank: int, *, buffers: InFlightBuffers, fail: Callable[[WorldFailure], WorldFailure]
    ) -> None:
        super().__init__()
        self.paused = 0
        """Number of open `unwatched` contexts."""
        self._rank = rank
        self._buffers = buffers
        self._fail = fail
        # Nesting depths: of running backwards, and of `__torch_dispatch__`.
        self._backwards = 0
        self._handled = 0
        # `InFlightBuffers.changes` at the last `_chart`.
        self._charted = -1
        self._charted_spans: list[tuple[int, int, InFlightBuffer]] = []
        self._no_read = self._no_write = _Ranges([])

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # If True, torch wraps __torch_dispatch__ and imports its compiler, which takes seconds.
        return False

    def __enter__(self) -> Self:
        # Without the base class, which also sets flags of the whole process. Ranks enter and leave
        # in any order and would restore each other's flags.
        _running.detector = self
        self._buffers.watcher = self.come_or_go
        backward.listen(self)
        self.come_or_go()
        return self

    def __exit__(self, exc_type: object, exc_val: object, exc_tb: object) -> None:
        backward.stop_listening()
        self._buffers.watcher = None
        _running.detector = None
        dispatch.remove_mode(self)

    # [Note: only while it matters] A mode makes an operation three times as slow, and most
    # operations run while nothing is in flight. So the detector is on the stack only while its rank
    # has memory in flight or undefined (`zero_sim.sim.in_flight_buffers`), and during every
    # backward, because a hook may lend memory; see [Note: modes in a backward]. If C++ starts a
    # backward by itself, which no part of torch does, the detector only sees it if memory was in
    # flight before.
    def come_or_go(self) -> None:
        """Push or pop this mode as needed; see [Note: only while it matters]."""
        if self.paused or _running.detector is not self:
            return
        if self._backwards or len(self._buffers) or self._buffers.undefined:
            # While the mode handles an operation, torch has popped it and will push it again.
            if not self._handled and not dispatch.is_on_stack(self):
                dispatch.push_mode_lowest(self)
        elif dispatch.top_mode() is self:
            dispatch.pop_mode()

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Stay on the stack during a backward; `Listener.in_backward`."""
        self._backwards += 1
        self.come_or_go()
        try:
            yield
        finally:
            self._backwards -= 1
            self.come_or_go()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run and check the rank's operation. Called by torch."""
        kwargs = kwargs or {}
        if types:
            if any(map(dispatch.is_fake, types)):
                return func(*args, **kwargs)
            if any(map(dispatch.has_own_dispatch, types)):
                # The class, such as DTensor, now runs plain operations, which the mode sees.
                return NotImplemented
        if self._charted != self._buffers.changes:
            self._chart()
        self._handled += 1
        try:
            if (self._charted_spans or self._buffers.undefined) and not self.paused:
                return self._run_watched(func, args, kwargs)
            return func(*args, **kwargs)
        finally:
            self._handled -= 1

    def _chart(self) -> None:
        """Note the addresses of all buffers in flight."""
        self._charted = self._buffers.changes
        self._charted_spans = [(*extent(buffer.tensor), buffer) for buffer in self._buffers]
        self._no_write = _Ranges((start, stop) for start, stop, _ in self._charted_spans)
        self._no_read = _Ranges(
            (start, stop) for start, stop, buffer in self._charted_spans if buffer.role == "output"
        )

    def _run_watched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        views: list[Tensor] = []
        # Check views after the operation, when it is known if the result shares their memory.
        for index, name, effect in uses_of(func):
            value = args[index] if index < len(args) else kwargs.get(name)
            tensors = value if isinstance(value, (list, tuple)) else (value,)
            writes = effect in ("write", "update") or (
                effect == "statistics" and is_training(func, args, kwargs)
            )
            barred = self._no_write if writes else self._no_read
            undefined = self._buffers.undefined
            for tensor in tensors:
                # Optional tensors may be missing, and numbers may replace tensors.
                if not isinstance(tensor, Tensor):
                    continue
                if not barred.meet(*extent(tensor)) and not undefined:
                    continue
                if effect == "view":
                    views.append(tensor)
                    continue
                self._check(func, tensor, writes=writes)
                if effect != "write":
                    self._check_defined(func, tensor)
                if writes:
                    # A partial write, as by index_copy_, counts as defining the whole tensor.
                    undefined.define(tensor)
        result = func(*args, **kwargs)
        for tensor in views:
            if not _shares_storage(result, tensor):
                self._check(func, tensor, writes=False)
                self._check_defined(func, tensor)
        return result

    def _check(self, func: Any, tensor: Tensor, *, writes: bool) -> None:
        """Raise DataRace if an argument shares an element with a buffer that forbids this use."""
        start, stop = extent(tensor)
        for span_start, span_stop, buffer in self._charted_spans:
            if span_start >= stop or span_stop <= start:
                continue
            if buffer.role == "input" and not writes:
                continue
            # The spans overlap, but strided tensors may still share no element.
            touched = shared_elems(buffer.tensor, tensor)
            if touched is not None:
                raise self._fail(self._race(func, buffer, touched=touched, writes=writes))

    def _check_defined(self, func: Any, tensor: Tensor) -> None:
        """Raise ContractViolation if a tensor has undefined content."""
        origin = self._buffers.undefined.origin_of(tensor)
        if origin is not None:
            rank = self._rank
            raise self._fail(
                ContractViolation(
                    f"rank {rank}: {dispatch.name_of(func)} at {site_of(*call_site())} reads the "
                    f"{origin}, whose content is undefined: this tensor was passed as several "
                    "outputs, and any of them may be written last. Pass a separate tensor for "
                    "each output that is read.",
                    aspect="undefined-output",
                    rank=rank,
                    other_rank=rank,
                )
            )

    def _race(
        self, func: Any, buffer: InFlightBuffer, *, touched: tuple[int, int], writes: bool
    ) -> DataRace:
        # `touched` counts from the buffer's start, the report from the whole tensor's start.
        before = 0
        if buffer.whole is not None:
            skipped_bytes = buffer.tensor.data_ptr() - buffer.whole.data_ptr()
            before = skipped_bytes // buffer.tensor.element_size()
        file, line = call_site()
        access = Access(
            operation=dispatch.name_of(func),
            node=dispatch.autograd_node(),
            writes=writes,
            file=file,
            line=line,
            start=before + touched[0],
            stop=before + touched[1],
        )
        return DataRace(self._rank, access=access, buffer=buffer)


def _shares_storage(result: Any, tensor: Tensor) -> bool:
    """Return True if any of an operation's results is a view of its argument."""
    results = result if isinstance(result, (list, tuple)) else (result,)
    storage = tensor.untyped_storage().data_ptr()
    return any(
        isinstance(each, Tensor) and each.untyped_storage().data_ptr() == storage
        for each in results
    )
