"""Runs of one script on a simulated world, in the place of torchrun."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self, TextIO

from zero_sim.errors import UsageError
from zero_sim.script.cuda import CudaOnCpu
from zero_sim.script.custom_ops import operators_of_ranks
from zero_sim.script.points import record_with
from zero_sim.script.process_calls import calls_of_ranks, processes_of_ranks
from zero_sim.script.program import Script, run_script
from zero_sim.script.rank_state import RankState
from zero_sim.script.record import PointRecorder, ScriptRun
from zero_sim.sim import RankFailed, World, WorldFailure
from zero_sim.sim.call import Call
from zero_sim.sim.callsite import raising_site, site_of
from zero_sim.sim.log import CollectiveRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Everything about the world that a script runs on."""

    ranks_per_node: int
    nodes: int = 1
    order: str = "linear"
    schedule: str = "round-robin"
    timing: str = "eager"
    depth: int = 3
    races: bool = False
    strict: bool = True
    stall_seconds: float = 300.0
    packages: tuple[str, ...] = ()
    """Top-level packages that every rank imports for itself, besides the script's folder."""
    cuda_is_cpu: bool = False
    address: str = "localhost"
    port: int = 29500
    shown: frozenset[int] | None = None
    """Ranks whose output is shown; None for all."""

    @property
    def world_size(self) -> int:
        """Number of ranks of all nodes."""
        return self.ranks_per_node * self.nodes

    def environment(self, rank: int) -> Mapping[str, str]:
        """What torchrun puts into the environment of a rank."""
        node, local_rank = divmod(rank, self.ranks_per_node)
        facts = {
            "RANK": rank,
            "LOCAL_RANK": local_rank,
            "GROUP_RANK": node,
            "ROLE_RANK": rank,
            "ROLE_NAME": "default",
            "WORLD_SIZE": self.world_size,
            "LOCAL_WORLD_SIZE": self.ranks_per_node,
            "GROUP_WORLD_SIZE": self.nodes,
            "ROLE_WORLD_SIZE": self.world_size,
            "MASTER_ADDR": self.address,
            "MASTER_PORT": self.port,
            "OMP_NUM_THREADS": 1,
            "TORCHELASTIC_RESTART_COUNT": 0,
            "TORCHELASTIC_MAX_RESTARTS": 0,
            "TORCHELASTIC_RUN_ID": "none",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        return {name: str(value) for name, value in facts.items()}


class Guest(Protocol):
    """Looks on at the ranks of a script from inside."""

    def in_rank(self, rank: int) -> AbstractContextManager[object]:
        """A context around one rank's program, entered in its thread."""
        ...

    def called(self, record: CollectiveRecord, call: Call) -> None:
        """Receive each call of a collective, in the thread of its rank."""
        ...


class NoGuest:
    """Leaves ranks alone."""

    def in_rank(self, rank: int) -> AbstractContextManager[object]:
        """Nothing around the program."""
        return contextlib.nullcontext()

    def called(self, record: CollectiveRecord, call: Call) -> None:
        """Nothing to do."""


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
        self._script = script
        self._settings = settings
        self.guest: Guest = guest or NoGuest()
        """Looks on from inside; may be replaced between runs."""
        self._state = RankState(
            environment=settings.environment,
            arguments=[script.name, *script.arguments],
            folder=script.folder,
            packages=settings.packages,
        )
        self._world = World(
            settings.world_size,
            order=settings.order,
            schedule=settings.schedule,
            timing=settings.timing,
            depth=settings.depth,
            races=settings.races,
            strict=settings.strict,
            stall_seconds=settings.stall_seconds,
            initialized=False,
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

        Args:
            seed: Of drawn schedules, of the hostile timing, and of whatever the script leaves to
                chance.
            quiet: Whether to show nothing of what ranks print.
        """
        self._world.configure(seed=seed)
        settings = self._settings
        recorders = [PointRecorder() for _ in range(settings.world_size)]
        cuda = CudaOnCpu(device_count=settings.ranks_per_node, rank=lambda: self._state.current)
        failure: WorldFailure | None = None
        with contextlib.ExitStack() as stack:
            out, err = stack.enter_context(self._output(quiet=quiet))
            stack.enter_context(calls_of_ranks(self._state.owns))
            stack.enter_context(processes_of_ranks())
            stack.enter_context(operators_of_ranks())
            if settings.cuda_is_cpu:
                stack.enter_context(cuda.installed())

            def program(rank: int) -> None:
                self._world.log.watch = self.guest.called
                record_with(recorders[rank])
                device = cuda.in_rank() if settings.cuda_is_cpu else contextlib.nullcontext()
                try:
                    with device, self.guest.in_rank(rank):
                        run_script(self._script)
                finally:
                    record_with(None)
                    out.end_rank(rank)
                    err.end_rank(rank)

            try:
                self._world.run(program)
            except WorldFailure as raised:
                failure = raised
            finally:
                self._state.forget()
        return ScriptRun(
            seed=seed,
            failure=failure,
            ending=ending_of(failure),
            output=tuple(out.lines),
            points=tuple(tuple(recorder.points) for recorder in recorders),
            collective_count=len(self._world.log.collectives),
        )

    @contextlib.contextmanager
    def _output(self, *, quiet: bool) -> Iterator[tuple[RankOutput, RankOutput]]:
        shown: Collection[int] | None = frozenset() if quiet else self._settings.shown
        streams = sys.stdout, sys.stderr
        out, err = (
            RankOutput(stream, writer=lambda: self._state.current, shown=shown, kept=kept)
            for stream, kept in zip(streams, (0, -1), strict=True)
        )
        sys.stdout, sys.stderr = out, err
        try:
            yield out, err
        finally:
            sys.stdout, sys.stderr = streams


def ending_of(failure: WorldFailure | None) -> str:
    """How a run ended, in one line."""
    if failure is None:
        return "every rank came to its end"
    if not isinstance(failure, RankFailed):
        return str(failure).partition("\n")[0]
    site = site_of(*raising_site(failure.error))
    if isinstance(failure.error, SystemExit):
        return f"rank {failure.rank} exited with {failure.error.code!r} at {site}"
    name = type(failure.error).__name__
    return f"rank {failure.rank} raised {name} at {site}: {failure.error}"


CALLER = -1


class RankOutput(io.TextIOBase):
    """Stands where a stream of the process stood; tells apart who writes.

    One object for all ranks, since what keeps a stream, as a logging handler does, may be shared.

    Args:
        stream: The stream in whose place it stands.
        writer: Who writes: a rank, or -1, whose text goes on unchanged.
        shown: Ranks whose lines are shown; None for all.
        kept: The rank whose lines are kept; -1 for none.
    """

    def __init__(
        self,
        stream: TextIO,
        *,
        writer: Callable[[], int],
        shown: Collection[int] | None,
        kept: int = CALLER,
    ) -> None:
        super().__init__()
        self._stream = stream
        self._writer = writer
        self._shown = shown
        self._kept = kept
        self._begun: dict[int, str] = {}
        """The line that a rank has not ended yet."""
        self.lines: list[str] = []
        """What the kept rank wrote."""
        self.buffer = _Bytes(self)

    @property
    def encoding(self) -> str:  # pyrefly: ignore [bad-override]
        """The stream's."""
        return self._stream.encoding or "utf-8"

    @property
    def errors(self) -> str | None:  # pyrefly: ignore [bad-override]
        """How the stream writes what its encoding lacks."""
        return self._stream.errors

    def writable(self) -> bool:
        """It is."""
        return True

    def fileno(self) -> int:
        """The stream's, for what other programs write."""
        return self._stream.fileno()

    def write(self, text: str, /) -> int:
        """Take in some text, and show the lines that it ends."""
        writer = self._writer()
        if writer == CALLER:
            return self._stream.write(text)
        *lines, self._begun[writer] = (self._begun.get(writer, "") + text).split("\n")
        for line in lines:
            self._end_line(writer, line)
        return len(text)

    def flush(self) -> None:
        """Flush the stream; a line that is not ended waits, lest two ranks be on one."""
        self._stream.flush()

    def end_rank(self, rank: int) -> None:
        """Show the line that a rank has not ended, after its last."""
        line = self._begun.pop(rank, "")
        if line:
            self._end_line(rank, line)

    def _end_line(self, rank: int, line: str) -> None:
        if rank == self._kept:
            self.lines.append(line)
        if self._shown is None or rank in self._shown:
            self._stream.write(f"[rank {rank}]: {line}\n")


class _Bytes(io.BufferedIOBase):
    """The stream of bytes below, for who writes those."""

    def __init__(self, text: RankOutput) -> None:
        super().__init__()
        self._text = text

    def writable(self) -> bool:
        return True

    def write(self, data: Any, /) -> int:
        self._text.write(bytes(data).decode(self._text.encoding, "replace"))
        return len(data)

    def flush(self) -> None:
        self._text.flush()
