"""Teams of worker processes, started once and used job after job."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import (
    Connection,
    answer_challenge,
    deliver_challenge,
    wait,
)
from pathlib import Path
from typing import Any, Literal, Self

import torch.distributed as dist

from zero_sim.errors import EnvironmentProblem

TEAMS_OPEN_MAX = 4
_START_SECONDS = 120.0
_STACK_SECONDS = 5.0
_LOOK_SECONDS = 0.25
"""How long nobody may connect before it is looked whether those that are to come still run."""
_FORKSERVER = """
import json, sys
path = json.loads(sys.stdin.readline())
sys.path[:] = [*path, *(each for each in sys.path if each not in path)]
from zero_sim.backends.forkserver import main
main()
"""
"""Workers import what this process can, from where it does; a `-m` would add the current folder."""
_LOOK = 0.25
"""How often it is looked whether a worker of another process is lost."""
_OTHERS_SECONDS = 3.0
"""How long the others may still take to notice that one of them died or gave up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How one worker's part of a job ended."""

    rank: int
    how: Literal["done", "raised", "died", "hung"]
    result: Any = None
    """What the job returned."""
    error: str = ""
    """What it raised, or how the process died."""
    detail: str = ""
    """A traceback, or where it hung."""
    gave_up: bool = False
    """Whether the job says that others may wait for this rank in vain."""
    spoilt: bool = False
    """Whether the process may be of no use for another job."""


@dataclass(slots=True)
class _Worker:
    rank: int
    pid: int
    connection: Connection


@dataclass(kw_only=True, slots=True)
class JobRank:
    """The one worker that a process of a larger job keeps."""

    rank: int
    """Of the worker, in the job."""
    size: int
    """Workers of the whole job."""
    store: tuple[str, int]
    """Host and port of the store that they all share."""
    generation: int = 0
    """How often the workers of the job were started anew; the same for all who keep one."""
    is_lost: Callable[[], bool] = lambda: False
    """Whether the worker of somebody else died, hangs or gave up at this job."""
    note_lost: Callable[[], None] = lambda: None
    """Says so of this one."""


class _NotConnected(Exception):
    """A worker that was forked never came; says which, and why."""


@dataclass(slots=True)
class _Team:
    workers: list[_Worker]


class Teams:
    """Worker processes in teams, one team for each world size; a broken team is replaced.

    Args:
        backend: What the workers speak, `gloo` or `nccl`.
        preload: Modules to import before the workers are forked.
        job_rank: Where workers are part of a larger job: which; None where each team is all of it.

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
        self._folder = tempfile.TemporaryDirectory(prefix="zero-sim-")
        authkey = secrets.token_bytes(32)
        self._authkey = authkey
        self._listener = socket.socket(socket.AF_UNIX)
        address = str(Path(self._folder.name) / "workers")
        self._listener.bind(address)
        self._listener.listen()
        self._store = None
        if job_rank is None:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        # One thread a process: ranks share the cores, and the count decides the bits of a product.
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._forkserver = subprocess.Popen(
            [sys.executable, "-P", "-c", _FORKSERVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **threads},
            text=True,
            bufsize=1,
        )
        self._say([each for each in sys.path if isinstance(each, str)])
        self._say(
            {
                "address": address,
                "authkey": authkey.hex(),
                "preload": list(preload),
            }
        )

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
            payload: Its argument, the same for all; can be written as JSON.
            size: Number of workers.
            timeout_seconds: After how long without an answer, or a sign of life from any of them,
                workers count as hung.

        Returns:
            How it ended on each rank, in rank order. After a death or a hang the team is gone; the
            next job of that size gets a new one.

        Raises:
            EnvironmentProblem: Workers cannot be started.
        """
        team = self._team(size)
        message = {"op": "run", "job": job, "payload": {**payload, "number": next(self._numbers)}}
        endings = _broadcast(
            team, message, timeout_seconds=timeout_seconds, job_rank=self._job_rank
        )
        if any(self.ends_with(ending) for ending in endings.values()):
            deaths = self.renew(size)
            endings = {rank: _with_status(end, deaths[rank]) for rank, end in endings.items()}
        return tuple(endings[rank] for rank in sorted(endings))

    @staticmethod
    def ends_with(ending: Ending) -> bool:
        """Whether the workers are of no use after one of them ended in this way."""
        return ending.how in ("died", "hung") or ending.spoilt

    def renew(self, size: int) -> Mapping[int, int]:
        """End a team, if it is there; the next job of that size gets a new one.

        Returns:
            The exit status of each worker, by rank, as it was before.
        """
        team = self._teams.pop(size, None)
        return {} if team is None else self._end(team)

    def close(self) -> None:
        """End every worker and the fork server."""
        # Where the fork server has ended, nobody is left to ask how its workers did.
        with contextlib.suppress(EnvironmentProblem):
            for team in self._teams.values():
                self._end(team)
        self._teams.clear()
        with self._forkserver:
            assert self._forkserver.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._forkserver.stdin.close()
        self._listener.close()
        self._folder.cleanup()

    def _team(self, size: int) -> _Team:
        team = self._teams.pop(size, None)
        if team is None:
            while len(self._teams) >= TEAMS_OPEN_MAX:
                self._end(self._teams.pop(next(iter(self._teams))))
            team = self._start(size)
        self._teams[size] = team
        return team

    def _start(self, size: int) -> _Team:
        first = 0 if self._job_rank is None else self._job_rank.rank
        pids = [self._ask({"fork": {"rank": first + rank}})["pid"] for rank in range(size)]
        try:
            workers = self._connect(pids, first=first)
        except _NotConnected as lost:
            for pid in pids:
                self._kill(pid)
            for pid in pids:
                self._ask({"reap": pid})
            raise EnvironmentProblem(f"cannot start {size} workers; the one of {lost}") from None
        team = _Team(workers)
        join = {
            "op": "join",
            "backend": self._backend,
            **self._meeting(size),
        }
        endings = _broadcast(team, join, timeout_seconds=_START_SECONDS).values()
        if any(ending.how != "done" for ending in endings):
            deaths = self._end(team)
            endings = [_with_status(ending, deaths[ending.rank]) for ending in endings]
            # Who gave up says why; the others only that somebody did.
            endings.sort(key=lambda ending: not ending.gave_up)
        for ending in endings:
            if ending.gave_up:
                raise EnvironmentProblem(ending.error)
            if ending.how != "done":
                raise EnvironmentProblem(
                    f"cannot start {size} workers; the one of rank {ending.rank} {ending.how}: "
                    f"{ending.error}\n{ending.detail}".rstrip()
                )
        return team

    def _meeting(self, size: int) -> dict[str, Any]:
        """Where workers find each other: the store, how many they are, and which team it is."""
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

    def _connect(self, pids: Sequence[int], *, first: int) -> list[_Worker]:
        """Wait until every worker has connected.

        Raises:
            _NotConnected: One of them ended before, or did not come in time.
        """
        workers: dict[int, _Worker] = {}
        deadline = time.monotonic() + _START_SECONDS
        while len(workers) < len(pids):
            if wait([self._listener], timeout=_LOOK_SECONDS):
                handle = self._listener.accept()[0].detach()
                try:
                    worker = _greet(Connection(handle), authkey=self._authkey)
                except (EOFError, OSError):
                    continue  # It has ended since; the next look tells which one.
                workers[worker.rank - first] = worker
                continue
            for rank in sorted(set(range(len(pids))) - workers.keys()):
                status = self._ask({"ended": pids[rank]})["status"]
                if status is not None:
                    raise _NotConnected(f"rank {rank} died: its process ended with {_how(status)}")
                if time.monotonic() > deadline:
                    raise _NotConnected(f"rank {rank} did not connect in {_START_SECONDS:g} s")
        assert all(workers[rank].pid == pid for rank, pid in enumerate(pids))
        return [workers[rank] for rank in range(len(pids))]

    def _kill(self, pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def _end(self, team: _Team) -> dict[int, int]:
        """Kill a team's workers; the exit status of each, by rank, as it was before."""
        statuses = {}
        for worker in team.workers:
            worker.connection.close()
            self._kill(worker.pid)
        for worker in team.workers:
            statuses[worker.rank] = self._ask({"reap": worker.pid})["status"]
        return statuses

    def _say(self, message: object) -> None:
        assert self._forkserver.stdin is not None
        # Where it has ended, the next question tells.
        with contextlib.suppress(BrokenPipeError):
            self._forkserver.stdin.write(json.dumps(message) + "\n")

    def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        assert self._forkserver.stdout is not None
        self._say(message)
        answer = self._forkserver.stdout.readline()
        if not answer:
            raise EnvironmentProblem(
                "expected the process that starts workers to answer, but it ended with "
                f"{_how(self._forkserver.wait())}. Its error output stands above."
            )
        return json.loads(answer)


def _greet(connection: Connection, *, authkey: bytes) -> _Worker:
    """Make sure that who connected is a worker of ours, and hear which.

    Raises:
        EOFError, OSError: It has ended.
    """
    deliver_challenge(connection, authkey)
    answer_challenge(connection, authkey)
    hello = json.loads(connection.recv_bytes())
    return _Worker(hello["rank"], hello["pid"], connection)


def _broadcast(
    team: _Team,
    message: Mapping[str, Any],
    *,
    timeout_seconds: float,
    job_rank: JobRank | None = None,
) -> dict[int, Ending]:
    """Send a message to all workers and wait for an ending of each; arguments as for `Teams`."""
    endings: dict[int, Ending] = {}
    pending: dict[Any, _Worker] = {}
    for worker in team.workers:
        try:
            worker.connection.send_bytes(json.dumps(message).encode())
            pending[worker.connection] = worker
        except (BrokenPipeError, ConnectionResetError):
            endings[worker.rank] = _death(worker.rank)
    deadline = time.monotonic() + timeout_seconds
    is_lost = bool(endings)
    while pending:
        left = deadline - time.monotonic()
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
            endings.update(_ask_where(pending))
            break
        for connection in ready:
            ending = _receive(pending[connection], with_listening=job_rank is not None)
            if ending is None:
                if not is_lost:
                    deadline = time.monotonic() + timeout_seconds
                continue
            if isinstance(ending, _Listening):
                continue
            del pending[connection]
            endings[ending.rank] = ending
            if (ending.how == "died" or ending.gave_up) and not is_lost:
                is_lost = True
                deadline = min(deadline, time.monotonic() + _OTHERS_SECONDS)
    if job_rank is not None and any(end.how != "done" or end.gave_up for end in endings.values()):
        job_rank.note_lost()
    return endings


class _Listening:
    """A worker says that it waits for what others tell."""


def _receive(worker: _Worker, *, with_listening: bool = False) -> Ending | _Listening | None:
    """A worker's ending; None for a sign of life, which it is to wait for those elsewhere.

    Args:
        worker: One whose connection has something to read.
        with_listening: Whether those it listens to are workers of other processes.
    """
    try:
        answer = json.loads(worker.connection.recv_bytes())
    except (EOFError, ConnectionResetError):
        return _death(worker.rank)
    if answer["op"] == "alive":
        return None
    if answer["op"] == "listening":
        return None if with_listening else _Listening()
    if answer["op"] == "raised":
        return Ending(
            rank=worker.rank,
            how="raised",
            error=answer["error"],
            detail=answer["traceback"],
            gave_up=answer.get("gave_up", False),
            spoilt=answer.get("spoilt", False),
        )
    return Ending(
        rank=worker.rank,
        how="done",
        result=answer.get("result"),
        gave_up=answer.get("gave_up", False),
        spoilt=answer.get("spoilt", False),
    )


def _ask_where(pending: Mapping[Any, _Worker]) -> dict[int, Ending]:
    """Ask workers that do not answer what they are doing."""
    endings = {}
    for connection, worker in pending.items():
        text, error = "", "no answer in time"
        try:
            connection.send_bytes(json.dumps({"op": "stack"}).encode())
            while connection.poll(_STACK_SECONDS):
                answer = json.loads(connection.recv_bytes())
                if answer["op"] == "stack":
                    text = answer["text"]
                    break
        except (BrokenPipeError, EOFError, ConnectionResetError):
            endings[worker.rank] = _death(worker.rank)
            continue
        endings[worker.rank] = Ending(rank=worker.rank, how="hung", error=error, detail=text)
    return endings


def _death(rank: int) -> Ending:
    return Ending(rank=rank, how="died", error="its process ended")


def _with_status(ending: Ending, status: int) -> Ending:
    if ending.how != "died":
        return ending
    return Ending(rank=ending.rank, how="died", error=f"its process ended with {_how(status)}")


def _how(status: int) -> str:
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
