"""Observation of any script run: equality of replicas, and the ranks' rows."""

from __future__ import annotations

import contextlib
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence

from zero_sim.against.capture import RankCapture
from zero_sim.against.hooks import hooks_installed
from zero_sim.against.points import Sink
from zero_sim.replicas.check import ReplicaCheck
from zero_sim.replicas.of_rank import RankReplicas, world_size_of_run
from zero_sim.replicas.rows import RowLog
from zero_sim.sim.call import Call
from zero_sim.sim.log import CollectiveRecord

_OF_HOOKS = r"Using `torch\.compile\(module\)` when there are global hooks"


class ScriptWatch:
    """Observer inside the ranks of a run.

    Args:
        allowed: Name patterns of tensors that may drift apart.
    """

    needs_all_ranks = False

    def __init__(self, *, allowed: Sequence[str] = ()) -> None:
        self.replicas = ReplicaCheck(allowed=allowed)
        self.rows: dict[int, RowLog] = defaultdict(RowLog)

    def watching(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for the whole run."""
        return hooks_installed(observes_all=False)

    @contextlib.contextmanager
    def in_rank(self, rank: int) -> Iterator[None]:
        """Observe one rank's program."""
        capture = RankCapture(
            sink=Sink(),
            rows=self.rows[rank],
            replicas=RankReplicas(rank, self.replicas, world_size=world_size_of_run()),
        )
        # torch.compile warns about global hooks, but they are ours, not the script's.
        warnings.filterwarnings("ignore", message=_OF_HOOKS)
        with capture.observing():
            yield

    def in_starter(self) -> contextlib.AbstractContextManager[object]:
        """Return an empty context."""
        return contextlib.nullcontext()

    def called(self, record: CollectiveRecord, call: Call) -> None:
        """Do nothing."""
