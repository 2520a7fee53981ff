"""gloo group for the stand-in device, which moves data through copies in CPU memory.

It has the process group methods that `zero_sim.backends.folding` calls. All complete before they
return, except `send` and `recv`, whose work must be waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch.distributed as dist
from torch import Tensor


class _Work(dist.Work):
    """A gloo work, and the function to call when it completes."""

    def __init__(self, inner: Any, finish: Callable[[], None]) -> None:
        super().__init__()
        self._inner, self._finish = inner, finish

    def wait(self, timeout: Any = None) -> bool:
        done = self._inner.wait()
        finish, self._finish = self._finish, lambda: None
        finish()
        return done

    def _source_rank(self) -> int:
        return self._inner._source_rank()


class Staged:
    """A gloo group that accepts tensors of the stand-in device.

    Args:
        inner: The gloo group, for CPU tensors.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def size(self) -> int:
        return self._inner.size()

    def shutdown(self) -> None:
        self._inner.shutdown()

    def abort(self) -> None:
        self._inner.abort()

    def barrier(self, options: Any) -> Any:
        # Drop the options, which name a device unknown to gloo.
        return self._inner.barrier(dist.BarrierOptions())

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor]) -> Any:
        staged = [[part.cpu() for part in parts] for parts in outputs]
        work = self._inner.allgather(staged, [tensor.cpu() for tensor in inputs])
        return self._back(work, list(chain(*outputs)), list(chain(*staged)))

    def broadcast(self, tensors: Sequence[Tensor], options: Any) -> Any:
        staged = [tensor.cpu() for tensor in tensors]
        return self._back(self._inner.broadcast(staged, options), tensors, staged)

    def scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], options: Any
    ) -> Any:
        staged = [tensor.cpu() for tensor in outputs]
        sent = [[tensor.cpu() for tensor in each] for each in inputs]
        return self._back(self._inner.scatter(staged, sent, options), outputs, staged)

    def gather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], options: Any
    ) -> Any:
        staged = [[tensor.cpu() for tensor in each] for each in outputs]
        work = self._inner.gather(staged, [tensor.cpu() for tensor in inputs], options)
        return self._back(work, list(chain(*outputs)), list(chain(*staged)))

    def alltoall_base(self, output: Tensor, sent: Tensor, *splits_and_options: Any) -> Any:
        staged = output.cpu()
        work = self._inner.alltoall_base(staged, sent.cpu(), *splits_and_options)
        return self._back(work, [output], [staged])

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Any:
        staged = [tensor.cpu() for tensor in tensors]
        # Keep the copies alive until the send completes.
        return _Work(self._inner.send(staged, peer, tag), staged.clear)

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Any:
        return self._received(tensors, lambda staged: self._inner.recv(staged, peer, tag))

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> Any:
        return self._received(tensors, lambda staged: self._inner.recv_anysource(staged, tag))

    def _received(self, tensors: Sequence[Tensor], call: Callable[[list[Tensor]], Any]) -> Any:
        staged = [tensor.cpu() for tensor in tensors]

        def finish() -> None:
            for tensor, value in zip(tensors, staged, strict=True):
                tensor.copy_(value)

        return _Work(call(staged), finish)

    def _back(self, work: Any, tensors: Sequence[Tensor], staged: Sequence[Tensor]) -> Any:
        work.wait()
        for tensor, value in zip(tensors, staged, strict=True):
            tensor.copy_(value)
        return work
