"""Runs of one script on a simulated world, in the place of torchrun."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

from zero_sim.errors import UsageError
from zero_sim.script.program import Script, run_script
from zero_sim.script.rank_processes import StartsRanks
from zero_sim.script.rank_state import RankState
from zero_sim.script.record import ScriptRun
from zero_sim.script.scene import Scene
from zero_sim.script.settings import Guest, NoGuest, Settings
from zero_sim.script.starting import StartingScript
from zero_sim.sim import World, WorldFailure

__all__ = ["Guest", "Launcher", "NoGuest", "Settings"]


class Launcher:
    """Runs one script as often as is asked; its world stays open in between.

    Args:
        script: What to run.
        settings: What world to run it on.
        guest: Looks on from inside.

    Raises:
        UsageError: The settings do not fit each other or cannot be.
    """

    def __init__(self, script: Script, settings: Settings, *, guest: Guest | None = None) -> None:
        unknown = sorted(rank for rank in settings.shown or () if rank >= settings.world_size)
        if unknown:
            raise UsageError(
                f"expected to show the output of ranks below {settings.world_size}, got "
                f"{unknown[0]}"
            )
        self.starts: StartsRanks | None = None
        """Set once the script was seen to start its ranks itself."""
        self._script = script
        self._settings = settings
        self._guest = guest or NoGuest()
        self._state = RankState(
            environment=settings.environment,
            arguments=[script.name, *script.arguments],
            folder=script.folder,
            packages=settings.packages,
        )
        self._world = World(
            settings.world_size,
            **settings.of_world(),
            rank_local=self._state,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._world.close()

    def run(self, *, seed: int, quiet: bool = False) -> ScriptRun:
        """Run the script to its end, or to what ends it.

        A script that starts its ranks itself runs again, as their starter.

        Args:
            seed: Of drawn schedules, of the hostile timing, and of whatever the script leaves to
                chance.
            quiet: Whether to show nothing of what ranks print.
        """
        if self.starts is None:
            run = self._run_ranks(seed=seed, quiet=quiet)
            if not isinstance(run.failure, StartsRanks):
                return run
            self.starts = run.failure
            if not quiet:
                sys.stderr.write(_note(self._script, self._settings, run.failure))
        run = self._run_starter(seed=seed, quiet=quiet, all_own=self.starts.all_own)
        if isinstance(run.failure, StartsRanks) and not self.starts.all_own:
            self.starts = run.failure
            run = self._run_starter(seed=seed, quiet=quiet, all_own=True)
        return run

    def _run_ranks(self, *, seed: int, quiet: bool) -> ScriptRun:
        """Run the script on every rank, as torchrun does."""
        self._world.configure(seed=seed)
        state = self._state
        scene = Scene(self._settings, self._guest, state_in_place=lambda: state)
        failure: WorldFailure | None = None
        with scene.set_up(writer=lambda: state.current, quiet=quiet):
            try:
                self._world.run(
                    lambda rank: scene.run_in_rank(
                        self._world, rank, lambda: run_script(self._script)
                    )
                )
            except WorldFailure as raised:
                failure = raised
            finally:
                state.forget()
        collectives = len(self._world.log.collectives)
        return scene.recorded(seed=seed, failure=failure, collective_count=collectives)

    def _run_starter(self, *, seed: int, quiet: bool, all_own: bool) -> ScriptRun:
        """Run the script once, and the processes that it starts as ranks."""
        starting = StartingScript(self._script, self._settings, self._guest, seed=seed)
        return starting.run(quiet=quiet, all_own=all_own)


def _note(script: Script, settings: Settings, starts: StartsRanks) -> str:
    return (
        f"Note: {script.name} starts ranks itself at {starts.site}. It runs again as `python` "
        f"would run it, on a node of {settings.ranks_per_node} GPUs, and its processes are the "
        "ranks.\n"
    )
