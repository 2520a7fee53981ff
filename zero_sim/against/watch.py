"""Looks on at every run of a script: do replicas stay equal, and which ranks read which rows."""

from __future__ import annotations

import contextlib
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence

from zero_sim.against.capture import RankCapture
from zero_sim.against.hooks import hooks_installed
from zero_sim.against.points import Piece, Point
from zero_sim.against.rank_replicas import RankReplicas
from zero_sim.against.replicas import ReplicaCheck
from zero_sim.against.rows import RowLog
from zero_sim.sim.call import Call
from zero_sim.sim.log import CollectiveRecord
from zero_sim.sim.world.rank_threads import rank_state
from zero_sim.sim.world.run import Run

_OF_HOOKS = r"Using `torch\.compile\(module\)` when there are global hooks"


class _Nothing:
    """A sink for a run that is compared with no other."""

    def wants(self, point: Point) -> bool:
        """No point."""
        return False

    def take(self, rank: int, point: Point, piece: Piece) -> None:
        """Never called."""

    def forget(self) -> None:
        """Nothing is kept."""


class ScriptWatch:
    """The guest of one run.

    Args:
        world_size: Number of ranks.
        allowed: Patterns of names of tensors that may drift apart.
    """

    needs_all_ranks = False

    def __init__(self, *, world_size: int, allowed: Sequence[str] = ()) -> None:
        self.replicas = ReplicaCheck(world_size=world_size, allowed=allowed)
        self.rows: dict[int, RowLog] = defaultdict(RowLog)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Around the whole run."""
        with hooks_installed(observes_all=False):
            yield

    @contextlib.contextmanager
    def in_rank(self, rank: int) -> Iterator[None]:
        """Around one rank's program."""
        run = rank_state.run
        assert isinstance(run, Run)
        self.replicas.world_size = len(run.buffers)
        capture = RankCapture(
            rank,
            sink=_Nothing(),
            rows=self.rows[rank],
            start={},
            replicas=RankReplicas(rank, self.replicas),
        )
        # torch.compile warns of hooks on all modules, which the script has not asked for.
        warnings.filterwarnings("ignore", message=_OF_HOOKS)
        with capture.observing():
            yield

    def in_starter(self) -> contextlib.AbstractContextManager[object]:
        """Nothing around the main part of a script that starts its ranks."""
        return contextlib.nullcontext()

    def called(self, record: CollectiveRecord, call: Call) -> None:
        """Nothing to do."""
