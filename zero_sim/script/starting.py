"""Runs of scripts that start their ranks themselves.

The script's main part runs on a world of one rank, so it has its own environment, modules and
random numbers. Its processes run as ranks and begin with copies of these.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence

from zero_sim.errors import UsageError
from zero_sim.script.launch_commands import commands_of_ranks
from zero_sim.script.output import CALLER, STARTER
from zero_sim.script.program import Script, run_as_started, run_script
from zero_sim.script.rank_state import RankState
from zero_sim.script.record import ScriptRun
from zero_sim.script.scene import Scene
from zero_sim.script.settings import Guest, Settings
from zero_sim.script.started_ranks import RankPopen, StartedRanks, started_as_ranks
from zero_sim.sim import World, WorldFailure

# Maximum delay of Ctrl-C while ranks run.
_LOOK_SECONDS = 0.2


class StartingScript:
    """Run of a script that starts its ranks.

    Args:
        script: Script to run.
        settings: Settings of the script's worlds. The script decides their size.
        guest: Observer inside the ranks.
        seed: Seed of the run.
        note: Receives notes for the user.
    """

    def __init__(
        self,
        script: Script,
        settings: Settings,
        guest: Guest,
        *,
        seed: int,
        note: Callable[[str], None],
    ) -> None:
        self._script = script
        self._guest = guest
        self._note = note
        self._settings = settings
        self._seed = seed
        # Without torchrun's variables, like a process that `python` starts.
        self._starter_state = RankState(
            environment=lambda rank: {},
            arguments=[script.name, *script.arguments],
            folder=script.folder,
            packages=settings.own_packages,
        )
        self._state = self._starter_state
        self._scene = Scene(settings, guest, state_in_place=lambda: self._state, note=note)
        self._collective_count = 0

    def run(self, *, quiet: bool) -> ScriptRun:
        """Run the script.

        Args:
            quiet: True to hide all output.
        """
        failure: WorldFailure | None = None
        sizes: tuple[int, ...] = ()
        with (
            self._scene.set_up(writer=self._writer, quiet=quiet),
            commands_of_ranks(self._settings.options(seed=self._seed), self._before_launch),
            World(
                1,
                seed=self._seed,
                stall_seconds=self._settings.stall_seconds,
                initialized=False,
                rank_local=self._starter_state,
            ) as world,
        ):

            def program(rank: int) -> None:
                nonlocal failure, sizes
                ranks = StartedRanks(
                    lambda processes: self._run_beside(world, processes),
                    all_own=self._settings.starter == "all",
                    main=lambda: sys.modules["__main__"],
                )
                stall_seconds = self._settings.stall_seconds
                try:
                    with started_as_ranks(ranks, stall_seconds=stall_seconds):
                        with self._scene.devices_in_rank(), self._guest.in_starter():
                            run_script(self._script)
                        # Python joins remaining children when a script ends.
                        ranks.run()
                finally:
                    failure, sizes = ranks.failure, tuple(ranks.sizes)
                    self._scene.end_lines(STARTER)

            try:
                world.run(program)
            except WorldFailure as raised:
                # If ranks failed, the script's own failure is a consequence.
                failure = failure or raised
            finally:
                self._starter_state.forget()
        return self._scene.recorded(
            seed=self._seed,
            failure=failure,
            collective_count=self._collective_count,
            started=sizes,
        )

    def _before_launch(self, command: str) -> None:
        if self._guest.needs_all_ranks:
            raise UsageError(
                f"expected all ranks in one process, got a script that calls "
                f"`{command}`. Run `zero-sim torchrun` on the script that it launches."
            )
        self._note(f"`{command}` runs as `zero-sim torchrun`, in its own process.")

    def _writer(self) -> int:
        current = self._state.current
        # Outside of the ranks' world, the starter writes, or the caller if no program runs.
        if self._state is self._starter_state or current == CALLER:
            return STARTER if self._starter_state.current != CALLER else CALLER
        return current

    def _run_beside(self, starters: World, processes: Sequence[RankPopen]) -> None:
        """Run a world in another thread, because the starter's thread is a rank already."""
        failures: list[BaseException] = []

        def run() -> None:
            try:
                self._run_world(processes)
            except BaseException as error:  # noqa: BLE001  The starter raises it.
                failures.append(error)

        thread = threading.Thread(target=run, name="world-of-a-script", daemon=True)
        # The starter blocks while its ranks run. This is not a stall.
        with starters.pause_clock():
            thread.start()
            while thread.is_alive():
                # Wait in short pieces, because Python handles an interrupt only between waits.
                thread.join(_LOOK_SECONDS)
        if failures:
            raise failures[0]

    def _run_world(self, processes: Sequence[RankPopen]) -> None:
        state = RankState(
            environment=lambda rank: {},
            folder=self._script.folder,
            packages=self._settings.own_packages,
        )

        def program_of(rank: int) -> Callable[[], None]:
            return lambda: run_as_started(self._script, processes[rank])

        with World(
            len(processes), seed=self._seed, rank_local=state, **self._settings.of_world()
        ) as world:
            # From here on, streams and patches use the ranks' state, not the starter's.
            self._state = state
            try:
                world.run(lambda rank: self._scene.run_in_rank(world, rank, program_of(rank)))
            finally:
                self._state = self._starter_state
                state.forget()
                self._collective_count += len(world.log.collectives)
