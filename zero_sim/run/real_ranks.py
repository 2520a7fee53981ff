"""Judging case after case on a real backend: on own workers, or as one rank of a launched job."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory
from typing import Any, Literal, Protocol, Self, get_args

from zero_sim.backends import Teams
from zero_sim.backends import torchrun as launched
from zero_sim.errors import EnvironmentProblem, UsageError
from zero_sim.findings.records import CaseResult, Finding
from zero_sim.run.rank_job import judge_rank, payload_of, probe_order, processes_of
from zero_sim.run.rank_reports import Report, hung, merge, merge_endings
from zero_sim.scenario.conditions import why_order_matters
from zero_sim.scenario.spec import Scenario
from zero_sim.workloads import EXACT_MODELS

RealBackend = Literal["gloo", "nccl"]
WORKERS_MAX = 16
"""Most ranks of a case on own workers: all of them share this machine."""
OWN_ORDERS: Mapping[RealBackend, str] = {"gloo": "gloo", "nccl": "nccl-ring"}
"""The order that each backend is said to add in by itself, as it is set up here."""

_PROBE_SECONDS = 120.0
_PROBED_ON_GLOO = 4
_LATE = "torch._dynamo"
"""What torch's optimizers import when the first one is made, which takes seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """What carries the collectives of all cases."""

    backend: RealBackend
    native: bool = False
    """Whether the backend adds in its own order even where a case names another: then only what no
    order changes is owed, or what bounds say."""
    ranks_max: int = WORKERS_MAX
    """Most ranks of a case."""

    @property
    def device(self) -> str:
        """Where the ranks compute."""
        return "cuda" if self.backend == "nccl" else "cpu"

    def why_left_out(self, scenario: Scenario) -> str:
        """Why a case cannot be judged here; empty where it can."""
        if scenario.faults:
            return "faults are planned, which only the simulated world has"
        if processes_of(scenario) > self.ranks_max:
            return f"more than {self.ranks_max} ranks"
        is_owed = scenario.model.name in EXACT_MODELS or not scenario.world.order_known
        if self.native and not self.is_own(scenario) and not is_owed:
            return f"the bits depend on an order that is not {self.backend}'s own"
        return ""

    def check(self, scenario: Scenario) -> None:
        """Check that a case can be judged here.

        Raises:
            EnvironmentProblem: It cannot.
        """
        why = self.why_left_out(scenario)
        if why:
            raise EnvironmentProblem(f"expected a case for backend {self.backend}, got one: {why}.")

    def is_own(self, scenario: Scenario) -> bool:
        """Whether a case names the backend's own order."""
        return scenario.world.order == OWN_ORDERS[self.backend]

    def order_of(self, scenario: Scenario) -> str | None:
        """The order that data is folded in; None for what the backend does by itself."""
        return None if self.native or self.is_own(scenario) else scenario.world.order

    def note(self, scenario: Scenario) -> str:
        """Who added, and in which order."""
        order = scenario.world.order
        if self.order_of(scenario) is None and not scenario.world.order_known:
            return f"{self.backend} added in its own order, of which the judge was told nothing"
        if self.is_own(scenario):
            return f"{self.backend} added in its own order, modelled as {order}"
        if self.native:
            return f"{self.backend} added in its own order, the oracle in order {order}"
        return f"{self.backend} moved the data, and every rank added it in order {order}"


class RealJudge(Protocol):
    """Judges one case after another on a real backend."""

    setup: Setup

    def __call__(self, scenario: Scenario) -> CaseResult:
        """Judge a case.

        Raises:
            EnvironmentProblem: This machine lacks something that the case needs.
        """
        ...


@dataclass(kw_only=True, slots=True)
class _Probe:
    """Whether the backend adds as its model does: measured once, when a case first relies on it."""

    setup: Setup
    drift: str | None = None
    """What was measured; empty where it is as modelled, None where nothing was yet."""

    def check(self, scenario: Scenario, measure: Callable[[int, str], list[str]]) -> str:
        """Where the backend drifted from the model that a case relies on; empty if nowhere.

        Args:
            scenario: The case.
            measure: Measures so many ranks, beside the model of that name.
        """
        size, order = scenario.world.size, scenario.world.order
        # Two ranks have one order only, and bounds hold in every order.
        if (
            size < 3
            or not scenario.world.order_known
            or not self.setup.is_own(scenario)
            or scenario.model.name in EXACT_MODELS
        ):
            return ""
        if self.drift is None:
            # How NCCL arranges its ring depends on how many take part; gloo does not.
            count = min(size, _PROBED_ON_GLOO) if self.setup.backend == "gloo" else size
            self.drift = "\n".join(measure(count, order))
        return self.drift


def _judge_after(
    drift: str, scenario: Scenario, setup: Setup, *, judge: Callable[[Scenario], CaseResult]
) -> CaseResult:
    """Judge a case after the probe: by bounds where the backend drifted from its model.

    Args:
        drift: What was measured; empty where the backend adds as modelled.
        scenario: The case.
        setup: What carries its collectives.
        judge: Runs the case that it is given and judges it.
    """
    if not drift:
        return judge(scenario)
    why = why_order_matters(scenario)
    if why:
        return _drifted(scenario, setup, drift, why=why)
    world = replace(scenario.world, order_known=False)
    result = judge(replace(scenario, world=world))
    note = (
        f"backend.order-drift: {setup.backend} does not add as the model {scenario.world.order!r} "
        f"says, so sums were judged by their proven bounds; {'; '.join(drift.splitlines())}"
    )
    return replace(result, notes=(*result.notes, note))


def _drifted(scenario: Scenario, setup: Setup, drift: str, *, why: str) -> CaseResult:
    """The result of a case that relies on a model which the backend does not follow."""
    finding = Finding(
        check="backend.order-drift",
        message=f"{setup.backend} does not add as the model {scenario.world.order!r} says, so the "
        f"bits of this case are not known, and with {why} it cannot be judged by bounds either; "
        "the system under test was not judged. Try --native with an exact model, or another "
        "world.order, which is folded",
        detail=drift,
    )
    return CaseResult(
        id=scenario.name,
        verdict="error",
        seconds=0.0,
        error=f"{setup.backend} adds in an order of its own that is not {scenario.world.order!r}",
        findings=(finding,),
    )


def _folder_for(scenario: Scenario) -> AbstractContextManager[str]:
    return nullcontext("") if scenario.reload is None else TemporaryDirectory(prefix="zero-sim-")


class TeamJudge:
    """Judges on worker processes of its own, kept from case to case.

    Args:
        setup: What carries the collectives; `gloo`.
        target: `module:name` of the system under test; empty for the one that each case names.

    Raises:
        UsageError: The backend is one that needs a launcher.
    """

    def __init__(self, setup: Setup, *, target: str = "") -> None:
        if setup.backend != "gloo":
            raise UsageError(
                f"expected own workers for backend gloo, got {setup.backend}: start it by torchrun."
            )
        self.setup = setup
        self._target = target
        self._order_probe = _Probe(setup=setup)
        self._teams = Teams(
            backend=setup.backend,
            preload=("zero_sim.backends.worker", "zero_sim.run.rank_job", _LATE),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._teams.close()

    def __call__(self, scenario: Scenario) -> CaseResult:
        """Judge a case; a worker that dies or hangs costs this case alone.

        Raises:
            EnvironmentProblem: Workers cannot be started, or lack something that the case needs;
                or the case is one that `Setup.why_left_out` names.
        """
        self.setup.check(scenario)
        started = time.perf_counter()
        drift = self._order_probe.check(scenario, self._probe)
        result = _judge_after(drift, scenario, self.setup, judge=self._run)
        return replace(result, seconds=time.perf_counter() - started)

    def _run(self, scenario: Scenario) -> CaseResult:
        processes = processes_of(scenario)
        stall_seconds = scenario.run.stall_seconds
        with _folder_for(scenario) as folder:
            payload = payload_of(
                scenario,
                folder=folder,
                processes=processes,
                order=self.setup.order_of(scenario),
                target=self._target,
            )
            endings = self._teams.run(
                f"{judge_rank.__module__}:{judge_rank.__name__}",
                payload,
                size=processes,
                timeout_seconds=stall_seconds,
            )
        return merge_endings(
            scenario, endings, notes=[self.setup.note(scenario)], stall_seconds=stall_seconds
        )

    def _probe(self, size: int, order: str) -> list[str]:
        endings = self._teams.run(
            f"{probe_order.__module__}:{probe_order.__name__}",
            {"size": size, "order": order, "device": self.setup.device},
            size=size,
            timeout_seconds=_PROBE_SECONDS,
        )
        for ending in endings:
            if ending.how != "done":
                raise EnvironmentProblem(
                    f"expected to measure how {self.setup.backend} adds over {size} ranks, but "
                    f"rank {ending.rank} {ending.how}: {ending.error}\n{ending.detail}".rstrip()
                )
        return endings[0].result


class LaunchedJudge:
    """Judges as one process of a job that torchrun, or something like it, started.

    Every process of the job runs the same cases, and all come to the same results.

    Args:
        setup: What carries the collectives.
        target: As for `TeamJudge`.
        on_hang: Called on rank 0 with the result of a case that hangs; the processes end after it.
    """

    def __init__(
        self,
        setup: Setup,
        *,
        target: str = "",
        on_hang: Callable[[CaseResult], None] = lambda result: None,
    ) -> None:
        self._target = target
        importlib.import_module(_LATE)
        self._seat, self._processes = launched.join(setup.backend)
        self.setup = replace(setup, ranks_max=self._processes)
        self._pins = launched.pinned(setup.backend)
        self._order_probe = _Probe(setup=setup)
        self._number = 0
        self._scenario: Scenario | None = None
        self._started = 0.0
        self._on_hang = on_hang
        self._watchdog = launched.Watchdog(
            self._seat, world_size=self._processes, on_hang=self._report_hang
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is None:
            # Rank 0 may keep the store: it must not go before the others are through.
            self._seat.begin(self._number + 1)
            self._exchange(None, about="end")
        self._seat.leave()

    def __call__(self, scenario: Scenario) -> CaseResult:
        """Judge a case; the same result on every rank.

        Raises:
            EnvironmentProblem: A machine lacks something that the case needs.
        """
        self.setup.check(scenario)
        self._scenario, self._started = scenario, time.perf_counter()
        drift = self._order_probe.check(scenario, self._probe)
        result = _judge_after(drift, scenario, self.setup, judge=self._run)
        return replace(result, seconds=time.perf_counter() - self._started)

    def _run(self, scenario: Scenario) -> CaseResult:
        with self._watching(scenario.run.stall_seconds), _folder_for(scenario) as own:
            payload = payload_of(
                scenario,
                # Machines share the folder of rank 0, or can take no such case.
                folder=self._exchange(own, about="folder")[0],
                processes=self._processes,
                order=self.setup.order_of(scenario),
                target=self._target,
                device=self.setup.device,
            )
            told = self._exchange(judge_rank(payload, self._seat), about="report")
        reports = [Report.from_dict(each) for each in told]
        notes = [self.setup.note(scenario), *self._pins]
        return merge(scenario, reports, notes=notes, lost=())

    def _probe(self, size: int, order: str) -> list[str]:
        with self._watching(_PROBE_SECONDS):
            found = probe_order(
                {"size": size, "order": order, "device": self.setup.device}, self._seat
            )
            return self._exchange(found, about="probe")[0]

    def _watching(self, seconds: float) -> AbstractContextManager[None]:
        self._number += 1
        self._seat.begin(self._number)
        return self._watchdog.watching(self._number, seconds=seconds)

    def _exchange(self, what: Any, *, about: str) -> list[Any]:
        return self._seat.exchange(what, size=self._processes, about=f"all {about}")

    def _report_hang(self, stacks: Mapping[int, str], seconds: float) -> None:
        assert self._scenario is not None
        result = CaseResult(
            id=self._scenario.name,
            verdict="fail",
            seconds=time.perf_counter() - self._started,
            findings=(hung(stacks, stall_seconds=seconds),),
            notes=(self.setup.note(self._scenario), *self._pins),
        )
        self._on_hang(result)


assert set(OWN_ORDERS) == set(get_args(RealBackend))
