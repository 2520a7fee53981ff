"""Processes of a script or test, run as ranks of a world.

[Note: started ranks]
A world needs all of its ranks at once. So a started process is only packed. The ranks run when the
starter first waits: when it joins a process, checks if one is alive, or receives from a pipe.
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
"""Runs processes as ranks of a world; raises the world's failure."""


class RankPopen:
    """Rank behind a `Process` object, in place of a system process.

    Args:
        parcel: Packed process.
        is_forked: True if the start method is fork. Then the rank executes no file.
        ranks: All ranks of the starter; they run together.
    """

    def __init__(self, parcel: Parcel, *, is_forked: bool, ranks: StartedRanks) -> None:
        self.is_forked = is_forked
        # Above all Linux process ids, so that a signal to this pid reaches no process.
        self.pid = (1 << 22) + next(_numbers)
        self.returncode: int | None = None
        self.exit: SystemExit | None = None
        # A pipe, as for a real process: the sentinel becomes readable when the other end closes.
        self.sentinel, self._written = os.pipe()
        self._parcel = parcel
        self._ranks = ranks

    def poll(self, flag: int = 0) -> int | None:
        """Run the ranks, and return the exit code."""
        self._ranks.run()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int | None:
        """Run the ranks, and return the exit code."""
        self._ranks.run()
        self.announce()
        return self.returncode

    def terminate(self) -> None:
        """Drop the process if it has not run yet."""
        self._ranks.drop(self)

    kill = terminate

    def close(self) -> None:
        """Close the sentinel's pipe."""
        self.announce()
        if self.sentinel >= 0:
            os.close(self.sentinel)
            self.sentinel = -1

    def announce(self) -> None:
        """Make the sentinel readable, which ends waits for it."""
        if self._written >= 0:
            os.close(self._written)
            self._written = -1

    def run_program(self, main: ModuleType | None) -> None:
        """Run the process's function in the calling rank, and set the exit code."""
        try:
            process = self._parcel.unpack(main)
            # torch's wrapper would change the whole process's signals.
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
    """Run a function like torch's wrapper `_wrap`, but leave signals alone."""
    try:
        function(index, *args)
    except Exception:
        # torch reads the traceback from this file for its ProcessRaisedException.
        with open(error_file, "wb") as file:
            pickle.dump(traceback.format_exc(), file)
        raise


def _status_of(code: object) -> int:
    if code is None or isinstance(code, int):
        return code or 0
    # Like Python for `sys.exit("message")`.
    sys.stderr.write(f"{code}\n")
    return _FAILED


def _keeping(stores: list[Any]) -> type[dist.FileStore]:
    """Return a file store class whose instances stay alive in a list.

    When a group's last store is destroyed, it removes its file. A process that ends does not
    destroy its store, so the starter may rely on this file.
    """

    class FileStore(dist.FileStore):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            stores.append(self)

    return FileStore


class StartedRanks:
    """Ranks that a thread starts.

    Args:
        run_world: Runs processes as ranks.
        all_own: True if each process with a user's function is a rank.
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
        """First failure of these ranks' worlds."""
        self.sizes: list[int] = []
        """Sizes of these ranks' worlds."""
        self._run_world = run_world
        self._all_own = all_own
        self._main = main
        # With the process id, because a forked thread has the same ident.
        self._thread = os.getpid(), threading.get_ident()
        self._pending: list[RankPopen] = []

    def is_running(self) -> bool:
        """Return True in the starter's thread."""
        return (os.getpid(), threading.get_ident()) == self._thread

    def takes(self, process: BaseProcess) -> bool:
        """Return True if a process that is about to start should run as a rank."""
        return self.is_running() and is_rank(process, all_own=self._all_own)

    def start(self, process: BaseProcess) -> None:
        """Pack a process that will run as a rank."""
        # Like BaseProcess.start, but with our Popen.
        state: Any = process
        state._check_closed()
        assert state._popen is None, "cannot start a process twice"
        main = None if self._main is None else self._main()
        is_forked = _is_forked(process)
        parcel = Parcel(process, is_forked=is_forked, main=main)
        state._popen = RankPopen(parcel, is_forked=is_forked, ranks=self)
        state._sentinel = state._popen.sentinel
        for name in ("_target", "_args", "_kwargs"):
            # BaseProcess.start drops these too, so that the rank's arguments can be freed.
            vars(process).pop(name, None)
        self._pending.append(state._popen)

    def check_may_join(self) -> None:
        """Refuse to let the starter join its own ranks' group.

        Raises:
            NoRank: Ranks are pending, and the calling thread is their starter.
        """
        if self.is_running() and self._pending:
            raise NoRank(
                f"expected all ranks of a group to be started processes, got {len(self._pending)} "
                f"processes and their starter, which joins at {here()}\n"
                "Start a process for each rank, also for rank 0. If the script can read its rank "
                "from the environment, use `zero-sim torchrun --nproc-per-node N` instead."
            )

    def run(self) -> None:
        """Run all pending ranks as a world.

        Raises:
            WorldFailure: The ranks deadlocked, raced or violated the contract.
        """
        if not self.is_running() or not self._pending:
            return
        # Empty the list first, because ranks may start processes themselves.
        pending, self._pending = self._pending, []
        self.sizes.append(len(pending))
        failure: WorldFailure | None = None
        try:
            self._run_world(pending)
        except WorldFailure as raised:
            failure = _without_cause_in_exits(raised, pending)
            if isinstance(failure, RankFailed):
                # Set here, because a rank may fail before its function runs.
                pending[failure.rank].returncode = _FAILED
        finally:
            for each in pending:
                if each.returncode is not None:
                    each.announce()
        failure = failure or _exit_failure(pending)
        self.failure = self.failure or failure
        for each in pending:
            # Ranks that another rank's failure ended are not announced: torch reports the rank
            # whose sentinel is ready first, and this must be the cause.
            each.returncode = TERMINATED if each.returncode is None else each.returncode
        # The starter sees a failed rank's exit code. No exit code expresses other failures, so
        # raise them.
        if failure is not None and not isinstance(failure, RankFailed):
            raise failure

    def drop(self, popen: RankPopen) -> None:
        """Drop a rank that has not run."""
        if popen in self._pending:
            self._pending.remove(popen)
            popen.returncode = TERMINATED
            popen.announce()


def _is_forked(process: BaseProcess) -> bool:
    import multiprocessing

    method = getattr(process, "_start_method", None)
    return (method or multiprocessing.get_start_method()) == "fork"


def _exit_failure(pending: Sequence[RankPopen]) -> WorldFailure | None:
    """Return the first failure among ranks that exited with an error; None if there is none."""
    for rank, each in enumerate(pending):
        if each.returncode and each.exit is not None:
            text = "".join(traceback.format_exception(each.exit))
            return RankFailed(rank, each.exit, text)
    return None


def _without_cause_in_exits(
    failure: WorldFailure, pending: Sequence[RankPopen]
) -> WorldFailure | None:
    """Return the failure; None for a deadlock that a rank's exit with an error caused."""
    if isinstance(failure, Deadlock) and any(each.returncode for each in pending):
        return None
    return failure


@contextlib.contextmanager
def started_as_ranks(ranks: StartedRanks, *, stall_seconds: float) -> Iterator[None]:
    """Run processes that a thread starts as ranks.

    Args:
        ranks: Ranks of the calling thread.
        stall_seconds: Maximum wait of a rank for another process.
    """
    start = BaseProcess.start

    def start_in_place(process: BaseProcess) -> None:
        check_not_executing()
        if ranks.takes(process):
            ranks.start(process)
        # Ranks' data loaders and other helpers start as real processes.
        elif rank_state.rank is None or ranks.is_running() or not is_rank(process, all_own=False):
            start(process)
        else:
            raise NoRank(no_rank(rank_state.rank, here()))

    def checked(original: Callable[..., Any]) -> Callable[..., Any]:
        # wraps keeps the signature, because worlds read it.
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
