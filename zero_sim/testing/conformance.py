"""A test that judges a target on drawn scenarios, and shrinks and reports a failure."""

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
from zero_sim.rules.cases import clip_cases, revealing_cases
from zero_sim.rules.declared import WithNumerics, declared_by, with_change, without_advice
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
"""Attribute of a passed test function that contains its properties, for the pytest plugin."""
Judge = Callable[[Scenario], CaseResult]


class NotConformant(AssertionError):
    """A target is wrong. The message contains the finding and the smallest failing case."""

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
    """Return a test that judges a target on drawn scenarios, for pytest or any other runner.

        test_mine = conformance(MyTarget())

    Each case runs in a simulated world. After each step, all reported values are compared bit for
    bit with a reference on one device. The failing case with the largest difference is shrunk like
    in `zero-sim shrink`, because smaller differences may be mere rounding. A finding without
    different values, such as a deadlock, ends the search at once.

    Args:
        target: The target, its registered name, or `module:name`.
        cases: Number of cases, drawn within the target's capabilities.
        seed: Seed, with which every run draws the same cases. None for new cases each time, unless
            the Hypothesis profile has `derandomize`.
        world_size_max: Most ranks in a case.
        steps_max: Most optimizer steps in a case.
        shrink_seconds: Time limit for shrinking; 0 to report the failing case unchanged. Runs can
            only report different cases if this limit ends the search, which the message mentions.

    Returns:
        A function without arguments. It raises `NotConformant` with the findings and the TOML of
        the smallest failing case, or AssertionError if no case proved anything. If it passes, it
        prints the number of cases by verdict and the passes by params only. With pytest, these are
        also the test properties `zero_sim.scope` and `zero_sim.verdicts`.

    Raises:
        UsageError: There is no target with this name, or the object is no target.
    """
    # Import or check at once, so a wrong name fails during collection.
    if isinstance(target, str):
        judged = import_target(target)
    else:
        judged = check_target(target, of="conformance")

    def test_conformance() -> None:
        __tracebackhide__ = True
        # A test object may run again, so remove properties of an earlier pass.
        vars(test_conformance).pop(PROPERTIES, None)
        failed: NotConformant | None = None
        # With a pool, cases share warm worlds.
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
        # pytest captures this and prints it with -rA.
        print(printable(f"conformance of {judged.name}: {properties['verdicts']}"))  # noqa: T201

    test_conformance.__doc__ = f"{judged.name} equals the reference, bit for bit."
    return test_conformance


def _series(seed: int | None) -> str:
    """Return the seed as text; random if None, unless Hypothesis must be deterministic."""
    if seed is None and not settings().derandomize:
        seed = secrets.randbits(64)
    return str(seed or 0)


@dataclass(kw_only=True, slots=True)
class _Results:
    verdicts: Counter[str] = field(default_factory=Counter)
    params_only: int = 0
    """Number of passes in which neither averaged gradients nor optimizer state were compared."""
    worst: tuple[Scenario, CaseResult] | None = None
    """The failing case whose values differ most, and its result."""
    # Below any difference, so the first failing case replaces it.
    apart: float = -1.0
    """Relative difference in the worst case; see `how_far_apart`."""
    manners: dict[str, Counter[str]] = field(default_factory=dict)
    """Number of failing cases by check and manner of the difference."""

    def add(self, scenario: Scenario, result: CaseResult) -> None:
        """Add a case's result."""
        self.verdicts[result.verdict] += 1
        self.params_only += result.passes_by_params_only
        if result.verdict in ("pass", "inconclusive"):
            return
        # Keep only the worst case, because results contain tensors.
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
        """Return the number of failing cases by check and manner; "" for a single failure."""
        # For a single failure, the finding shows both.
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
    # The target's capabilities allow no case.
    if not verdicts and cases:
        raise AssertionError(f"{why_none_fits(target)}.")
    if not verdicts["pass"]:
        raise AssertionError(
            f"expected target {target.name!r} to pass in some of {cases} cases, got "
            f"{verdicts['inconclusive']} inconclusive cases, which prove nothing. Try more cases."
        )


def _judge_all(scenarios: Iterable[Scenario], judge: Judge, *, target: Target) -> _Results:
    """Judge cases, up to the first finding without different values."""
    results = _Results()
    for index, scenario in enumerate(scenarios):
        result = judge(scenario)
        # Repeat some passes by params only with SGD, which shows if gradients were averaged.
        if index % TWIN_EVERY == 0:
            result = with_twin(result, scenario, judge=judge, find=lambda: target)
        results.add(result.twin or scenario, result)
        # No later case could have a larger difference.
        if results.apart >= BEYOND_VALUES:
            break
    return results


@dataclass(frozen=True, kw_only=True, slots=True)
class _Subject:
    target: Target
    name: str
    """Importable name; "" if there is none."""
    judge: Judge
    pool: WorldPool
    limits: Limits


def _shrunk(
    scenario: Scenario, result: CaseResult, subject: _Subject, *, heading: str
) -> NotConformant:
    """Shrink a failing case; if it could not be judged, report it unchanged."""
    # Shrinking compares findings by key, so a case without a key cannot be shrunk.
    key = key_of(result)
    if key is None or result.verdict == "error" or not may_shrink(key):
        return _failure(scenario, subject, f"{render_case(result)}\n\nThe case")
    reduced, result = shrink_finding(
        scenario,
        result,
        judge=subject.judge,
        may_run=lambda other: not refusals(subject.target, other),
        limits=subject.limits,
        # If our own system fails a shrunk case too, the case is wrong, not the target.
        right=right_judge(subject.target, pool=subject.pool),
    )
    result = marked(result, scenario)
    explanation = _explain_rules(reduced.scenario, result, subject)
    text = (
        f"{heading}{render_case(without_advice(result))}\n{render_reduced(reduced)}\n\n{explanation}\n\n"
        "The smallest failing case"
    )
    return _failure(reduced.scenario, subject, text)


def _explain_rules(scenario: Scenario, result: CaseResult, subject: _Subject) -> str:
    """Return the quantities that were not compared, the declared rules, and a proposed rule."""
    declared = {
        each.name: getattr(numerics_of(subject.target, scenario), each.name)
        for each in fields(Numerics)
    }
    # Non-default rules, as a user would declare them.
    other = {name: value for name, value in declared.items() if value != getattr(PLAIN, name)}
    rules = ", ".join(f"{name}={value!r}" for name, value in other.items())
    silent = ", ".join(result.unobserved)
    lines = [
        f"Not compared, because the target does not report it: {silent}"
        if silent
        else "Everything that a target can report was compared.",
        f"Assumed rules: Numerics({rules})"
        + ("" if rules else ", because none is declared; otherwise as in the case"),
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
        # A rule may fit this case by chance, so it must also pass cases that distinguish rules.
        now, cases = with_change(other, change), [scenario, *distinguishing]
        if "norm" in change or "clip" in change:
            # The judged case may not clip, so check norm rules with cases that do.
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
        return "No rule is proposed: rules that fit this case do not fit others with several ranks."
    return (
        "No rule is proposed: the target supports no case that distinguishes rules, with several "
        "ranks and with sgd or reported optimizer state."
    )


def _distinguishing_cases(
    scenario: Scenario, result: CaseResult, subject: _Subject
) -> list[Scenario]:
    """Return supported cases that distinguish rules, with the first suitable optimizer."""
    optimizers = [OptimizerSpec(name=name) for name in SEES_FACTORS]
    if PARTS not in result.unobserved:
        # Observed state shows factors that Adam's params hide.
        optimizers.append(scenario.optimizer)
    for optimizer in optimizers:
        cases = revealing_cases(scenario, optimizer=replace(optimizer, lr=0.1))
        if taken := [case for case in cases if not refusals(subject.target, case)]:
            # Most candidates fail with several micro-batches, so run these cases first.
            return sorted(taken, key=lambda case: -case.run.micro_batches)
    return []


def _clipping_cases(scenario: Scenario, subject: _Subject) -> list[Scenario]:
    # Keep dtype and stage of the failing case, because the target may not support others.
    base = changed(
        BASE, model={"dtype": scenario.model.dtype}, system={"stage": scenario.system.stage}
    )
    return [case for case in clip_cases(base) if not refusals(subject.target, case)]


def _all_pass(cases: Sequence[Scenario], numerics: Mapping[str, Any], subject: _Subject) -> bool:
    try:
        target = WithNumerics(subject.target, Numerics(**numerics))
    except UsageError:
        return False  # These rules contradict each other.
    return all(run_case(case, pool=subject.pool, target=target).verdict == "pass" for case in cases)


def _failure(scenario: Scenario, subject: _Subject, text: str) -> NotConformant:
    """Return the failure with the case as TOML and the command that repeats it."""
    registered = (*target_names(), *library_target_names())
    if subject.name not in registered:
        # A file can only name registered targets, so the command names any other target.
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
