"""Rank-local state of a target in the simulated world: its names, its packages, GPUs in name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from zero_sim.script.cuda import CudaOnCpu
from zero_sim.script.own_modules import OwnModules
from zero_sim.script.own_names import OwnNames
from zero_sim.sim.world.baton import RankLocal as RankLocalOfWorld
from zero_sim.sim.world.rank_threads import rank_state
from zero_sim.targets import Target
from zero_sim.targets.rank_local import RankLocal, prepare, rank_local_of

_CALLER, _RANK = -1, 0
"""Owners where a process is one rank."""


class Own(RankLocalOfWorld, Protocol):
    """What moves with the baton, and can be let go of."""

    @property
    def skipped(self) -> Mapping[str, str]:
        """Declared names that are not there, and why."""
        ...

    def forget(self) -> None:
        """Let go of everything that ranks had."""
        ...


class OwnState:
    """Moves what a target declares as rank-local between one owner at a time and its place."""

    def __init__(self, declared: RankLocal) -> None:
        self._names = OwnNames(declared.names)
        self._modules = None
        if declared.packages:
            self._modules = OwnModules(folder=None, packages=declared.packages)

    @property
    def skipped(self) -> Mapping[str, str]:
        """Declared names that are not there, and why."""
        return self._names.skipped

    def begin(self, caller: int) -> None:
        """Forget all ranks, and take out what is in place as `caller`'s."""
        self._names.begin(caller)
        if self._modules is not None:
            self._modules.begin(caller)

    def take_out(self, owner: int) -> None:
        """Save what is in place as `owner`'s."""
        self._names.take_out(owner)
        if self._modules is not None:
            self._modules.take_out(owner)

    def put_in_place(self, owner: int, *, previous: int) -> None:
        """Make what `owner` has the process's; `previous`'s was taken out just before."""
        if self._modules is not None:
            self._modules.put_in_place(owner)
        self._names.put_in_place(owner)

    def forget(self) -> None:
        """Let go of everything that ranks had."""
        self._names.forget()
        if self._modules is not None:
            self._modules.forget()


class RankLocalState:
    """All that is done for the ranks of one target while they run.

    Args:
        declared: By the target.
        ranks_max: Ranks of a world, at most; each is told of as many GPUs.
    """

    def __init__(self, declared: RankLocal, *, ranks_max: int) -> None:
        self.own: Own | None = None
        """What moves with the baton; None for nothing."""
        if declared.names or declared.packages:
            self.own = OwnState(declared)
        self._cuda = None
        if declared.cuda_is_cpu:
            self._cuda = CudaOnCpu(device_count=ranks_max, rank=lambda: rank_state.rank or 0)

    def notes(self) -> list[str]:
        """Notes on declared names that the installed library lacks, once ranks have run."""
        skipped = {} if self.own is None else self.own.skipped
        return [f"rank-local name {name!r} is skipped: {why}" for name, why in skipped.items()]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Around all runs; to be entered by the thread that runs them."""
        with nullcontext() if self._cuda is None else self._cuda.installed():
            try:
                yield
            finally:
                if self.own is not None:
                    self.own.forget()

    def in_rank(self) -> AbstractContextManager[object]:
        """Around the program of one rank."""
        return nullcontext() if self._cuda is None else self._cuda.in_rank()


@contextmanager
def as_in_new_process(
    target: Target, *, ranks_max: int, notes: list[str] | None = None
) -> Iterator[None]:
    """Around the program of a real rank, whose process has run other cases and will run more.

    What the target declares as rank-local begins anew, and is as before afterwards.

    Args:
        target: The system under test.
        ranks_max: Ranks of a world, at most.
        notes: Receives a note on each declared name that is not there.

    Raises:
        EnvironmentProblem: The package that it judges is not installed.
        ProtocolError: It declares something else.
    """
    state = rank_local_state(target, ranks_max=ranks_max)
    if state is None:
        yield
        return
    own = state.own
    with state.installed(), state.in_rank():
        if own is not None:
            own.begin(_CALLER)
            own.put_in_place(_RANK, previous=_CALLER)
        if notes is not None:
            notes.extend(state.notes())
        try:
            yield
        finally:
            if own is not None:
                own.take_out(_RANK)
                own.put_in_place(_CALLER, previous=_RANK)


def rank_local_state(target: Target, *, ranks_max: int) -> RankLocalState | None:
    """What is done for the ranks of a target; None where it declares nothing.

    Raises:
        EnvironmentProblem: The package that it judges is not installed.
        ProtocolError: It declares something else.
    """
    prepare(target)
    declared = rank_local_of(target)
    return None if declared is None else RankLocalState(declared, ranks_max=ranks_max)
