"""The race detector: finds the operation that touches a collective's memory before the wait.

A detector sees every tensor operation of one rank: it is a `TorchDispatchMode`, which torch asks
before each operation, also those of autograd, of hooks and of torch's C++ code. What gets at memory
without an operation stays unseen: `numpy()`, `tolist()`, `data_ptr()`, `torch.save`, pickling,
`print`, which torch hides from modes, and threads of the program's own.

[Note: an unwatched simulator]
The simulator moves the data of all ranks in the thread of one, and the judge looks at what it
likes. Neither is an access by the program. Inside `unwatched` the detector takes itself off the
stack of modes; where it is not on top, it stays and looks away.

[Note: only while it matters]
An operation that passes a mode costs three times as much, and most pass while nothing is in flight.
So the detector is on the stack of modes only while its rank has something in flight or undefined
(`zero_sim.sim.in_flight_buffers`), and in every backward, in which a hook may lend something; see
[Note: modes in a backward]. A backward that C++ code begins of its own, as no part of torch does,
is seen only if something was in flight before.
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
    """The detector of the running thread, if it is a rank that is watched."""

    detector: RaceDetector | None = None


_running = _Running()
_NOTHING = nullcontext()


def unwatched() -> AbstractContextManager[object]:
    """A context whose tensor operations only observe and are charged to nobody.

    Without a race detector, and outside of a rank, it does nothing.
    """
    detector = _running.detector
    return _NOTHING if detector is None else _Aside(detector)


class _Aside:
    """The context that `unwatched` gives."""

    def __init__(self, detector: RaceDetector) -> None:
        self._detector = detector
        self._was_on_top = False

    def __enter__(self) -> None:
        self._detector.paused += 1
        self._was_on_top = dispatch.top_mode() is self._detector
        if self._was_on_top:
            dispatch.pop_mode()

    def __exit__(self, *exception: object) -> None:
        if self._was_on_top:
            dispatch.push_mode(self._detector)
        self._detector.paused -= 1
        self._detector.come_or_go()


class _Ranges:
    """Disjoint ranges of addresses, asked whether they meet another one."""

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        for start, stop in sorted(ranges):
            if self._stops and start <= self._stops[-1]:
                self._stops[-1] = max(self._stops[-1], stop)
            else:
                self._starts.append(start)
                self._stops.append(stop)

    def meet(self, start: int, stop: int) -> bool:
        """Whether any address from `start` to `stop`, half-open, is in one of them."""
        before = bisect_left(self._starts, stop) - 1
        return before >= 0 and self._stops[before] > start


class RaceDetector(TorchDispatchMode):
    """Watches one rank while it is entered, by the thread that enters it.

    Args:
        rank: World rank, for the failure.
        buffers: What the rank has in flight.
        fail: Ends the world with a failure and returns it.
    """

    supports_higher_order_operators = True

    def __init__(
        self, rank: int, *, buffers: InFlightBuffers, fail: Callable[[WorldFailure], WorldFailure]
    ) -> None:
        super().__init__()
        self.paused = 0
        """How many `unwatched` contexts are open."""
        self._rank = rank
        self._buffers = buffers
        self._fail = fail
        self._backwards = 0
        self._handled = 0
        self._charted = -1
        self._charted_spans: list[tuple[int, int, InFlightBuffer]] = []
        self._no_read = self._no_write = _Ranges([])

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise torch wraps __torch_dispatch__ and imports its compiler, which takes seconds.
        return False

    def __enter__(self) -> Self:
        # Not as the base class does it, which also sets flags of the whole process: ranks come and
        # go in any order, and would restore each other's.
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

    def come_or_go(self) -> None:
        """Be on the stack of modes, or not; see [Note: only while it matters]."""
        if self.paused or _running.detector is not self:
            return
        if self._backwards or len(self._buffers) or self._buffers.undefined:
            # While it handles an operation, torch has it off the stack and will put it back.
            if not self._handled and not dispatch.is_on_stack(self):
                dispatch.push_mode_lowest(self)
        elif dispatch.top_mode() is self:
            dispatch.pop_mode()

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Be on the stack of modes; `Listener.in_backward`."""
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
        """Run one operation of the rank; called by torch."""
        kwargs = kwargs or {}
        if types:
            if any(map(dispatch.is_fake, types)):
                return func(*args, **kwargs)
            if any(map(dispatch.has_own_dispatch, types)):
                # What such a class, DTensor for one, does with plain tensors is seen after this.
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
        """Note the addresses of what is in flight now."""
        self._charted = self._buffers.changes
        self._charted_spans = [(*extent(buffer.tensor), buffer) for buffer in self._buffers]
        self._no_write = _Ranges((start, stop) for start, stop, _ in self._charted_spans)
        self._no_read = _Ranges(
            (start, stop) for start, stop, buffer in self._charted_spans if buffer.role == "output"
        )

    def _run_watched(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        views: list[Tensor] = []
        for index, name, effect in uses_of(func):
            value = args[index] if index < len(args) else kwargs.get(name)
            tensors = value if isinstance(value, (list, tuple)) else (value,)
            writes = effect in ("write", "update") or (
                effect == "statistics" and is_training(func, args, kwargs)
            )
            barred = self._no_write if writes else self._no_read
            undefined = self._buffers.undefined
            for tensor in tensors:
                # Optional ones can be missing, and numbers stand in for tensors.
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
                    undefined.define(tensor)
        result = func(*args, **kwargs)
        for tensor in views:
            if not _shares_storage(result, tensor):
                self._check(func, tensor, writes=False)
                self._check_defined(func, tensor)
        return result

    def _check(self, func: Any, tensor: Tensor, *, writes: bool) -> None:
        """Compare an argument with every buffer in flight, element by element.

        Raises:
            DataRace: It shares memory with one that bars this use.
        """
        start, stop = extent(tensor)
        for span_start, span_stop, buffer in self._charted_spans:
            if span_start >= stop or span_stop <= start:
                continue
            if buffer.role == "input" and not writes:
                continue
            touched = shared_elems(buffer.tensor, tensor)
            if touched is not None:
                raise self._fail(self._race(func, buffer, touched=touched, writes=writes))

    def _check_defined(self, func: Any, tensor: Tensor) -> None:
        """Refuse to read undefined memory.

        Raises:
            ContractViolation: A part of the tensor is undefined.
        """
        origin = self._buffers.undefined.origin_of(tensor)
        if origin is not None:
            rank = self._rank
            raise self._fail(
                ContractViolation(
                    f"rank {rank}: {dispatch.name_of(func)} at {site_of(*call_site())} reads the "
                    f"{origin}, whose content is undefined: this tensor is there as several "
                    "outputs, and any of them may be written last. Pass a tensor of its own for "
                    "each output that is read.",
                    aspect="undefined-output",
                    rank=rank,
                    other_rank=rank,
                )
            )

    def _race(
        self, func: Any, buffer: InFlightBuffer, *, touched: tuple[int, int], writes: bool
    ) -> DataRace:
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
    """Whether the result of an operation is a view of its argument, or several."""
    results = result if isinstance(result, (list, tuple)) else (result,)
    storage = tensor.untyped_storage().data_ptr()
    return any(
        isinstance(each, Tensor) and each.untyped_storage().data_ptr() == storage
        for each in results
    )
