"""A target's rank-local state in the simulated world: globals, packages, fake GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

from zero_sim.script.cuda import CudaOnCpu
from zero_sim.script.rank_local_modules import OwnModules
from zero_sim.script.rank_local_names import OwnNames
from zero_sim.sim.world.baton import RankLocal as RankLocalOfWorld
from zero_sim.sim.world.rank_threads import rank_state
from zero_sim.targets import Target
from zero_sim.targets.rank_local import RankLocal, prepare, rank_local_of

_CALLER, _RANK = -1, 0
"""State owners in a process with a single rank."""


class Own(RankLocalOfWorld, Protocol):
    """State that moves with the baton, and can be dropped."""

    @property
    def skipped(self) -> Mapping[str, str]:
        """Declared names that do not exist, with the reason."""
        ...

    def forget(self) -> None:
        """Drop the state of all ranks."""
        ...


class OwnState:
    """State that a target declares as rank-local. At any time, one owner's state is in place."""

    def __init__(self, declared: RankLocal) -> None:
        self._names = OwnNames(declared.names)
        self._modules = None
        if declared.packages:
            self._modules = OwnModules(folder=None, packages=declared.packages)

    @property
    def skipped(self) -> Mapping[str, str]:
        """Declared names that do not exist, with the reason."""
        return self._names.skipped

    def begin(self, caller: int) -> None:
        """Drop all ranks' state, and take out the present state as `caller`'s."""
        self._names.begin(caller)
        if self._modules is not None:
            self._modules.begin(caller)

    def take_out(self, owner: int) -> None:
        """Save the present state as `owner`'s."""
        self._names.take_out(owner)
        if self._modules is not None:
            self._modules.take_out(owner)

    def put_in_place(self, owner: int, *, previous: int) -> None:
        """Put `owner`'s state in place, after `previous`'s state was taken out."""
        if self._modules is not None:
            self._modules.put_in_place(owner)
        self._names.put_in_place(owner)

    def forget(self) -> None:
        """Drop the state of all ranks."""
        self._names.forget()
        if self._modules is not None:
            self._modules.forget()


class RankLocalState:
    """Preparations for a target's ranks while they run.

    Args:
        declared: State that the target declares.
        ranks_max: Most ranks in a world, and number of GPUs that each rank sees.
    """

    def __init__(self, declared: RankLocal, *, ranks_max: int) -> None:
        self.own: Own | None = None
        """State that moves with the baton, if any."""
        if declared.names or declared.packages:
            self.own = OwnState(declared)
        self._cuda = None
        if declared.cuda_is_cpu:
            self._cuda = CudaOnCpu(device_count=ranks_max, rank=lambda: rank_state.rank or 0)

    def notes(self) -> list[str]:
        """Return notes on declared names that the installed library lacks; call it after a run."""
        skipped = {} if self.own is None else self.own.skipped
        return [f"rank-local name {name!r} is skipped: {why}" for name, why in skipped.items()]

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Return the context around all runs; enter it in the thread that starts them."""
        with nullcontext() if self._cuda is None else self._cuda.installed():
            try:
                yield
            finally:
                if self.own is not None:
                    self.own.forget()

    def in_rank(self) -> AbstractContextManager[object]:
        """Return the context around a rank's program."""
        return nullcontext() if self._cuda is None else self._cuda.in_rank()


@contextmanager
def as_in_new_process(
    target: Target, *, ranks_max: int, notes: list[str] | None = None
) -> Iterator[None]:
    """Return the context around a real rank's program, in a process that runs many cases.

    State that the target declares as rank-local starts anew, and is restored afterwards. `notes`
    receives a note on each declared name that does not exist.

    Raises:
        EnvironmentProblem: The system's package is not installed.
        ProtocolError: As for `rank_local_state`.
    """
    state = rank_local_state(target, ranks_max=ranks_max)
    if state is None:
        yield
        return
    own = state.own
    with state.installed(), state.in_rank():
        if own is not None:
            # State that other cases left in place becomes the caller's, so the rank starts anew.
            own.begin(_CALLER)
            own.put_in_place(_RANK, previous=_CALLER)
        if notes is not None:
            # After `begin`, which looks up the names.
            notes.extend(state.notes())
        try:
            yield
        finally:
            if own is not None:
                # Restore the caller's state, also after an error.
                own.take_out(_RANK)
                own.put_in_place(_CALLER, previous=_RANK)


def rank_local_state(target: Target, *, ranks_max: int) -> RankLocalState | None:
    """Return the preparations for a target's ranks; None if it declares no rank-local state.

    Raises:
        EnvironmentProblem: The system's package is not installed.
        ProtocolError: The target's declaration is not a `RankLocal`.
    """
    prepare(target)
    declared = rank_local_of(target)
    return None if declared is None else RankLocalState(declared, ranks_max=ranks_max)
