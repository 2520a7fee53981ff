"""Jobs started by torchrun, or by a launcher that sets the same variables.

Each process keeps a worker, which is the rank: it trains and judges, and may die or hang. The
process itself only passes cases on, so it survives a case that kills its worker. All processes then
start new workers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch.distributed as dist

from zero_sim.backends.real import RealRank
from zero_sim.backends.side_channel import SideChannel
from zero_sim.backends.team import Ending, JobRank, Teams
from zero_sim.backends.transports import find_transport
from zero_sim.errors import EnvironmentProblem

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_IDLE = f"{__name__}:be_there"


def is_launched() -> bool:
    """Return True if a launcher started this process as a rank."""
    return all(name in os.environ for name in _NEEDED)


def place() -> tuple[int, int]:
    """Return the launcher's rank and world size."""
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def be_there(payload: Mapping[str, Any], real_rank: RealRank) -> list[str]:
    """Return the notes from a worker's transport. Runs as a job."""
    return list(real_rank.transport.notes(payload["processes"]))


def _is_second(problem: str) -> bool:
    return problem.endswith(" gave up")


class LaunchedJob:
    """This process's part of a launched job; must be closed.

    Args:
        backend: `gloo` or `nccl`.
        preload: Modules that the worker imports first.
        start_seconds: Time limit for starting the workers.

    Raises:
        EnvironmentProblem: Variables are not set, or a rank's device does not exist, has another
            model, or is already used by another rank.
    """

    def __init__(
        self, backend: str, *, preload: Sequence[str], start_seconds: float = 300.0
    ) -> None:
        missing = [name for name in _NEEDED if name not in os.environ]
        if missing:
            raise EnvironmentProblem(
                f"expected to be started by torchrun, but {', '.join(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} not set. "
                "Try torchrun --nproc-per-node 4 -m zero_sim run PATH."
            )
        # torch's own rendezvous, so that variables mean the same as under torchrun.
        store, rank, self.count = next(dist.rendezvous("env://"))
        self._store = dist.PrefixStore("zero_sim", store)
        # This process joins no group. It only exchanges messages.
        self._own = SideChannel(rank=rank, store=dist.PrefixStore("keepers", self._store))
        find_transport(backend).check()
        # Workers also use the launcher's store, with other prefixes.
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._job_rank = JobRank(rank=rank, size=self.count, store=address)
        self._teams = Teams(backend=backend, preload=preload, job_rank=self._job_rank)
        self._number = 0
        try:
            endings = self.run(_IDLE, {}, stall_seconds=start_seconds)
        except BaseException:
            self._teams.close()
            raise
        self.notes: Sequence[str] = endings[0].result or ()

    def run(
        self, job: str, payload: Mapping[str, Any], *, stall_seconds: float
    ) -> Sequence[Ending]:
        """Run a job on the workers of all processes. Every process must call this.

        Args:
            job: `module:name`, as for `Teams.run`.
            payload: Argument of the job. Rank 0's is used, with the number of `processes` added.
            stall_seconds: Longest time without a sign of life from a worker.

        Returns:
            Endings of all ranks, in rank order.

        Raises:
            EnvironmentProblem: A worker cannot be started.
        """
        self._number += 1
        self._own.begin(self._number)
        # Paths in it are from rank 0's machine, so cases with paths need a shared file system.
        shared = {**self._exchange(payload, about="payload")[0], "processes": self.count}
        # A key per job, so that a loss does not count again in later jobs.
        self._watch(f"lost/{self._number}")
        # Exchange a problem before raising it, because the other processes wait for a message.
        problem, ending = "", None
        try:
            (ending,) = self._teams.run(job, shared, size=1, timeout_seconds=stall_seconds)
        except EnvironmentProblem as error:
            problem = str(error)
        reports = self._exchange(
            {"problem": problem, "ending": ending and asdict(ending)}, about="ending"
        )
        problems: list[str] = [each["problem"] for each in reports if each["problem"]]
        if problems:
            # A rank that left because of another rank only reports that. Prefer the cause.
            raise EnvironmentProblem(min(problems, key=_is_second))
        endings = [Ending(**each["ending"]) for each in reports]
        # All processes see the same endings, so they agree on starting new workers.
        if any(self._teams.ends_with(each) for each in endings):
            self._teams.renew(1)
            self._job_rank.generation += 1
        return endings

    def close(self, *, in_order: bool) -> None:
        """End the worker.

        Args:
            in_order: True if all processes close. Then they wait for each other, because any of
                them may host the store.
        """
        self._teams.close()
        if in_order:
            self._own.begin(self._number + 1)
            self._exchange(None, about="end")

    def _watch(self, key: str) -> None:
        self._job_rank.is_lost = lambda: self._store.check([key])
        self._job_rank.note_lost = lambda: self._store.set(key, "")

    def _exchange(self, what: Any, *, about: str) -> list[Any]:
        return self._own.exchange(what, size=self.count, about=f"all {about}")
