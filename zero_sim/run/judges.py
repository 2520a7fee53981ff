"""Judges of cases: one after another, or several at once; of the simulated world or of real ranks.

Here whoever has cases, the command line or a pytest session, meets what runs them. Several at once
run on processes that each keep worlds of their own, and are told in the order asked.
"""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal, Self

from zero_sim.backends.pool import share_out
from zero_sim.backends.worlds import WorldPool
from zero_sim.errors import ZeroSimError
from zero_sim.findings.records import Finding, not_judged, unforeseen
from zero_sim.host.device import check_device
from zero_sim.host.garbage import settle_memory
from zero_sim.run import CaseResult
from zero_sim.run.real_judge import on_workers
from zero_sim.run.runner import judge_simulated
from zero_sim.run.setup import own_setup
from zero_sim.run.sgd_twin import with_twin
from zero_sim.run.simulated import Simulated
from zero_sim.scenario.checks import Check
from zero_sim.scenario.spec import Scenario
from zero_sim.targets import find_target, import_target

Judge = Callable[[Scenario], CaseResult]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """How all cases are run."""

    explainer: str
    """`module:name` of the class that explains what differs; empty for no explanations."""
    keep_logs: bool = False
    """Whether results carry their event logs even if nothing fails."""
    device: str = "cpu"
    """Where simulated ranks and the reference compute: any device that torch knows."""
    target: str | None = None
    """The system to judge in place of the scenarios' own: a registered name, or `module:name`,
    whose code is run."""


@contextmanager
def open_judge(
    chosen: Chosen, *, backend: Literal["sim", "gloo", "nccl"] = "sim"
) -> Iterator[Judge]:
    """What judges one case after another.

    Worlds and workers are kept from case to case, so that setting one up is paid for once.

    Args:
        chosen: How cases are run; on a backend with real ranks only the explainer is read.
        backend: What carries the collectives.

    Raises:
        UsageError: There is no such target.
        EnvironmentProblem: There is no such device.
    """
    if backend != "sim":
        with on_workers(own_setup(backend), explainer=chosen.explainer) as judge:
            yield judge
        return
    check_device(chosen.device)
    target = None if chosen.target is None else import_target(chosen.target)
    settle_memory()
    with WorldPool() as pool:
        backend_of_all = Simulated(
            worlds=pool, target=target, device=chosen.device, explainer=chosen.explainer
        )
        judge = partial(judge_simulated, backend=backend_of_all, keep_logs=chosen.keep_logs)
        yield lambda scenario: with_twin(
            judge(scenario),
            scenario,
            judge=judge,
            find=lambda: target or find_target(scenario.system.target),
        )


class JobsJudge:
    """Judges cases on processes of its own, several at a time.

    It is asked for them one by one, in the order in which they were given. A process that dies
    costs the case that it was at.

    Args:
        scenarios: The cases.
        jobs: Number of processes.
        chosen: How they are run.

    Raises:
        UsageError: There is no such target.
        EnvironmentProblem: There is no such device.
    """

    def __init__(self, scenarios: Sequence[Scenario], *, jobs: int, chosen: Chosen) -> None:
        check_device(chosen.device)
        if chosen.target is not None:
            import_target(chosen.target)
        tasks = [(scenario, chosen) for scenario in scenarios]
        self._ended = share_out(_judge, tasks, jobs=jobs)
        self._unanswered: dict[int, Future[bytes]] = {}
        """By place in the order: cases that ended before an earlier one did."""
        self._answered_count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.close()

    def __call__(self, scenario: Scenario) -> CaseResult:
        """The result of the next case.

        Raises:
            ZeroSimError: What judging it raised on purpose.
        """
        place = self._answered_count
        self._answered_count += 1
        while place not in self._unanswered:
            ended, future = next(self._ended)
            self._unanswered[ended] = future
        try:
            answer: _Answer = pickle.loads(self._unanswered.pop(place).result())
        except BrokenExecutor as error:
            return _died(scenario, error)
        if answer.result is None:
            raise _AnsweredError(answer.error, exit_status=answer.exit_status)
        return answer.result


@dataclass(frozen=True, kw_only=True, slots=True)
class _Answer:
    """What came of a case in another process."""

    result: CaseResult | None = None
    error: str = ""
    """What was raised on purpose, in words: not every error can be pickled."""
    exit_status: int = 0


class _AnsweredError(ZeroSimError):
    """An error that another process raised on purpose."""

    def __init__(self, message: str, *, exit_status: int) -> None:
        self.exit_status = exit_status
        super().__init__(message)


def _judge(scenario: Scenario, chosen: Chosen) -> bytes:
    """Judge a case in a process that is there for nothing else; a pickled `_Answer`."""
    # What a model prints would end up in the middle of what is told of other cases.
    sys.stdout = sys.stderr
    started = time.perf_counter()
    try:
        answer = _Answer(result=_kept_worlds(chosen)(scenario))
    except ZeroSimError as error:
        answer = _Answer(error=str(error), exit_status=error.exit_status)
    except Exception as error:  # noqa: BLE001
        seconds = time.perf_counter() - started
        answer = _Answer(result=unforeseen(error, id=scenario.name, seconds=seconds))
    # As bytes: torch would send the tensors of a finding as shared memory, two files open for each.
    return pickle.dumps(answer)


@cache
def _kept_worlds(chosen: Chosen) -> Judge:
    # They end with the process.
    return ExitStack().enter_context(open_judge(chosen))


def _died(scenario: Scenario, error: BrokenExecutor) -> CaseResult:
    finding = Finding(
        check=Check.INTERNAL_PROCESS_DIED,
        message="the process that ran this case ended in the middle of it, so nothing is said "
        "about the system; its error output stands above. Try --jobs 1, which shows where",
        detail=str(error),
    )
    return not_judged(scenario.name, "the process that ran this case ended", finding)
