"""Search for rules by which cases pass, from one declaration to the next by what findings say.

Where only params are shown, a case can differ without a name for what would fit: the step before it
was wrong already, and did not show it. There the rules of a sum are tried one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from zero_sim.backends.worlds import WorldPool
from zero_sim.errors import EnvironmentProblem, UsageError
from zero_sim.findings.records import CaseResult, Finding
from zero_sim.reference import DIVIDE_RULES
from zero_sim.rules.declared import Asked, declared_by, in_words, with_change
from zero_sim.rules.judging import run_case
from zero_sim.run.refused_sizes import refused_size
from zero_sim.scenario.checks import Check
from zero_sim.scenario.spec import OptimizerSpec, Scenario
from zero_sim.targets import Numerics, Target, class_of

_DEPTH = 8
"""Most rules that are changed one after the other."""
_TRIED_MAX = 80
"""Most declarations that are tried on some cases."""
_OF_UPDATES = (Check.EQUALITY_STATE, Check.EQUALITY_MASTER)
_ROUNDING_ULP = 64
"""An update this near torch's is called another rounding, in words alone."""
_OF_GRADS = (Check.EQUALITY_GRAD, Check.EQUALITY_STATE, Check.EQUALITY_MASTER)
_TOLD: Sequence[Mapping[str, Any]] = (
    {"grads_told": "after-division"},
    {"told_dtype": "fp32"},
    {"grads_told": "after-division", "told_dtype": "fp32"},
    {"grads_told": "after-clip"},
    {"told_dtype": "param"},
    {"grads_told": "after-division", "told_dtype": "param"},
)
"""Ways of telling a gradient, tried where nothing else is known."""
_SUMMED: Sequence[Mapping[str, Any]] = (
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
"""Ways of summing gradients, tried where only what was stepped by them is shown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """What differs by a declaration that does not fit."""

    said: Mapping[str, Any]
    case: str
    passed: int
    """Cases that passed before by the same declaration."""
    finding: Finding
    differ_count: int
    """Elements that differ in all findings."""

    @property
    def nearness(self) -> tuple[int, int, int]:
        """How near it came to what the system has; more is nearer."""
        return self.passed, self.finding.step or 0, -self.differ_count

    def shortly(self) -> str:
        """What differs and in which case."""
        return f"{self.finding.check}: {self.finding.message}, in case {self.case!r}"

    def in_words(self) -> str:
        """A clause for whoever has to find out which of the two is wrong."""
        first = self.finding
        rank = "" if first.rank is None else f", rank {first.rank}"
        step = "" if first.step is None else f", step {first.step}{rank}"
        param = "" if first.param is None else f", param {first.param!r}"
        many = "" if first.differ_count is None else f", {first.differ_count} elements"
        of = "" if first.compared_count is None or not many else f" of {first.compared_count}"
        return (
            f"by the nearest of them, Numerics({in_words(self.said, empty='')}), case "
            f"{self.case!r} has {first.check}: {first.message}{step}{param}{many}{of}"
        )

    def as_rounding(self, spec: OptimizerSpec) -> str:
        """Return what differs and a remedy, if updates alone differ, by little; '' otherwise.

        Args:
            spec: The optimizer of the case.
        """
        first = self.finding
        # Farther apart, it may as well be a gradient that is divided otherwise than is reported.
        if first.check not in _OF_UPDATES or first.ulp is None or first.ulp > _ROUNDING_ULP:
            return ""
        return (
            f"an update that differs from torch's {class_of(spec).__name__}, first by {first.ulp} "
            f"ulp: {first.message}, and no gradient does by "
            f"Numerics({in_words(self.said, empty='')}). If this rounding is intended, declare "
            "`reference_optimizer` or `reference_step`."
        )


@dataclass(slots=True)
class _Tried:
    """What one way through declarations has come to."""

    sums: bool
    told_always: bool
    said: list[dict[str, Any]] = field(default_factory=list)


@dataclass(slots=True)
class RuleSearch:
    """Rules of a target as far as they are known, and the cases that decided them."""

    target: Target
    pool: WorldPool
    numerics: dict[str, Any] = field(default_factory=dict)
    """Fields of `Numerics` by which all cases of `passed` pass."""
    passed: list[Scenario] = field(default_factory=list)
    """Cases that rules decide."""
    cases: int = 0
    """How many were run."""
    limited: dict[Scenario, str] = field(default_factory=dict)
    """Cases that the system refuses by a check of its own, and which one."""
    why: str = ""
    """What came first of the cases that are being settled."""
    nearest: Failed | None = None
    """What came of the declaration that came nearest to them."""
    _grads_differed: bool = False

    def judge(self, case: Scenario, said: Mapping[str, Any] | None = None) -> CaseResult | str:
        """The result of a case by some rules; in words why there is none.

        Args:
            case: Any case.
            said: Fields of `Numerics`; those that were found if None.
        """
        self.cases += 1
        try:
            # Declared, because this search tries the others.
            rules: dict[str, Any] = {"grads_told": "before-division"}
            rules |= self.numerics if said is None else said
            asked = Asked(self.target, Numerics(**rules))
            result = run_case(case, pool=self.pool, target=asked)
        except (UsageError, EnvironmentProblem) as error:
            # Of several problems the first.
            return " ".join(line.strip() for line in str(error).splitlines()[:2])
        if result.verdict == "error":
            return (result.error or "it could not be judged").splitlines()[0]
        if limit := refused_size(result):
            self.limited[case] = limit
            return limit
        return result

    def settle(self, *cases: Scenario, sums: bool = False) -> str:
        """Find rules that make cases pass; in words what is wrong where none does.

        Args:
            cases: What has to pass, the plainest first; those whose sizes the system refuses are
                left out.
            sums: Whether ways of summing are tried where a param differs and nothing says why.
        """
        self.why, self.nearest, self._grads_differed = "", None, False
        for told_always in (False, True):
            tried = _Tried(sums=sums, told_always=told_always)
            said = self._fitting(cases, dict(self.numerics), tried=tried, depth=_DEPTH)
            passed = [case for case in cases if case not in self.limited]
            if said is not None and passed:
                self.numerics = said
                self.passed.extend(passed)
                return ""
            if not self._grads_differed:
                break
        return self.why or "no rule fits all of it"

    def _fitting(
        self,
        cases: Sequence[Scenario],
        said: dict[str, Any],
        *,
        tried: _Tried,
        depth: int,
        may_guess: bool = True,
    ) -> dict[str, Any] | None:
        """A declaration with which all cases pass, from one by what findings say; or None."""
        tried.said.append(said)
        for passed, case in enumerate(cases):
            if case in self.limited:
                continue
            result = self.judge(case, said)
            if isinstance(result, str):
                self.why = self.why or result
                if case in self.limited:
                    continue
                return None
            if result.verdict != "fail":
                continue
            self._note(result, said, case=case, passed=passed)
            changes, guessed = self._changes(result, tried=tried, may_guess=may_guess)
            for change in changes if depth else ():
                changed_to = with_change(said, change)
                if changed_to in tried.said or len(tried.said) >= _TRIED_MAX:
                    continue
                found = self._fitting(
                    # What fails is tried first again.
                    [case, *(each for each in cases if each is not case)],
                    changed_to,
                    tried=tried,
                    depth=depth - 1,
                    may_guess=may_guess and not guessed,
                )
                if found is not None:
                    return found
            return None
        return said

    def _changes(
        self, result: CaseResult, *, tried: _Tried, may_guess: bool
    ) -> tuple[Sequence[Mapping[str, Any]], bool]:
        """What could be declared in place of what fails, and whether some of it is guessed.

        Ways of telling a gradient are guessed where no finding says what would fit, or always:
        what fits one case by itself may fit it by accident.
        """
        check, named = result.findings[0].check, declared_by(result)
        # Where nothing is divided fits many a case by accident, with one rank above all.
        changes = sorted(named, key=lambda change: change.get("divide") == "none")
        if check in _OF_GRADS and may_guess and (tried.told_always or not changes):
            # Where it is told in another way and is another one, too, nothing fits by itself,
            # nor where it is not told and only what was stepped by it differs.
            return (*changes, *_TOLD), True
        if check is Check.EQUALITY_PARAMS and may_guess and tried.sums and not changes:
            return _SUMMED, True
        if check is Check.EQUALITY_NORM:
            # Whatever its form, what clips by it can be judged by what is told.
            return (*changes, {"norm": "told"}), False
        return changes, False

    def _note(
        self, result: CaseResult, said: Mapping[str, Any], *, case: Scenario, passed: int
    ) -> None:
        first = result.findings[0]
        self.why = self.why or f"{first.check}: {first.message}"
        self._grads_differed = self._grads_differed or first.check in _OF_GRADS
        failed = Failed(
            said=said,
            case=case.name,
            passed=passed,
            finding=first,
            differ_count=sum(each.differ_count or 0 for each in result.findings),
        )
        if self.nearest is None or failed.nearness > self.nearest.nearness:
            self.nearest = failed
