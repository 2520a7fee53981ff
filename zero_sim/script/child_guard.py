"""Guard in a process started by a rank: it may do anything except join a process group.

This module imports little, because each such process imports it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from zero_sim.errors import UsageError

# No usual exit status of another program.
REFUSED_STATUS = 86
"""Exit status of a process that tried to join a group."""

_C10D = "torch.distributed.distributed_c10d"
# Called by init_process_group. A script may hold that function itself under any name, so patching
# these two catches every way to it.
GROUP_MAKERS = ("rendezvous", "_new_process_group_helper")
"""Functions that are replaced in a guarded process."""


class NoRank(UsageError):
    """A process that is not a rank tried to join a process group."""


def no_rank(rank: int | None, site: str) -> str:
    """Return the message for a process that joins a group but was started by a rank.

    Args:
        rank: World rank that started it.
        site: Call site of the start, `file:line`.
    """
    return (
        f"expected ranks to start no further ranks, got processes that rank {rank} started at "
        f"{site} and that join a process group\n"
        "Start all ranks in one place: by the script itself before it joins a group, or by "
        "`zero-sim torchrun --nproc-per-node N`."
    )


@dataclass(frozen=True, slots=True)
class GuardedRun:
    """The `run` of a process that a rank starts, by any start method.

    The process inherits torchrun's variables. They name a store that does not exist, so that
    without this guard `init_process_group` would wait for half an hour.
    """

    run: Callable[[], None]
    message: str

    def __call__(self) -> None:
        """Run the process; exit with `REFUSED_STATUS` if it tries to join a group."""
        if _C10D in sys.modules:
            self.guard(sys.modules[_C10D])
        else:
            # torch is not imported here: most such processes (data loaders, compilers) never need
            # it.
            sys.meta_path.insert(0, _GuardOnImport(self))
        try:
            self.run()
        except NoRank as error:
            sys.stderr.write(f"Error: {error}\n")
            sys.stderr.flush()
            raise SystemExit(REFUSED_STATUS) from None

    def guard(self, c10d: ModuleType) -> None:
        """Replace torch's functions that make groups by one that raises."""
        for name in GROUP_MAKERS:
            setattr(c10d, name, self._refuse)

    def _refuse(self, *args: Any, **kwargs: Any) -> None:
        raise NoRank(self.message)


class _GuardOnImport:
    """Finder that guards torch's module when it is imported."""

    def __init__(self, run: GuardedRun) -> None:
        self._run = run

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return torch's own spec, with a loader that installs the guard after execution."""
        if name != _C10D:
            return None
        # Once only, and before find_spec, which would otherwise come back here.
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_guard(module: ModuleType) -> None:
            execute(module)
            self._run.guard(module)

        spec.loader.exec_module = execute_and_guard
        return spec
