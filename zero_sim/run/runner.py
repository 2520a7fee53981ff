"""Judging: a backend runs the scenario, and its reports give the verdict."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Protocol
from weakref import WeakKeyDictionary

from zero_sim.backends.worlds import WorldPool
from zero_sim.findings.records import CaseResult
from zero_sim.host import supervisor
from zero_sim.run.report_point import Point, WithReportPoint, judge_at_report_point
from zero_sim.run.reports import CaseRun, result_of
from zero_sim.run.simulated import Simulated
from zero_sim.scenario.checks import Check
from zero_sim.scenario.spec import Scenario
from zero_sim.targets import Target, find_target, refusals
from zero_sim.targets.numerics import ReportedGrads

_POINTS: WeakKeyDictionary[WorldPool, list[tuple[Target, Point]]] = WeakKeyDictionary()
"""Inferred points by pool of worlds. A list of pairs, because targets may not be hashable."""


class Backend(Protocol):
    """Simulated or real ranks that run cases."""

    def run(self, scenario: Scenario) -> CaseRun:
        """Run a case on all its ranks; return the reports of their processes."""
        ...


def judge_case(
    scenario: Scenario, backend: Backend, *, keep_logs: bool = False, with_digest: bool = True
) -> CaseResult:
    """Run a case, and compare all state with the reference after every step.

    Args:
        scenario: A valid case.
        backend: Runs the case.
        keep_logs: True to return event logs even if the case passes.
        with_digest: True to return the event logs' digest.

    Returns:
        The verdict with its findings. A system that raises or hangs is a finding, not an exception.
        If the judge, the reference or a workload raises, the verdict is an error without a finding
        against the system.

    Raises:
        EnvironmentProblem: This machine lacks something that the case needs.
    """
    started = time.perf_counter()
    # If the process dies, the supervisor reports the case.
    supervisor.note(f"case {scenario.name}" if scenario.name else "a case")
    try:
        ran = backend.run(scenario)
        result = result_of(scenario, ran, with_digest=with_digest)
        if isinstance(backend, Simulated) and (step := _loss_step(result)) is not None:
            # A forward may have read stale params, so repeat the run and record its reads.
            ran = replace(backend, read_step=step).run(scenario)
            again = result_of(scenario, ran, with_digest=with_digest)
            # Keep the second run only if it explains the loss and has the same findings.
            result = again if _is_explained(result, again) else result
    finally:
        supervisor.count_case()
    # Logs are large, so keep them only if needed.
    logs = tuple(ran.logs) if keep_logs or result.verdict == "fail" else ()
    return replace(result, seconds=time.perf_counter() - started, logs=logs)


def _loss_step(result: CaseResult) -> int | None:
    """Return the first finding's step, if the finding is a loss."""
    first = next(iter(result.findings), None)
    return None if first is None or first.check != Check.EQUALITY_LOSS else first.step


def _is_explained(before: CaseResult, again: CaseResult) -> bool:
    """Return True if the second run has a new first finding, followed by the first run's."""
    known = [finding.identity for finding in again.findings[1:]]
    return bool(known) and before.findings[0].identity in known


def judge_simulated(
    scenario: Scenario, backend: Simulated, *, keep_logs: bool = False, with_digest: bool = True
) -> CaseResult:
    """Judge a case on simulated ranks; arguments, result and errors as for `judge_case`.

    If the backend's target does not declare the point at which it reports gradients, judge it with
    the point that fits.
    """
    target = backend.target
    if target is None:  # Registered targets declare their point.
        return _judge_layouts(scenario, backend, keep_logs=keep_logs, with_digest=with_digest)

    def judge(case: Scenario, point: ReportedGrads | None) -> CaseResult:
        at_point = replace(
            backend, target=target if point is None else WithReportPoint(target, point)
        )
        # Inference uses other, small cases, so recorded turns and shared steps do not apply.
        if case is not scenario:
            return judge_case(
                case, replace(at_point, turns=(), trajectories=None), with_digest=False
            )
        return _judge_layouts(scenario, at_point, keep_logs=keep_logs, with_digest=with_digest)

    known = _point_of(target, backend.worlds)
    return judge_at_report_point(scenario, judge=judge, find=lambda: target, known=known)


def _judge_layouts(
    scenario: Scenario, backend: Simulated, *, keep_logs: bool, with_digest: bool
) -> CaseResult:
    """Judge a case and its second layout, if any; arguments as for `judge_case`."""
    if scenario.pair is not None:
        # Imported here, because few cases need it.
        from zero_sim.run.layout_pair import record_layout
        from zero_sim.targets.recorded import Replayed

        # Explanations repeat steps by other rules, which the record does not have.
        backend = replace(backend, trajectories=None, explainer="")
        target = backend.target or find_target(scenario.system.target)
        if not refusals(target, scenario):

            def judge(other: Scenario, recording: Target) -> CaseResult:
                simulated = replace(backend, target=recording, turns=())
                return judge_case(other, simulated, with_digest=False)

            record, wrong = record_layout(scenario, target, judge=judge)
            if wrong is not None:
                return wrong
            backend = replace(backend, target=Replayed(target, record))
    return judge_case(scenario, backend, keep_logs=keep_logs, with_digest=with_digest)


def _point_of(target: Target, pool: WorldPool) -> Point:
    """Return a target's inferred point, if any, as a list to fill in."""
    points = _POINTS.setdefault(pool, [])
    # By identity, because targets need not define equality.
    known = next((point for each, point in points if each is target), None)
    if known is None:
        known = []
        points.append((target, known))
    return known
