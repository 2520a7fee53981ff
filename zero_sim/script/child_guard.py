"""Guard in processes that ranks start: such a process must not join a process group.

Each of these processes imports this module, so it imports little.
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

# A status that other programs rarely use.
REFUSED_STATUS = 86
"""Exit status after an attempt to join a group."""

_C10D = "torch.distributed.distributed_c10d"
# init_process_group calls these. They are patched instead of it, because a script may have imported
# it under any name.
GROUP_MAKERS = ("rendezvous", "_new_process_group_helper")
"""Functions that the guard replaces."""


class NoRank(UsageError):
    """A process tried to join a process group, but is not a rank."""


def no_rank(rank: int | None, site: str) -> str:
    """Return the error message if a rank's child process joins a group.

    Args:
        rank: World rank of the parent.
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
    """Replacement for a child process's `run`, for any start method.

    The process inherits torchrun's variables, but their store does not exist. Without this guard,
    `init_process_group` would wait for half an hour.
    """

    run: Callable[[], None]
    message: str

    def __call__(self) -> None:
        """Run the process; exit with `REFUSED_STATUS` if it tries to join a group."""
        if _C10D in sys.modules:
            self.guard(sys.modules[_C10D])
        else:
            # Do not import torch here: most of these processes (data loaders, compilers) never need
            # it.
            sys.meta_path.insert(0, _GuardOnImport(self))
        try:
            self.run()
        except NoRank as error:
            sys.stderr.write(f"Error: {error}\n")
            sys.stderr.flush()
            raise SystemExit(REFUSED_STATUS) from None

    def guard(self, c10d: ModuleType) -> None:
        """Make torch's functions in `GROUP_MAKERS` raise."""
        for name in GROUP_MAKERS:
            setattr(c10d, name, self._refuse)

    def _refuse(self, *args: Any, **kwargs: Any) -> None:
        raise NoRank(self.message)


class _GuardOnImport:
    """Import finder that installs the guard when torch.distributed is imported."""

    def __init__(self, run: GuardedRun) -> None:
        self._run = run

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return torch's own spec, with a loader that installs the guard after execution."""
        if name != _C10D:
            return None
        # Remove it first, because find_spec would come back here.
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
