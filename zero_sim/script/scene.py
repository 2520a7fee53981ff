"""Process setup for a script's ranks (streams, calls, devices), and records of runs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any

from zero_sim.script.absent import stubs_of_kernels, without_compiler
from zero_sim.script.cuda import CudaOnCpu
from zero_sim.script.custom_ops import operators_of_ranks
from zero_sim.script.output import RankOutput
from zero_sim.script.process_calls import calls_of_ranks, processes_of_ranks
from zero_sim.script.rank_state import RankState
from zero_sim.script.record import PointRecorder, ScriptRun
from zero_sim.script.remote_calls import remote_calls_refused
from zero_sim.script.script_checkpoints import record_with
from zero_sim.script.settings import Guest, Settings
from zero_sim.sim import RankFailed, World, WorldFailure
from zero_sim.sim.callsite import raising_site, site_of


class Scene:
    """Setup of the process for a script run.

    Args:
        settings: World of the run.
        guest: Observer inside the ranks.
        state_in_place: Returns the running world's state.
        note: Receives notes for the user.
    """

    def __init__(
        self,
        settings: Settings,
        guest: Guest,
        *,
        state_in_place: Callable[[], RankState],
        note: Callable[[str], None],
    ) -> None:
        self._note = note
        self._settings = settings
        self._guest = guest
        self._state_in_place = state_in_place
        self._recorders: dict[int, PointRecorder] = {}
        # By default a GPU per rank, because most scripts use device LOCAL_RANK.
        self._cuda = CudaOnCpu(
            device_count=settings.gpus_per_node or settings.ranks_per_node,
            rank=lambda: state_in_place().current,
        )
        self._streams: tuple[RankOutput, RankOutput] | None = None

    @contextlib.contextmanager
    def set_up(self, *, writer: Callable[[], int], quiet: bool) -> Iterator[None]:
        """Set the process up for ranks.

        Args:
            writer: Returns the writing rank, as for `RankOutput`.
            quiet: True to hide the output of ranks.
        """
        with contextlib.ExitStack() as stack:
            # Streams first: they are restored last, and so show messages of all other contexts.
            self._streams = stack.enter_context(self._output(writer, quiet=quiet))
            # Look the state up in each call, because a starter and its ranks have different states.
            owns = lambda module: self._state_in_place().owns(module)  # noqa: E731
            stack.enter_context(calls_of_ranks(owns))
            stack.enter_context(processes_of_ranks())
            stack.enter_context(operators_of_ranks())
            stack.enter_context(remote_calls_refused())
            stack.enter_context(without_compiler(self._note))
            if self._settings.kernels_are_stubs:
                stack.enter_context(stubs_of_kernels())
            if self._settings.cuda_is_cpu:
                stack.enter_context(self._cuda.installed())
            yield

    def devices_in_rank(self) -> contextlib.AbstractContextManager[object]:
        """Return a context for a program; with `cuda_is_cpu`, cuda devices are the CPU in it."""
        return self._cuda.in_rank() if self._settings.cuda_is_cpu else contextlib.nullcontext()

    def run_in_rank(self, world: World, rank: int, program: Callable[[], Any]) -> None:
        """Run a rank's program under the guest and a point recorder."""
        world.log.watch = self._guest.called
        record_with(self._recorders.setdefault(rank, PointRecorder()))
        try:
            with self.devices_in_rank(), self._guest.in_rank(rank):
                program()
        finally:
            record_with(None)
            self.end_lines(rank)

    def end_lines(self, writer: int) -> None:
        """Show a writer's unfinished lines."""
        for stream in self._streams or ():
            stream.end_rank(writer)

    def recorded(
        self,
        *,
        seed: int,
        failure: WorldFailure | None,
        collective_count: int,
        started: tuple[int, ...] = (),
    ) -> ScriptRun:
        """Return the record of the run."""
        assert self._streams is not None
        return ScriptRun(
            seed=seed,
            failure=failure,
            ending=ending_of(failure),
            output=tuple(self._streams[0].lines),
            points=tuple(tuple(each.points) for _, each in sorted(self._recorders.items())),
            collective_count=collective_count,
            settings=self._settings,
            started=started,
        )

    @contextlib.contextmanager
    def _output(
        self, writer: Callable[[], int], *, quiet: bool
    ) -> Iterator[tuple[RankOutput, RankOutput]]:
        # Standard error is not kept for comparison: its warnings and times differ between equal
        # runs.
        shown: Collection[int] | None = frozenset() if quiet else self._settings.shown
        streams = sys.stdout, sys.stderr
        out, err = (
            RankOutput(stream, writer=writer, shown=shown, kept=kept)
            for stream, kept in zip(streams, (0, -1), strict=True)
        )
        sys.stdout, sys.stderr = out, err
        try:
            yield out, err
        finally:
            sys.stdout, sys.stderr = streams


def ending_of(failure: WorldFailure | None) -> str:
    """Describe a run's ending in one line."""
    if failure is None:
        return "every rank reached its end"
    if not isinstance(failure, RankFailed):
        # Only the first line, because the rest contains stacks, which differ between runs.
        return str(failure).partition("\n")[0]
    site = site_of(*raising_site(failure.error))
    if isinstance(failure.error, SystemExit):
        return f"rank {failure.rank} exited with {failure.error.code!r} at {site}"
    name = type(failure.error).__name__
    return f"rank {failure.rank} raised {name} at {site}: {failure.error}"
