"""`torch.distributed.rpc` in ranks.

The process has a single RPC agent, which ranks cannot share. Test harnesses join it by default, so
joining has no effect, and remote calls are refused.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch.distributed import rpc

from zero_sim.errors import UsageError
from zero_sim.sim.callsite import here
from zero_sim.sim.world.rank_threads import rank_state


@contextlib.contextmanager
def remote_calls_refused() -> Iterator[None]:
    """Make joining and leaving RPC no-ops in ranks, and remote calls raise `UsageError`."""

    def in_rank(name: str, replacement: Callable[..., None]) -> Any:
        original = getattr(rpc, name)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return (original if rank_state.join is None else replacement)(*args, **kwargs)

        return mock.patch.object(rpc, name, call)

    with contextlib.ExitStack() as stack:
        # Some builds of torch have no RPC.
        for name in ("init_rpc", "shutdown") if rpc.is_available() else ():
            stack.enter_context(in_rank(name, lambda *args, **kwargs: None))
        for name in ("remote", "rpc_async", "rpc_sync") if rpc.is_available() else ():
            stack.enter_context(in_rank(name, _refuse))
        yield


def _refuse(*args: Any, **kwargs: Any) -> None:
    raise UsageError(
        f"expected no remote calls in ranks, got one by rank {rank_state.rank} at {here()}. "
        "Use collectives, or start real processes."
    )
