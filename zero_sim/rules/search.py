"""Search for rules under which cases pass, led by proposals in findings.

If only params are observed, a case can differ without a proposal, because an earlier step was wrong
and did not show it. Then sum rules are tried in order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zero_sim.backends.worlds import WorldPool
from zero_sim.errors import EnvironmentProblem, UsageError
from zero_sim.findings.records import CaseResult, Finding
from zero_sim.reference import CLIP_FORMS, DIVIDE_RULES, NORMS
from zero_sim.rules.declared import WithNumerics, declared_by, in_words, with_change
from zero_sim.rules.judging import run_case
from zero_sim.run.refused_sizes import refused_size
from zero_sim.scenario.checks import Check
from zero_sim.scenario.spec import OptimizerSpec, Scenario
from zero_sim.targets import Numerics, Target, class_of

# Most successive changes.
_DEPTH = 8
# Most declarations to try on a set of cases.
_TRIED_MAX = 80
# Checks of updates.
_OF_UPDATES = (Check.EQUALITY_STATE, Check.EQUALITY_MASTER)
# Largest difference from torch's update that messages call a rounding, in ulp.
_ROUNDING_ULP = 64
_OF_GRADS = (Check.EQUALITY_GRAD, Check.EQUALITY_STATE, Check.EQUALITY_MASTER)
_REPORT_FORMS: Sequence[Mapping[str, Any]] = (
    {"reported_grads": "after-division"},
    {"reported_dtype": "fp32"},
    {"reported_grads": "after-division", "reported_dtype": "fp32"},
    {"reported_grads": "after-clip"},
    {"reported_dtype": "param"},
    {"reported_grads": "after-division", "reported_dtype": "param"},
)
"""Forms in which a gradient may be reported, tried if nothing else is known."""
_SUM_RULES: Sequence[Mapping[str, Any]] = (
    *({"divide": rule} for rule in DIVIDE_RULES),
    {"divide_by": "ranks"},
    {"divide_by": "micro-batches"},
    {"divide_by": "tokens"},
    {"sync": "last"},
    {"sync": "every"},
    {"sync": "every", "divide_each": "round"},
    {"grad_dtype": "param"},
    {"grad_dtype": "fp32"},
    {"accumulate_dtype": "fp32", "reduce_dtype": "param"},
    {"accumulate_dtype": "param", "reduce_dtype": "fp32"},
)
"""Rules for gradient sums, tried if only updates are observed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """Differences under a wrong declaration."""

    candidate: Mapping[str, Any]
    case: str
    passed: int
    """Number of earlier cases, which passed under the same declaration."""
    finding: Finding
    differ_count: int
    """Number of differing elements in all findings."""

    @property
    def nearness(self) -> tuple[int, int, int]:
        """Sort key; larger is nearer to the system's rules."""
        # More cases passed, then a later step, then fewer elements.
        return self.passed, self.finding.step or 0, -self.differ_count

    def shortly(self) -> str:
        """Return the difference and its case."""
        return f"{self.finding.check}: {self.finding.message}, in case {self.case!r}"

    def in_words(self) -> str:
        """Return a clause for readers who must decide if the system or a declaration is wrong."""
        first = self.finding
        rank = "" if first.rank is None else f", rank {first.rank}"
        step = "" if first.step is None else f", step {first.step}{rank}"
        param = "" if first.param is None else f", param {first.param!r}"
        many = "" if first.differ_count is None else f", {first.differ_count} elements"
        of = "" if first.compared_count is None or not many else f" of {first.compared_count}"
        return (
            f"the nearest, Numerics({in_words(self.candidate, empty='')}), differs in case "
            f"{self.case!r}: {first.check}: {first.message}{step}{param}{many}{of}"
        )

    def as_rounding(self, spec: OptimizerSpec) -> str:
        """Return the difference and a remedy if only updates differ, slightly; '' otherwise."""
        first = self.finding
        # A larger difference may come from a gradient that is not divided as reported.
        if first.check not in _OF_UPDATES or first.ulp is None or first.ulp > _ROUNDING_ULP:
            return ""
        return (
            f"an update that differs from torch's {class_of(spec).__name__}, first by {first.ulp} "
            f"ulp: {first.message}, although no gradient differs by "
            f"Numerics({in_words(self.candidate, empty='')}). If this rounding is intended, "
            "declare `reference_optimizer` or `reference_step`."
        )


@dataclass(slots=True)
class _Tried:
    """State of a search through declarations."""

    sums: bool
    always_guesses: bool
    candidates: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class RuleSearch:
    """A target's rules as far as known, and the deciding cases."""

    target: Target
    pool: WorldPool
    numerics: dict[str, Any] = field(default_factory=dict)
    """`Numerics` fields under which all cases in `passed` pass."""
    passed: list[Scenario] = field(default_factory=list)
    """Deciding cases."""
    cases: int = 0
    """Number of cases run."""
    limited: dict[Scenario, str] = field(default_factory=dict)
    """Cases refused because of their sizes, with the system's reason."""
    why: str = ""
    """First problem in the current `settle`."""
    nearest: Failed | None = None
    """Differences under the nearest declaration in the current `settle`."""
    _grads_differed: bool = False

    def judge(self, case: Scenario, candidate: Mapping[str, Any] | None = None) -> CaseResult | str:
        """Return a case's result under some rules, or the reason why there is none.

        `candidate` has fields of `Numerics`; None for the rules found so far.
        """
        self.cases += 1
        try:
            # Declared explicitly, because the search tries the other forms.
            rules: dict[str, Any] = {"reported_grads": "before-division"}
            rules |= self.numerics if candidate is None else candidate
            with_rules = WithNumerics(self.target, Numerics(**rules))
            result = run_case(case, pool=self.pool, target=with_rules)
        except (UsageError, EnvironmentProblem) as error:
            # The first problem is enough.
            return " ".join(line.strip() for line in str(error).splitlines()[:2])
        if result.verdict == "error":
            return (result.error or "the case could not be judged").splitlines()[0]
        if limit := refused_size(result):
            self.limited[case] = limit
            return limit
        return result

    def settle(self, *cases: Scenario, sums: bool = False) -> str:
        """Find rules under which cases pass; return the problem if there are none.

        Args:
            cases: Cases to pass, simplest first. Cases with refused sizes are omitted.
            sums: True to try sum rules if a param differs without a proposal.
        """
        self.why, self.nearest, self._grads_differed = "", None, False
        # The second attempt guesses report forms even if findings have proposals.
        for always_guesses in (False, True):
            tried = _Tried(sums=sums, always_guesses=always_guesses)
            candidate = self._fitting(cases, dict(self.numerics), tried=tried, depth=_DEPTH)
            passed = [case for case in cases if case not in self.limited]
            if candidate is not None and passed:
                self.numerics = candidate
                self.passed.extend(passed)
                return ""
            if not self._grads_differed:
                break
        return self.why or "no rule fits all cases"

    def _fitting(
        self,
        cases: Sequence[Scenario],
        candidate: dict[str, Any],
        *,
        tried: _Tried,
        depth: int,
        may_guess: bool = True,
    ) -> dict[str, Any] | None:
        """Return a declaration under which all cases pass, led by findings; None without one."""
        # A depth-first search. Declarations already tried are not repeated.
        tried.candidates.append(candidate)
        for passed, case in enumerate(cases):
            if case in self.limited:
                continue
            result = self.judge(case, candidate)
            if isinstance(result, str):
                self.why = self.why or result
                # Refused sizes are omitted; any other problem ends this path.
                if case in self.limited:
                    continue
                return None
            if result.verdict != "fail":
                continue
            self._note(result, candidate, case=case, passed=passed)
            changes, guessed = self._changes(result, tried=tried, may_guess=may_guess)
            if case.optimizer.clip_norm is not None:
                changes = (*changes, *_clipped_otherwise(result, candidate))
            for change in changes if depth else ():
                changed_to = with_change(candidate, change)
                if changed_to in tried.candidates or len(tried.candidates) >= _TRIED_MAX:
                    continue
                found = self._fitting(
                    # The failing case first, because it decides.
                    [case, *(each for each in cases if each is not case)],
                    changed_to,
                    tried=tried,
                    depth=depth - 1,
                    may_guess=may_guess and not guessed,
                )
                if found is not None:
                    return found
            return None
        return candidate

    def _changes(
        self, result: CaseResult, *, tried: _Tried, may_guess: bool
    ) -> tuple[Sequence[Mapping[str, Any]], bool]:
        """Return changes to try after a failure, and True if some are guessed.

        Report forms are guessed if no finding has a proposal. With `always_guesses` they are always
        guessed, because a proposal may fit a single case by accident.
        """
        check, named = result.findings[0].check, declared_by(result)
        # "No division" fits many cases by accident, especially with one rank.
        changes = sorted(named, key=lambda change: change.get("divide") == "none")
        if check in _OF_GRADS and may_guess and (tried.always_guesses or not changes):
            # No single change fits if a differing gradient is also reported in another form, or if
            # it is not reported and only its update differs.
            return (*changes, *_REPORT_FORMS), True
        if check is Check.EQUALITY_PARAMS and may_guess and tried.sums and not changes:
            return _SUM_RULES, True
        if check is Check.EQUALITY_NORM:
            # Any norm form can be judged by the reported norm.
            return (*changes, {"norm": "reported"}), False
        return changes, False

    def _note(
        self, result: CaseResult, candidate: Mapping[str, Any], *, case: Scenario, passed: int
    ) -> None:
        first = result.findings[0]
        self.why = self.why or f"{first.check}: {first.message}"
        self._grads_differed = self._grads_differed or first.check in _OF_GRADS
        failed = Failed(
            candidate=candidate,
            case=case.name,
            passed=passed,
            finding=first,
            differ_count=sum(each.differ_count or 0 for each in result.findings),
        )
        # Keep the best attempt, for messages.
        if self.nearest is None or failed.nearness > self.nearest.nearness:
            self.nearest = failed


def _clipped_otherwise(
    result: CaseResult, candidate: Mapping[str, Any]
) -> Iterator[Mapping[str, Any]]:
    """Yield other norm or clip rules if the first difference is in a clipped gradient."""
    if result.findings[0].check is not Check.EQUALITY_GRAD:
        return
    # Other points of the step come before clipping, so neither rule changes them.
    if candidate.get("reported_grads") != "after-clip":
        return
    # The clip coefficient follows from the norm, so the norm is found first.
    if any(finding.check is Check.EQUALITY_NORM for finding in result.findings):
        yield from ({"norm": norm} for norm in NORMS)
    else:
        yield from ({"clip": form} for form in CLIP_FORMS)
