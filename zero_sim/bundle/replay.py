"""Replay of a bundle: run its case again and report if it still fails."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from zero_sim.backends.worlds import WorldPool
from zero_sim.bundle.records import CASE_FILE, Bundle, current_environment
from zero_sim.errors import UsageError, ZeroSimError
from zero_sim.findings.records import CaseResult, Finding, not_judged
from zero_sim.host.device import check_device
from zero_sim.rules.judging import EXPLAINER, run_case
from zero_sim.run.real_judge import on_workers
from zero_sim.run.setup import own_setup
from zero_sim.sim import EventLog
from zero_sim.targets import Target

Outcome = Literal["fixed", "failed", "error"]
"""Outcome of a replay. `fixed`: the case passes; `failed`: it still fails; `error`: it could not be
judged here."""

_INCONCLUSIVE_STATUS = 3
# As for `zero-sim run`.


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """Result of a replay, compared with the bundle's first finding."""

    id: str
    outcome: Outcome
    result: CaseResult
    then: Finding
    """First finding in the bundle."""
    same_events: bool | None
    """True if all ranks had the same turns and calls; None for real processes, which record no
    events."""
    differences: tuple[str, ...]
    """Lines with differences between the bundle's environment and this environment."""
    exit_status: int

    @property
    def now(self) -> Finding | None:
        """First finding of the replay; None if there is none."""
        return self.result.findings[0] if self.result.findings else None

    @property
    def same(self) -> bool:
        """True if the first finding has the same check, step, rank and param as in the bundle."""
        return self.now is not None and self.now.identity == self.then.identity

    def as_dict(self) -> dict[str, object]:
        """Return all fields, ready for JSON."""
        return {
            "id": self.id,
            "outcome": self.outcome,
            "same": self.same,
            "same_events": self.same_events,
            "then": self.then.as_dict(),
            "now": None if self.now is None else self.now.as_dict(),
            "differences": list(self.differences),
            "result": self.result.as_dict(),
            "exit_status": self.exit_status,
        }


def replay_bundle(
    bundle: Bundle,
    *,
    pool: WorldPool | None = None,
    target: Target | None = None,
    device: str | None = None,
) -> Replayed:
    """Run a bundle's case again, with its recorded turns if it has any.

    Args:
        bundle: The bundle to replay.
        pool: Worlds to reuse.
        target: The system under test; None for the registered target that the scenario names.
        device: Device to compute on; None for the bundle's device.

    Raises:
        UsageError: The bundle names an imported target, but `target` is None; or the case ran on
            real processes, but `target` or another device is given.
    """
    ran = bundle.ran
    if target is None and ran.target:
        raise UsageError(
            # An import executes code, so an untrusted bundle must not decide it.
            f"expected --target {ran.target}, because the case needs this target, got none. "
            f"If you trust its module, run `zero-sim replay {bundle.id} --target {ran.target}`: "
            "names in a bundle are not imported by themselves."
        )
    if ran.backend != "sim" and (target is not None or device not in (None, ran.device)):
        raise UsageError(
            f"expected no --target or --device for a case on {ran.backend}, because both need the "
            "simulated world, got one of them. Use `zero-sim run` with the bundle's "
            f"{CASE_FILE}."
        )
    device = device or ran.device
    started = time.perf_counter()
    outcome: Outcome
    # Real processes record no events to compare.
    same_events: bool | None = None if ran.backend != "sim" else False
    try:
        if ran.backend == "sim":
            result = _again(bundle, pool=pool, target=target, device=device)
            same_events = _digests(result.logs) == _digests(bundle.logs)
        else:
            with on_workers(own_setup(ran.backend), explainer=EXPLAINER) as judge:
                result = judge(bundle.scenario)
    # Return a result, not an exception, so that JSON shows the error next to the bundle's finding.
    except ZeroSimError as error:
        seconds = time.perf_counter() - started
        result = not_judged(bundle.scenario.name, str(error), seconds=seconds)
        outcome, status = "error", error.exit_status
    else:
        match result.verdict:
            case "pass":
                outcome, status = "fixed", 0
            case "fail":
                outcome, status = "failed", 1
            case "inconclusive":
                # An inconclusive run cannot fail, so it proves no fix.
                outcome, status = "error", _INCONCLUSIVE_STATUS
            case "error":
                outcome, status = "error", UsageError.exit_status
    return Replayed(
        id=bundle.id,
        outcome=outcome,
        result=result,
        then=bundle.findings[0],
        same_events=same_events,
        differences=tuple(bundle.environment.differences(current_environment(device))),
        exit_status=status,
    )


def _again(
    bundle: Bundle, *, pool: WorldPool | None, target: Target | None, device: str
) -> CaseResult:
    check_device(device)
    turns = [log.turns for log in bundle.logs]
    # The turns fix the schedule. Keep the logs to compare their digests.
    return run_case(
        bundle.scenario, pool=pool, target=target, turns=turns, keep_logs=True, device=device
    )


def _digests(logs: Sequence[EventLog]) -> list[str]:
    """Hash turns and calls, but not results of planned faults, which bundles do not contain."""
    return [log.digest(with_faults=False) for log in logs]
