"""A single test that judges a target on drawn scenarios, and shrinks and shows a failure."""

from __future__ import annotations

import secrets
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import islice
from typing import Any

from hypothesis import settings

from zero_sim.backends.worlds import WorldPool
from zero_sim.errors import UsageError
from zero_sim.findings.records import CaseResult
from zero_sim.fuzz.drawing import draws
from zero_sim.fuzz.excluded import why_none_fits
from zero_sim.fuzz.strategies import drawn_cases
from zero_sim.report.text import count_verdicts, render_case, render_reduced
from zero_sim.rules.cases import clip_cases, telling_cases
from zero_sim.rules.declared import Asked, declared_by, with_change, without_advice
from zero_sim.rules.explainer import SEES_FACTORS
from zero_sim.rules.judging import run_case
from zero_sim.run.sgd_twin import TWIN_EVERY, marked, with_twin
from zero_sim.run.small_cases import BASE, changed
from zero_sim.scenario.dump import to_chosen_toml
from zero_sim.scenario.spec import OptimizerSpec, Scenario, SystemSpec
from zero_sim.shrink import (
    BEYOND_VALUES,
    Limits,
    how_far_apart,
    key_of,
    may_shrink,
    right_judge,
    shrink_finding,
)
from zero_sim.targets import (
    Numerics,
    Target,
    check_target,
    import_target,
    library_target_names,
    name_of,
    numerics_of,
    refusals,
    target_names,
)
from zero_sim.targets.adapt import PARTS
from zero_sim.untrusted import printable

PLAIN = Numerics()
SHRINK_SECONDS = 60.0
_FILE = "case.toml"
PROPERTIES = "zero_sim_properties"
"""Attribute of a test function: its properties after a pass. The pytest plugin reads it."""
Judge = Callable[[Scenario], CaseResult]


class NotConformant(AssertionError):
    """A target is wrong: the message has the finding and the smallest failing case."""

    def __init__(self, text: str, *, scenario: Scenario) -> None:
        self.scenario = scenario
        super().__init__(text)


def conformance(
    target: Target | str,
    *,
    cases: int = 50,
    seed: int | None = 0,
    world_size_max: int = 6,
    steps_max: int = 3,
    shrink_seconds: float = SHRINK_SECONDS,
) -> Callable[[], None]:
    """Return a test of a target over drawn scenarios, for pytest or any other runner.

        test_mine = conformance(MyTarget())

    Every case runs on a simulated world. After every step all values that the target reports are
    compared, bit for bit, with a reference on one device. Among the failing cases, the one with the
    largest difference is shrunk like `zero-sim shrink` does it, as long as the finding stays the
    same: smaller differences may be mere rounding. A finding without a difference of values, such
    as a deadlock, ends the search at once.

    Args:
        target: The target, its registered name, or `module:name`.
        cases: Number of cases, drawn within the target's capabilities.
        seed: Seed of the cases, so that every run draws the same; None for new cases each time,
            unless the Hypothesis profile has `derandomize`.
        world_size_max: Largest number of ranks of a case.
        steps_max: Largest number of optimizer steps of a case.
        shrink_seconds: Time limit of shrinking, for slow targets; 0 shows the first failing case
            unchanged. Two runs can show different cases only if this limit ends the search, and the
            message then contains that.

    Returns:
        A function without arguments. It raises `NotConformant` with the findings of the smallest
        failing case and that case as TOML, or AssertionError if no case proved anything. If it
        passes, it prints its cases by verdict and the passes by params only. With pytest these are
        also properties of the test, `zero_sim.scope` and `zero_sim.verdicts`.

    Raises:
        UsageError: If there is no target of that name, or the object is no target.
    """
    # Import or check at once, so that a wrong name fails at collection.
    if isinstance(target, str):
        judged = import_target(target)
    else:
        judged = check_target(target, of="conformance")

    def test_conformance() -> None:
        __tracebackhide__ = True
        # A test object may run again; properties of an earlier pass must not stay.
        vars(test_conformance).pop(PROPERTIES, None)
        failed: NotConformant | None = None
        with WorldPool() as pool:
            judge = partial(run_case, pool=pool, target=judged)
            drawn = drawn_cases(judged, ranks_max=world_size_max, steps_max=steps_max)
            scenarios = islice(draws(drawn, seed=_series(seed)), cases)
            results = _judge_all(scenarios, judge, target=judged)
            if results.worst is not None:
                limits = Limits(seconds=shrink_seconds)
                name = target if isinstance(target, str) else name_of(judged)
                subject = _Subject(target=judged, name=name, judge=judge, pool=pool, limits=limits)
                failed = _shrunk(*results.worst, subject, heading=results.heading())
        if failed is not None:
            raise failed
        _require_pass(results.verdicts, judged, cases=cases)
        vars(test_conformance)[PROPERTIES] = properties = results.properties()
        # pytest captures it and prints it with -rA.
        print(printable(f"conformance of {judged.name}: {properties['verdicts']}"))  # noqa: T201

    test_conformance.__doc__ = f"{judged.name} equals the reference, bit for bit."
    return test_conformance


def _series(seed: int | None) -> str:
    """Return the seed as text; a random one if None, unless Hypothesis must be deterministic."""
    if seed is None and not settings().derandomize:
        seed = secrets.randbits(64)
    return str(seed or 0)


@dataclass(kw_only=True, slots=True)
class _Results:
    """Collected results of cases."""

    verdicts: Counter[str] = field(default_factory=Counter)
    params_only: int = 0
    """Number of passes without a compared averaged gradient or optimizer state."""
    worst: tuple[Scenario, CaseResult] | None = None
    """The failing case whose values differ most, with its result."""
    # Below any difference, so that the first failing case is taken.
    apart: float = -1.0
    """Relative difference of the worst case; see `how_far_apart`."""
    manners: dict[str, Counter[str]] = field(default_factory=dict)
    """Number of cases by manner of the difference, for each check."""

    def add(self, scenario: Scenario, result: CaseResult) -> None:
        """Add the result of a case."""
        self.verdicts[result.verdict] += 1
        self.params_only += result.passes_by_params_only
        if result.verdict in ("pass", "inconclusive"):
            return
        # Only the worst case is kept, because results contain tensors.
        if (apart := how_far_apart(result)) > self.apart:
            self.worst, self.apart = (scenario, result), apart
        key = key_of(result)
        if key is not None:
            manner = key.manner if result.findings[:1] and result.findings[0].manner else ""
            self.manners.setdefault(key.check, Counter())[manner] += 1

    def properties(self) -> dict[str, str]:
        """Return the test properties for these results."""
        return {
            "scope": "params-only" if self.params_only else "full",
            "verdicts": count_verdicts(self.verdicts, params_only=self.params_only),
        }

    def heading(self) -> str:
        """Return the number of failing cases by check and manner; empty for a single failure."""
        # For one failure, the finding itself has all of this.
        if sum(manners.total() for manners in self.manners.values()) < 2:
            return ""
        lines = []
        for check, manners in self.manners.items():
            how = ", ".join(
                f"{manner} {count}" for manner, count in manners.most_common() if manner
            )
            lines.append(
                f"{check}: {manners.total()} of {self.verdicts.total()} cases{how and f' ({how})'}"
            )
        return "\n".join([*lines, "The case with the largest difference, shrunk:", "", ""])


def _require_pass(verdicts: Counter[str], target: Target, *, cases: int) -> None:
    __tracebackhide__ = True
    # The target's capabilities allowed no case at all.
    if not verdicts and cases:
        raise AssertionError(f"{why_none_fits(target)}.")
    if not verdicts["pass"]:
        raise AssertionError(
            f"expected target {target.name!r} to pass in some of {cases} cases, got "
            f"{verdicts['inconclusive']} inconclusive ones, which prove nothing. Try more cases."
        )


def _judge_all(scenarios: Iterable[Scenario], judge: Judge, *, target: Target) -> _Results:
    """Judge cases, up to the first finding that is no difference of values."""
    results = _Results()
    for index, scenario in enumerate(scenarios):
        result = judge(scenario)
        # Some passes by params only are repeated with SGD, which shows if gradients were averaged.
        if index % TWIN_EVERY == 0:
            result = with_twin(result, scenario, judge=judge, find=lambda: target)
        results.add(result.twin or scenario, result)
        # No difference exceeds this one, so no later case could replace it.
        if results.apart >= BEYOND_VALUES:
            break
    return results


@dataclass(frozen=True, kw_only=True, slots=True)
class _Subject:
    """Subject of the test."""

    target: Target
    name: str
    """Importable name; empty if there is none."""
    judge: Judge
    pool: WorldPool
    limits: Limits


def _shrunk(
    scenario: Scenario, result: CaseResult, subject: _Subject, *, heading: str
) -> NotConformant:
    """Shrink a failing case; a case that could not be judged is shown unchanged."""
    key = key_of(result)
    if key is None or result.verdict == "error" or not may_shrink(key):
        return _failure(scenario, subject, f"{render_case(result)}\n\nThe case")
    reduced, result = shrink_finding(
        scenario,
        result,
        judge=subject.judge,
        may_ask=lambda other: not refusals(subject.target, other),
        limits=subject.limits,
        # A case that our own system fails as well may be too small, not the target wrong.
        right=right_judge(subject.target, pool=subject.pool),
    )
    result = marked(result, scenario)
    explanation = _explain_rules(reduced.scenario, result, subject)
    text = (
        f"{heading}{render_case(without_advice(result))}\n{render_reduced(reduced)}\n\n{explanation}\n\n"
        "The smallest case that was found"
    )
    return _failure(reduced.scenario, subject, text)


def _explain_rules(scenario: Scenario, result: CaseResult, subject: _Subject) -> str:
    """Return the omitted quantities, the declared rules, and a proposed declaration."""
    declared = {
        each.name: getattr(numerics_of(subject.target, scenario), each.name)
        for each in fields(Numerics)
    }
    # Only non-default rules, in the form in which they are declared.
    other = {name: value for name, value in declared.items() if value != getattr(PLAIN, name)}
    rules = ", ".join(f"{name}={value!r}" for name, value in other.items())
    silent = ", ".join(result.unobserved)
    lines = [
        f"Not compared, because the target does not report it: {silent}"
        if silent
        else "Everything that a target can report was compared.",
        f"Assumed rules: Numerics({rules})"
        + ("" if rules else ", because none is declared, and those of the case"),
    ]
    lines.append(_proposal(scenario, result, subject, other=other))
    return "\n".join(lines)


def _proposal(
    scenario: Scenario, result: CaseResult, subject: _Subject, *, other: Mapping[str, Any]
) -> str:
    """Propose at most one declaration with which this case and other cases pass."""
    distinguishing = _distinguishing_cases(scenario, result, subject)
    candidates = declared_by(result)
    for change in candidates if distinguishing else ():
        # A rule may fit one case by chance, so it must also pass cases that distinguish rules.
        now, cases = with_change(other, change), [scenario, *distinguishing]
        if "norm" in change or "clip" in change:
            # The judged case may not clip, so check rules of the norm with cases that do.
            cases += _clipping_cases(scenario, subject)
        if _all_pass(cases, now, subject):
            words = ", ".join(f"{name}={value!r}" for name, value in now.items())
            return (
                f"If this is intended, declare Numerics({words}): with it, this case passes and "
                f"so do {len(cases) - 1} others that distinguish rules."
            )
    if not candidates:
        return "No other known rule makes it pass."
    if distinguishing:
        return "No rule is proposed: rules that fit this case do not fit others of several ranks."
    return (
        "No rule is proposed: the target supports no case that distinguishes rules, with several "
        "ranks and with sgd or reported optimizer state."
    )


def _distinguishing_cases(
    scenario: Scenario, result: CaseResult, subject: _Subject
) -> list[Scenario]:
    """Return the supported cases that distinguish rules, with the first suitable optimizer."""
    optimizers = [OptimizerSpec(name=name) for name in SEES_FACTORS]
    if PARTS not in result.unobserved:
        # Observed state shows factors that the params of Adam hide.
        optimizers.append(scenario.optimizer)
    for optimizer in optimizers:
        cases = telling_cases(scenario, optimizer=replace(optimizer, lr=0.1))
        if taken := [case for case in cases if not refusals(subject.target, case)]:
            # Most candidates fail with several micro-batches, so those cases come first.
            return sorted(taken, key=lambda case: -case.run.micro_batches)
    return []


def _clipping_cases(scenario: Scenario, subject: _Subject) -> list[Scenario]:
    base = changed(
        BASE, model={"dtype": scenario.model.dtype}, system={"stage": scenario.system.stage}
    )
    return [case for case in clip_cases(base) if not refusals(subject.target, case)]


def _all_pass(cases: Sequence[Scenario], numerics: Mapping[str, Any], subject: _Subject) -> bool:
    try:
        target = Asked(subject.target, Numerics(**numerics))
    except UsageError:
        return False  # These rules exclude each other.
    return all(run_case(case, pool=subject.pool, target=target).verdict == "pass" for case in cases)


def _failure(scenario: Scenario, subject: _Subject, text: str) -> NotConformant:
    """Return the failure with the case as TOML and the command that repeats it."""
    registered = (*target_names(), *library_target_names())
    if subject.name not in registered:
        # A file can only name a registered target; for others the command names the target.
        system = replace(scenario.system, target=SystemSpec().target)
        scenario = replace(scenario, system=system)
    named = [] if subject.name in registered else ["--target", subject.name or "MODULE:NAME"]
    command = shlex.join(["zero-sim", "run", _FILE, *named])
    where = "" if subject.name else ", with the importable name of this target"
    return NotConformant(
        f"{text}, as a scenario file:\n\n{to_chosen_toml(scenario)}\n"
        f"Saved as {_FILE}, this repeats it{where}:\n\n    {command}\n",
        scenario=scenario,
    )
