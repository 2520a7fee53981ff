"""Device streams: wait for work before another rank needs its result."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

# Imported by name, because a script with simulated GPUs replaces `torch.accelerator`.
from torch.accelerator import current_accelerator

_DEFAULT_STREAM = 0


# [Note: streams of ranks] On a device, each thread issues its work to a stream, and work on two
# streams has no order unless one waits for the other. In a real backend, a collective's stream
# waits for the caller's stream, and at the wait the caller's stream waits for the collective's.
# Here all ranks share a process, and a single rank's thread reads and writes all ranks' memory on
# its own stream. If all ranks use the default stream, this work is in order. A rank on another
# stream waits for the device: before its call starts, after it moves data, and before its wait
# returns.
def finish_streams(tensors: Iterable[Tensor | list[Tensor]]) -> None:
    """Wait for the tensors' device unless this thread uses the default stream.

    All tensors are on the same device. See [Note: streams of ranks].
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
    # Wait for the whole device, because the other rank's stream is unknown here.
    if torch.accelerator.current_stream(device).stream_id != _DEFAULT_STREAM:
        torch.accelerator.synchronize(device)
