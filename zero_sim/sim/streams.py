"""Streams of a device: work that another rank has to see is finished first.

[Note: streams of ranks]
On a device each thread issues its work to a stream, and what two streams do has no order unless one
waits for the other. A real backend makes the stream of a collective wait for that of whoever calls
it, and the other way round at the wait. In one process of many ranks one rank's thread reads and
writes the memory of all, on its own stream. As long as all are on the default stream that is in
order; who is on another one waits for the device: before its call is taken, after it has moved
data, and when its wait returns.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

# By a name of this module: a script whose GPUs are the CPU changes `torch.accelerator`.
from torch.accelerator import current_accelerator

_DEFAULT_STREAM = 0


def finish_streams(tensors: Iterable[Tensor | list[Tensor]]) -> None:
    """Let the device of tensors finish its work, unless this thread is on its default stream.

    See [Note: streams of ranks].

    Args:
        tensors: What is read or written, in lists where a rank has several.
    """
    for tensor in tensors:
        if isinstance(tensor, list):
            return finish_streams(tensor)
        if tensor.device.type != "cpu":
            _finish(tensor.device)
            return


def _finish(device: torch.device) -> None:
    accelerator = current_accelerator(check_available=True)
    if accelerator is None or accelerator.type != device.type:
        return
    if torch.accelerator.current_stream(device).stream_id != _DEFAULT_STREAM:
        torch.accelerator.synchronize(device)
