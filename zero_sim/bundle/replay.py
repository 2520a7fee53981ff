"""Repeats the case of a bundle and says whether it still fails."""

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
"""`fixed`: nothing is wrong now; `failed`: something still is; `error`: that could not be found
out here."""

_INCONCLUSIVE_STATUS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """What came of a replay."""

    id: str
    outcome: Outcome
    result: CaseResult
    then: Finding
    """The first finding in the bundle."""
    same_events: bool | None
    """Whether every rank took the same turns and made the same calls; None of real processes, of
    which that is not known."""
    differences: tuple[str, ...]
    """How this environment differs from the bundle's, one line each."""
    exit_status: int

    @property
    def now(self) -> Finding | None:
        """The first finding of the replay."""
        return self.result.findings[0] if self.result.findings else None

    @property
    def same(self) -> bool:
        """Whether the first finding is the one in the bundle: check, step, rank and param."""
        return self.now is not None and self.now.identity == self.then.identity

    def as_dict(self) -> dict[str, object]:
        """Everything, ready for JSON."""
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
    """Run the case of a bundle again, under the turns that it recorded, if it did.

    Args:
        bundle: What to repeat.
        pool: Worlds to reuse.
        target: The system under test; without one, the registered target that the scenario names.
        device: Where it computes, in place of where the bundle says that it did.

    Raises:
        UsageError: The case is of a system that was imported, and none is given; or it ran on real
            processes, and something is given in place of what that was with.
    """
    ran = bundle.ran
    if target is None and ran.target:
        raise UsageError(
            f"expected --target {ran.target}, whose case this is, got none: what a bundle names "
            f"is not imported unasked. Try `zero-sim replay {bundle.id} --target {ran.target}`, "
            "if you trust that module."
        )
    if ran.backend != "sim" and (target is not None or device not in (None, ran.device)):
        raise UsageError(
            f"expected a case of backend {ran.backend} without --target and --device, which are "
            "for the simulated world, got one of them. Try `zero-sim run` with the bundle's "
            f"{CASE_FILE}."
        )
    device = device or ran.device
    started = time.perf_counter()
    outcome: Outcome
    same_events: bool | None = None if ran.backend != "sim" else False
    try:
        if ran.backend == "sim":
            result = _again(bundle, pool=pool, target=target, device=device)
            same_events = _digests(result.logs) == _digests(bundle.logs)
        else:
            with on_workers(own_setup(ran.backend), explainer=EXPLAINER) as judge:
                result = judge(bundle.scenario)
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
                # A run that could not have failed does not show that anything was fixed.
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
    return run_case(
        bundle.scenario, pool=pool, target=target, turns=turns, keep_logs=True, device=device
    )


def _digests(logs: Sequence[EventLog]) -> list[str]:
    """Of turns and calls; what came of planned faults is in no bundle, but follows from them."""
    return [log.digest(with_faults=False) for log in logs]
