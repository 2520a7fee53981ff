"""Teams of worker processes, started once and reused for many jobs."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import send_handle
from typing import Any, Literal, Self

import torch.distributed as dist

from zero_sim.errors import EnvironmentProblem

# A team has a process with torch loaded for each rank.
TEAMS_OPEN_MAX = 4
_START_SECONDS = 120.0
_STACK_SECONDS = 5.0
# With this process's search path, because `-m` would add the current folder.
_FORKSERVER = """
import json, sys
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv.pop()))
path = json.loads(connection.recv_bytes())
sys.path[:] = [*path, *(each for each in sys.path if each not in path)]
from zero_sim.backends.forkserver import main
main(connection)
"""
# Interval between checks if another process has lost its worker.
_LOOK = 0.25
# Time for other ranks to notice that a rank died or gave up.
_OTHERS_SECONDS = 3.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """A job's ending on one worker."""

    rank: int
    how: Literal["done", "raised", "died", "hung"]
    result: Any = None
    """Result of the job."""
    error: str = ""
    """Exception of the job, or how the process died."""
    detail: str = ""
    """Traceback, or the stack of a hanging worker."""
    gave_up: bool = False
    """True if other ranks may wait in vain for this rank."""
    spoilt: bool = False
    """True if the process may be unusable for another job."""


@dataclass(slots=True)
class _Worker:
    rank: int
    pid: int
    connection: Connection


_Team = Sequence[_Worker]


@dataclass(kw_only=True, slots=True)
class JobRank:
    """The only worker of a process in a larger job."""

    rank: int
    """Worker's rank in the job."""
    size: int
    """Workers in the job."""
    store: tuple[str, int]
    """Host and port of the shared store."""
    generation: int = 0
    """Restarts of the job's workers so far, equal in all processes."""
    is_lost: Callable[[], bool] = lambda: False
    """Returns True if another process's worker died, hangs or gave up."""
    note_lost: Callable[[], None] = lambda: None
    """Reports that this process's worker is lost."""


class Teams:
    """Teams of worker processes, by size. A broken team is replaced.

    Args:
        backend: Backend of the workers, `gloo` or `nccl`.
        preload: Modules to import before workers are forked.
        job_rank: This process's part of a larger job; None if each team is a whole job.

    Example:
        >>> with Teams(backend="gloo") as teams:  # doctest: +SKIP
        ...     endings = teams.run("my.module:job", {"x": 1}, size=4, timeout_seconds=60)
    """

    def __init__(
        self,
        *,
        backend: str = "gloo",
        preload: Sequence[str] = ("zero_sim.backends.worker",),
        job_rank: JobRank | None = None,
    ) -> None:
        self._backend = backend
        self._job_rank = job_rank
        self._teams: dict[int, _Team] = {}
        self._numbers = itertools.count()
        self._store = None
        if job_rank is None:
            # With port 0 the system chooses a free port.
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        # One thread per process: ranks share the cores, and the count decides the bits of products.
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._requests, theirs = Pipe()
        with theirs:
            self._forkserver = subprocess.Popen(
                # -P keeps the current folder out of the search path.
                [sys.executable, "-P", "-c", _FORKSERVER, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                # Imported modules print to stderr, because stdout belongs to this process.
                stdout=2,
                env={**os.environ, **threads},
            )
        self._send([each for each in sys.path if isinstance(each, str)])
        self._send(list(preload))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def run(
        self, job: str, payload: Mapping[str, Any], *, size: int, timeout_seconds: float
    ) -> tuple[Ending, ...]:
        """Run a job on every worker of a team.

        Args:
            job: `module:name` of a function of the payload and a `RealRank`.
            payload: Argument for all workers; must be writable as JSON.
            size: Number of workers.
            timeout_seconds: Time without a result or sign of life from any worker, after which
                workers count as hung.

        Returns:
            Ending of each rank, in rank order. After a death or hang, the next job of this size
            gets a new team.

        Raises:
            EnvironmentProblem: Workers cannot be started.
        """
        team = self._team(size)
        message = {"op": "run", "job": job, "payload": {**payload, "number": next(self._numbers)}}
        endings = _broadcast(
            team, message, timeout_seconds=timeout_seconds, job_rank=self._job_rank
        )
        if any(self.ends_with(ending) for ending in endings.values()):
            # Reaping a process gives its exit status.
            deaths = self.renew(size)
            # Add the status, because the end of a connection does not show why a process died.
            endings = {rank: _with_status(end, deaths[rank]) for rank, end in endings.items()}
        return tuple(endings[rank] for rank in sorted(endings))

    @staticmethod
    def ends_with(ending: Ending) -> bool:
        """Return True if this ending makes the workers unusable."""
        return ending.how in ("died", "hung") or ending.spoilt

    def renew(self, size: int) -> Mapping[int, int]:
        """End a team, if it exists. The next job of this size gets a new team.

        Returns:
            Exit status of each worker, by rank; -SIGKILL if it was still alive.
        """
        team = self._teams.pop(size, None)
        return {} if team is None else self._end(team)

    def close(self) -> None:
        """End every worker and the fork server."""
        # A fork server that has ended cannot report exit statuses.
        with contextlib.suppress(EnvironmentProblem):
            for team in self._teams.values():
                self._end(team)
        self._teams.clear()
        self._requests.close()
        self._forkserver.wait()

    def _team(self, size: int) -> _Team:
        team = self._teams.pop(size, None)
        if team is None:
            # The least recently used team is first in the dict, because `_team` moves a used team
            # to the end.
            while len(self._teams) >= TEAMS_OPEN_MAX:
                self._end(self._teams.pop(next(iter(self._teams))))
            team = self._start(size)
        self._teams[size] = team
        return team

    def _start(self, size: int) -> _Team:
        first = 0 if self._job_rank is None else self._job_rank.rank
        team = [self._fork(first + rank) for rank in range(size)]
        join = {
            "op": "join",
            "backend": self._backend,
            **self._meeting(size),
        }
        endings = _broadcast(team, join, timeout_seconds=_START_SECONDS).values()
        if any(ending.how != "done" for ending in endings):
            deaths = self._end(team)
            endings = [_with_status(ending, deaths[ending.rank]) for ending in endings]
            # The worker that gave up has the reason. The others only report that it did.
            endings.sort(key=lambda ending: not ending.gave_up)
        for ending in endings:
            if ending.gave_up:
                raise EnvironmentProblem(ending.error)
            if ending.how != "done":
                raise EnvironmentProblem(
                    f"expected {size} workers to start, got rank {ending.rank} that {ending.how}: "
                    f"{ending.error}\n{ending.detail}".rstrip()
                )
        return team

    def _meeting(self, size: int) -> dict[str, Any]:
        """Return the store, worker count and team name by which workers find each other."""
        if self._job_rank is None:
            assert self._store is not None
            store = [self._store.host, self._store.port]
            return {"store": store, "size": size, "team": next(self._numbers)}
        job_rank = self._job_rank
        return {
            "store": list(job_rank.store),
            "size": job_rank.size,
            "team": f"job-{job_rank.generation}",
        }

    def _fork(self, rank: int) -> _Worker:
        ours, theirs = Pipe()
        with theirs:
            self._send({"fork": rank})
            # If the fork server has ended, `_receive_status` reports it.
            with contextlib.suppress(ConnectionError):
                send_handle(self._requests, theirs.fileno(), self._forkserver.pid)
        return _Worker(rank, self._receive_status(), ours)

    def _end(self, team: _Team) -> dict[int, int]:
        """Kill a team's workers. Return exit statuses by rank, as from `renew`."""
        statuses = {}
        for worker in team:
            worker.connection.close()
            with contextlib.suppress(ProcessLookupError):
                # Not by a message, because the worker may hang in C++ code.
                os.kill(worker.pid, signal.SIGKILL)
        for worker in team:
            # By the fork server, because only a parent can read an exit status.
            self._send({"reap": worker.pid})
            statuses[worker.rank] = self._receive_status()
        return statuses

    def _send(self, message: object) -> None:
        # If the fork server has ended, `_receive_status` reports it.
        with contextlib.suppress(ConnectionError):
            self._requests.send_bytes(json.dumps(message).encode())

    def _receive_status(self) -> int:
        """Return the fork server's answer to the last request."""
        try:
            return json.loads(self._requests.recv_bytes())
        except (EOFError, ConnectionResetError):
            raise EnvironmentProblem(
                "expected an answer from the process that starts workers, got its end with "
                f"{_how(self._forkserver.wait())}. Read its error output above."
            ) from None


def _broadcast(
    team: _Team,
    message: Mapping[str, Any],
    *,
    timeout_seconds: float,
    job_rank: JobRank | None = None,
) -> dict[int, Ending]:
    """Send a message to all workers, and collect their endings. Arguments as for `Teams`."""
    endings: dict[int, Ending] = {}
    pending: dict[Any, _Worker] = {}
    for worker in team:
        try:
            worker.connection.send_bytes(json.dumps(message).encode())
            pending[worker.connection] = worker
        except (BrokenPipeError, ConnectionResetError):
            endings[worker.rank] = _death(worker.rank)
    deadline = time.monotonic() + timeout_seconds
    is_lost = bool(endings)
    while pending:
        # Each sign of life moves the deadline.
        left = deadline - time.monotonic()
        # If another process lost its worker, this worker will hang. Do not wait for the full limit.
        if job_rank is not None and not is_lost and job_rank.is_lost():
            is_lost = True
            deadline = min(deadline, time.monotonic() + _OTHERS_SECONDS)
            continue
        ready = wait(
            list(pending), timeout=max(0.0, left if job_rank is None else min(left, _LOOK))
        )
        if not ready:
            if job_rank is not None and left > 0:
                continue
            endings.update(_locate(pending))
            break
        for connection in ready:
            ending = _receive(pending[connection])
            if not isinstance(ending, Ending):
                # Waiting for messages is a sign of life only if other processes send them.
                if not is_lost and (ending == "alive" or job_rank is not None):
                    deadline = time.monotonic() + timeout_seconds
                continue
            del pending[connection]
            endings[ending.rank] = ending
            # The others may hang now, so they only get a short time.
            if (ending.how == "died" or ending.gave_up) and not is_lost:
                is_lost = True
                deadline = min(deadline, time.monotonic() + _OTHERS_SECONDS)
    if job_rank is not None and any(end.how != "done" or end.gave_up for end in endings.values()):
        job_rank.note_lost()
    return endings


def _receive(worker: _Worker) -> Ending | Literal["alive", "listening"]:
    """Return a worker's ending or sign of life. "listening" means that it waits for other ranks."""
    try:
        answer = json.loads(worker.connection.recv_bytes())
    except (EOFError, ConnectionResetError):
        return _death(worker.rank)
    if answer["op"] in ("alive", "listening"):
        return answer["op"]
    return Ending(
        rank=worker.rank,
        how="raised" if answer["op"] == "raised" else "done",
        result=answer.get("result"),
        error=answer.get("error", ""),
        detail=answer.get("traceback", ""),
        gave_up=answer.get("gave_up", False),
        spoilt=answer.get("spoilt", False),
    )


def _locate(pending: Mapping[Any, _Worker]) -> dict[int, Ending]:
    """Request the stacks of workers that do not answer."""
    endings = {}
    for connection, worker in pending.items():
        text, error = "", "no answer in time"
        try:
            connection.send_bytes(json.dumps({"op": "stack"}).encode())
            while connection.poll(_STACK_SECONDS):
                answer = json.loads(connection.recv_bytes())
                # Skip earlier signs of life.
                if answer["op"] == "stack":
                    text = answer["text"]
                    break
        except (BrokenPipeError, EOFError, ConnectionResetError):
            endings[worker.rank] = _death(worker.rank)
            continue
        endings[worker.rank] = Ending(rank=worker.rank, how="hung", error=error, detail=text)
    return endings


def _death(rank: int) -> Ending:
    # Without the exit status, which is not known yet; see `_with_status`.
    return Ending(rank=rank, how="died", error="its process ended")


def _with_status(ending: Ending, status: int) -> Ending:
    if ending.how != "died":
        return ending
    return Ending(rank=ending.rank, how="died", error=f"its process ended with {_how(status)}")


def _how(status: int) -> str:
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
