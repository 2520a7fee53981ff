"""Processes that a script or a test starts, which run as ranks of one world.

[Note: started ranks]
A process is packed when it is started. Ranks need all of their world at once, so they run when the
starter waits for the first of them: joins it, asks whether it lives, or receives from a pipe.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import pickle
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed import distributed_c10d

from zero_sim.script.child_guard import GROUP_MAKERS, NoRank, no_rank
from zero_sim.script.parcel import Parcel
from zero_sim.script.process_waits import waits_of_ranks
from zero_sim.script.program import check_not_executing
from zero_sim.script.rank_processes import is_rank, torch_wrap
from zero_sim.sim import Deadlock, RankFailed, WorldFailure
from zero_sim.sim.callsite import here
from zero_sim.sim.world.rank_threads import rank_state

TERMINATED = -15
"""Exit code of a process that SIGTERM ended."""
_FAILED = 1
_numbers = itertools.count(1)

RunWorld = Callable[[Sequence["RankPopen"]], None]
"""Runs processes as the ranks of a world; raises its failure."""


class RankPopen:
    """Stands in the place of the operating system's process, behind a `Process` object.

    Args:
        parcel: The process to run.
        is_forked: True if it would be forked, and thus execute no file.
        ranks: Runs it.
    """

    def __init__(self, parcel: Parcel, *, is_forked: bool, ranks: StartedRanks) -> None:
        self.is_forked = is_forked
        # Above any process number of Linux, so that no signal reaches a stranger.
        self.pid = (1 << 22) + next(_numbers)
        self.returncode: int | None = None
        self.exit: SystemExit | None = None
        self.sentinel, self._written = os.pipe()
        self._parcel = parcel
        self._ranks = ranks

    def poll(self, flag: int = 0) -> int | None:
        """The exit code, after the ranks have run."""
        self._ranks.run()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        """The exit code, after the ranks have run."""
        self._ranks.run()
        self.announce()
        return self.returncode

    def terminate(self) -> None:
        """End the process if it has not run yet."""
        self._ranks.drop(self)

    kill = terminate

    def close(self) -> None:
        """Let go of its files."""
        self.announce()
        if self.sentinel >= 0:
            os.close(self.sentinel)
            self.sentinel = -1

    def announce(self) -> None:
        """Let waits for the sentinel end."""
        if self._written >= 0:
            os.close(self._written)
            self._written = -1

    def run_program(self, main: ModuleType | None) -> None:
        """Run the process's function in the calling rank, and note the exit code."""
        try:
            process = self._parcel.unpack(main)
            if vars(process).get("_target") is torch_wrap():
                _run_wrapped(*process._args)  # pyrefly: ignore [missing-attribute]
            else:
                process.run()
        except SystemExit as ended:
            self.returncode, self.exit = _status_of(ended.code), ended
        except Exception:
            self.returncode = _FAILED
            raise
        else:
            self.returncode = 0


def _run_wrapped(function: Callable[..., None], index: int, args: Any, error_file: str) -> None:
    """Run a function as torch's own wrapper does, apart from signals of the process."""
    try:
        function(index, *args)
    except Exception:
        with open(error_file, "wb") as file:
            pickle.dump(traceback.format_exc(), file)
        raise


def _status_of(code: object) -> int:
    if code is None or isinstance(code, int):
        return code or 0
    sys.stderr.write(f"{code}\n")
    return _FAILED


def _keeping(stores: list[Any]) -> type[dist.FileStore]:
    """A class of file stores that live as long as a list does.

    The last one of a group removes the file. A process ends without that, so the starter may
    expect the file.
    """

    class FileStore(dist.FileStore):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            stores.append(self)

    return FileStore


class StartedRanks:
    """Ranks that one thread starts.

    Args:
        run_world: Runs programs as ranks.
        all_own: True to take every process for a rank that runs a function of the user's.
        main: Returns the starter's `__main__`; None if ranks share all modules.
    """

    def __init__(
        self,
        run_world: RunWorld,
        *,
        all_own: bool,
        main: Callable[[], ModuleType] | None = None,
    ) -> None:
        self.failure: WorldFailure | None = None
        """First failure of a world of these ranks."""
        self.sizes: list[int] = []
        """Number of ranks of each world."""
        self._run_world = run_world
        self._all_own = all_own
        self._main = main
        # A fork of the thread is another one.
        self._thread = os.getpid(), threading.get_ident()
        self._pending: list[RankPopen] = []

    def is_running(self) -> bool:
        """True in the thread that starts the ranks."""
        return (os.getpid(), threading.get_ident()) == self._thread

    def takes(self, process: BaseProcess) -> bool:
        """True if a process that the starter is about to start is to be a rank."""
        return self.is_running() and is_rank(process, all_own=self._all_own)

    def start(self, process: BaseProcess) -> None:
        """Start a process, which will run as a rank."""
        state: Any = process
        state._check_closed()
        assert state._popen is None, "cannot start a process twice"
        main = None if self._main is None else self._main()
        is_forked = _is_forked(process)
        parcel = Parcel(process, is_forked=is_forked, main=main)
        state._popen = RankPopen(parcel, is_forked=is_forked, ranks=self)
        state._sentinel = state._popen.sentinel
        for name in ("_target", "_args", "_kwargs"):
            # A reference would keep what the rank has alive.
            vars(process).pop(name, None)
        self._pending.append(state._popen)

    def check_may_join(self) -> None:
        """Refuse that the starter joins the group of ranks that it has started.

        Raises:
            NoRank: There are such ranks.
        """
        if self.is_running() and self._pending:
            raise NoRank(
                f"expected all ranks of a group to be started processes, got {len(self._pending)} "
                f"of them and their starter, which joins at {here()}\n"
                "Start a process for each rank, also for rank 0, or run the script with "
                "`zero-sim torchrun --nproc-per-node N` if it can take its rank from there."
            )

    def run(self) -> None:
        """Run the ranks that were started and have not run yet, to their end.

        Raises:
            WorldFailure: They deadlock, race or violate the contract.
        """
        if not self.is_running() or not self._pending:
            return
        pending, self._pending = self._pending, []
        self.sizes.append(len(pending))
        failure: WorldFailure | None = None
        try:
            self._run_world(pending)
        except WorldFailure as raised:
            failure = _without_cause_in_exits(raised, pending)
            if isinstance(failure, RankFailed):
                # Also where the rank failed before its function ran.
                pending[failure.rank].returncode = _FAILED
        finally:
            for each in pending:
                if each.returncode is not None:
                    each.announce()
        failure = failure or _exit_failure(pending)
        self.failure = self.failure or failure
        for each in pending:
            # The sentinel of a rank that another one ended stays silent until somebody waits for
            # it: torch reports the rank whose sentinel comes first.
            each.returncode = TERMINATED if each.returncode is None else each.returncode
        if failure is not None and not isinstance(failure, RankFailed):
            raise failure

    def drop(self, popen: RankPopen) -> None:
        """Do not run a rank, or nothing if it has run."""
        if popen in self._pending:
            self._pending.remove(popen)
            popen.returncode = TERMINATED
            popen.announce()


def _is_forked(process: BaseProcess) -> bool:
    import multiprocessing

    method = getattr(process, "_start_method", None)
    return (method or multiprocessing.get_start_method()) == "fork"


def _exit_failure(pending: Sequence[RankPopen]) -> WorldFailure | None:
    """A failure for the first rank that exited with an error."""
    for rank, each in enumerate(pending):
        if each.returncode and each.exit is not None:
            text = "".join(traceback.format_exception(each.exit))
            return RankFailed(rank, each.exit, text)
    return None


def _without_cause_in_exits(
    failure: WorldFailure, pending: Sequence[RankPopen]
) -> WorldFailure | None:
    """The failure; None if ranks only wait for one that exited with an error."""
    if isinstance(failure, Deadlock) and any(each.returncode for each in pending):
        return None
    return failure


@contextlib.contextmanager
def started_as_ranks(ranks: StartedRanks, *, stall_seconds: float) -> Iterator[None]:
    """Let processes that a thread starts be ranks.

    Args:
        ranks: Those of the calling thread.
        stall_seconds: Longest time that a rank may wait for another process.
    """
    start = BaseProcess.start

    def start_in_place(process: BaseProcess) -> None:
        check_not_executing()
        if ranks.takes(process):
            ranks.start(process)
        elif rank_state.rank is None or ranks.is_running() or not is_rank(process, all_own=False):
            start(process)
        else:
            raise NoRank(no_rank(rank_state.rank, here()))

    def checked(original: Callable[..., Any]) -> Callable[..., Any]:
        # With its signature, which worlds read.
        @functools.wraps(original)
        def make(*args: Any, **kwargs: Any) -> Any:
            ranks.check_may_join()
            return original(*args, **kwargs)

        return make

    makers: dict[str, Any] = {
        name: checked(getattr(distributed_c10d, name)) for name in GROUP_MAKERS
    }
    with (
        mock.patch.object(BaseProcess, "start", start_in_place),
        mock.patch.object(dist, "FileStore", _keeping([])),
        mock.patch.multiple(distributed_c10d, **makers),
        waits_of_ranks(ranks, stall_seconds=stall_seconds),
    ):
        yield
