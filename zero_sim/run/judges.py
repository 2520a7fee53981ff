"""Judges of many cases, one at a time or several at once, on simulated or real ranks.

The command line and pytest sessions use these judges. With jobs, each process has its own worlds,
and results come in the order of the cases.
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
    """Options for all cases."""

    explainer: str
    """`module:name` of the class that explains differences; empty for no explanations."""
    keep_logs: bool = False
    """True if results contain event logs even if the case passes."""
    device: str = "cpu"
    """Device of simulated ranks and references; any torch device."""
    target: str | None = None
    """System to judge instead of the scenarios' own: a registered name, or `module:name`, whose
    code is executed."""


@contextmanager
def open_judge(
    chosen: Chosen, *, backend: Literal["sim", "gloo", "nccl"] = "sim"
) -> Iterator[Judge]:
    """Open a judge that takes one case at a time.

    Worlds and workers are kept from case to case, so they are set up only once.

    Args:
        chosen: Options for all cases; real ranks use only the explainer.
        backend: Carries the collectives.

    Raises:
        UsageError: The target does not exist.
        EnvironmentProblem: The device does not exist.
    """
    if backend != "sim":
        with on_workers(own_setup(backend), explainer=chosen.explainer) as judge:
            yield judge
        return
    check_device(chosen.device)
    target = None if chosen.target is None else import_target(chosen.target)
    settle_memory()
    # Rank threads are kept from case to case.
    with WorldPool() as pool:
        backend_of_all = Simulated(
            worlds=pool, target=target, device=chosen.device, explainer=chosen.explainer
        )
        judge = partial(judge_simulated, backend=backend_of_all, keep_logs=chosen.keep_logs)
        # The twin is judged in the same worlds, with the same options.
        yield lambda scenario: with_twin(
            judge(scenario),
            scenario,
            judge=judge,
            find=lambda: target or find_target(scenario.system.target),
        )


class JobsJudge:
    """Judge for several cases at a time, on its own processes.

    Call it once per case, in the order of `scenarios`. If a process dies, only its current case is
    lost.

    Args:
        scenarios: The cases.
        jobs: How many processes to use.
        chosen: Options for all cases.

    Raises:
        UsageError: The target does not exist.
        EnvironmentProblem: The device does not exist.
    """

    def __init__(self, scenarios: Sequence[Scenario], *, jobs: int, chosen: Chosen) -> None:
        check_device(chosen.device)
        if chosen.target is not None:
            # Import here, so that a wrong name is an error before any process starts.
            import_target(chosen.target)
        # A case only starts while the result of the next one is requested.
        tasks = [(scenario, chosen) for scenario in scenarios]
        self._ended = share_out(_judge, tasks, jobs=jobs)
        self._early_results: dict[int, Future[bytes]] = {}
        """Results that came before an earlier case's, by case index."""
        self._returned_count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.close()

    def __call__(self, scenario: Scenario) -> CaseResult:
        """Return the next case's result.

        Raises:
            ZeroSimError: The judge in the other process raised it.
        """
        place = self._returned_count
        self._returned_count += 1
        # Cases end in any order, so keep results of later cases.
        while place not in self._early_results:
            ended, future = next(self._ended)
            self._early_results[ended] = future
        try:
            answer: _Outcome = pickle.loads(self._early_results.pop(place).result())
        # The process died, for example by a segmentation fault in a library.
        except BrokenExecutor as error:
            return _died(scenario, error)
        if answer.result is None:
            # Keep the exit status, so that the command ends as it would without jobs.
            raise _RemoteError(answer.error, exit_status=answer.exit_status)
        return answer.result


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outcome:
    result: CaseResult | None = None
    error: str = ""
    """Message of a `ZeroSimError`, because some errors cannot be pickled."""
    exit_status: int = 0


class _RemoteError(ZeroSimError):
    """A `ZeroSimError` raised by another process."""

    def __init__(self, message: str, *, exit_status: int) -> None:
        self.exit_status = exit_status
        super().__init__(message)


def _judge(scenario: Scenario, chosen: Chosen) -> bytes:
    """Judge a case in a pool process; return a pickled `_Outcome`."""
    # A model's output must not mix with results on stdout.
    sys.stdout = sys.stderr
    started = time.perf_counter()
    try:
        answer = _Outcome(result=_kept_worlds(chosen)(scenario))
    except ZeroSimError as error:
        answer = _Outcome(error=str(error), exit_status=error.exit_status)
    except Exception as error:  # noqa: BLE001
        seconds = time.perf_counter() - started
        answer = _Outcome(result=unforeseen(error, id=scenario.name, seconds=seconds))
    # Pickle here, because torch would share a finding's tensors in memory, with two open files
    # each.
    return pickle.dumps(answer)


@cache
def _kept_worlds(chosen: Chosen) -> Judge:
    # Never closed, because worlds are kept until the process ends.
    return ExitStack().enter_context(open_judge(chosen))


def _died(scenario: Scenario, error: BrokenExecutor) -> CaseResult:
    finding = Finding(
        check=Check.INTERNAL_PROCESS_DIED,
        message="the process that ran this case died, so the system was not judged; its error "
        "output is above. Try --jobs 1 to see where",
        detail=str(error),
    )
    return not_judged(scenario.name, "the process that ran this case died", finding)
