"""Guard in a process that a rank of a script starts: it may do anything but join a process group.

The process inherits torchrun's variables, which name a store that nobody serves, so that it would
wait for half an hour. This module is imported by it, and therefore imports little.
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

REFUSED_STATUS = 86
"""Exit status of a process that tried to join a group; no other program's usual one."""

_C10D = "torch.distributed.distributed_c10d"
GROUP_MAKERS = ("rendezvous", "_new_process_group_helper")
"""Functions that `init_process_group` calls, whichever way a script came to that."""


class NoRank(UsageError):
    """A process that is no rank wants to join a process group."""


def no_rank(rank: int | None, site: str) -> str:
    """The message about processes that were to be ranks, started by a rank.

    Args:
        rank: World rank that started them.
        site: Where, `file:line`.
    """
    return (
        f"expected a rank to start no ranks, got processes that rank {rank} started at {site} and "
        "that join a process group\n"
        "Start all ranks in one place: by the script itself before it joins a group, or by "
        "`zero-sim torchrun --nproc-per-node N`."
    )


@dataclass(frozen=True, slots=True)
class GuardedRun:
    """The `run` of a process that a rank starts, by any start method."""

    run: Callable[[], None]
    message: str

    def __call__(self) -> None:
        """Run it; end with `REFUSED_STATUS` if it wants to join a group."""
        if _C10D in sys.modules:
            self.guard(sys.modules[_C10D])
        else:
            sys.meta_path.insert(0, _GuardOnImport(self))
        try:
            self.run()
        except NoRank as error:
            sys.stderr.write(f"Error: {error}\n")
            sys.stderr.flush()
            raise SystemExit(REFUSED_STATUS) from None

    def guard(self, c10d: ModuleType) -> None:
        """Let torch's functions that make groups refuse."""
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
        """Torch's own spec, whose execution is followed by the guard."""
        if name != _C10D:
            return None
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
