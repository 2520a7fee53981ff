"""Launcher: runs a script on a simulated world, as torchrun would."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import TracebackType
from typing import Self

from zero_sim.errors import UsageError
from zero_sim.script.absent import wants_gpus, wants_kernels
from zero_sim.script.launch_commands import commands_of_ranks
from zero_sim.script.process_calls import check_may_launch
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
    """Runs a script any number of times. The world stays open between runs.

    Args:
        script: File or module, with arguments.
        settings: World size, nodes, timing and environment.
        guest: Observer inside the ranks.

    Raises:
        UsageError: The settings are invalid or contradict each other.
    """

    def __init__(self, script: Script, settings: Settings, *, guest: Guest | None = None) -> None:
        unknown = sorted(rank for rank in settings.shown or () if rank >= settings.world_size)
        if unknown:
            raise UsageError(
                f"expected to show the output of ranks below {settings.world_size}, got "
                f"{unknown[0]}"
            )
        # The original stream, because the patched stream would prefix each note with a rank.
        self._errors = sys.stderr
        self._notes: set[str] = set()
        self._is_quiet = False
        self._script = script
        self._settings = settings
        self.guest: Guest = guest or NoGuest()
        """Observer inside the ranks. You can replace it between runs."""
        self._state = RankState(
            environment=settings.environment,
            arguments=[script.name, *script.arguments],
            folder=script.folder,
            packages=settings.own_packages,
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

    def run(self, *, seed: int, quiet: bool = False, repeats: bool = True) -> ScriptRun:
        """Run the script to its end or failure.

        If the script starts its ranks itself, or fails because GPUs or kernels are missing, it runs
        again with other settings.

        Args:
            seed: Seed of the schedule, the timing, and random numbers that the script does not
                seed.
            quiet: True to hide the output of ranks.
            repeats: False to run only once.
        """
        self._is_quiet = quiet
        run = self._run(seed=seed)
        # A loop, because a script may first lack GPUs and then kernels.
        while repeats and (other := self.other_settings(run)) is not None:
            self._settings = other
            run = self._run(seed=seed)
        return run

    def other_settings(self, run: ScriptRun) -> Settings | None:
        """Return settings that avoid a run's failure; None if no change would help."""
        settings, failure, name = self._settings, run.failure, self._script.name
        if isinstance(failure, StartsRanks) and settings.starter != "all":
            self._note(
                f"{name} starts ranks itself at {failure.site}. It runs again as under `python`, "
                f"with {settings.ranks_per_node} for the number of GPUs, and its processes are the "
                "ranks."
            )
            return replace(settings, starter="all" if failure.all_own else "visible")
        if not settings.cuda_is_cpu and wants_gpus(run):
            self._note(
                f"{name} needs GPUs, and there are none. It runs again with devices named cuda on "
                f"the CPU, as with --cuda-is-cpu: {run.ending}"
            )
            return replace(settings, cuda_is_cpu=True)
        if not settings.kernels_are_stubs and wants_kernels(run):
            self._note(
                f"{name} imports kernels that are not installed. It runs again, and fails if it "
                f"calls one: {run.ending}"
            )
            return replace(settings, kernels_are_stubs=True)
        return None

    def _run(self, *, seed: int) -> ScriptRun:
        if not self._settings.starter:
            return self._run_ranks(seed=seed)
        starting = StartingScript(
            self._script, self._settings, self.guest, seed=seed, note=self._note
        )
        return starting.run(quiet=self._is_quiet)

    def _run_ranks(self, *, seed: int) -> ScriptRun:
        """Run the script on every rank, as torchrun does."""
        self._world.configure(seed=seed)
        state = self._state
        scene = Scene(self._settings, self.guest, state_in_place=lambda: state, note=self._note)
        failure: WorldFailure | None = None
        # Ranks exist already, so refuse to launch more.
        commands = commands_of_ranks((), lambda command: check_may_launch())
        with scene.set_up(writer=lambda: state.current, quiet=self._is_quiet), commands:
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

    # Each note is shown once, because repeated runs would show it again.
    def _note(self, text: str) -> None:
        if text not in self._notes and not self._is_quiet:
            self._notes.add(text)
            sys.stdout.flush()
            self._errors.write(f"Note: {text}\n")
