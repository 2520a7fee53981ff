"""One test that judges a target over drawn scenarios, shrinks what fails, and shows it."""

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
"""Attribute of a test for its properties, set when it has passed; the pytest plugin reads it."""
Judge = Callable[[Scenario], CaseResult]


class NotConformant(AssertionError):
    """A target is wrong in some case: the finding, and the smallest such case that was found."""

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
    """Make a test, for pytest or any other runner, of a target over drawn scenarios.

        test_mine = conformance(MyTarget())

    Every case runs on a simulated world and all that the target tells is compared, bit for bit,
    with a reference on one device, after every step. Of the cases that fail the one with the
    largest difference is made as small as it goes, as `zero-sim shrink` does it, as long as it has
    the same finding: smaller differences may be what is rounded on the way. A finding that is no
    difference of values, such as a deadlock, ends the search at once.

    Args:
        target: What is judged; or its name, a registered one or `module:name`.
        cases: How many to draw within its capabilities.
        seed: What they are drawn from, so that every run draws the same; None for new ones each
            time, but for Hypothesis's profiles that derandomise.
        world_size_max: Most ranks of a case.
        steps_max: Most optimizer steps of a case.
        shrink_seconds: After so long no smaller case is tried, so that a slow target does not keep
            a test suite waiting; 0 to be shown the first case that fails as it is. Only where this
            ends the search, which the message then says, can two runs show different cases.

    Returns:
        A function without arguments. It raises `NotConformant` with the findings of the smallest
        case that fails and that case as TOML; or where no case could have shown anything. If it
        passes, it prints its cases by verdict and the passes by params only; with pytest they are
        properties of the test, `zero_sim.scope` and `zero_sim.verdicts`.

    Raises:
        UsageError: There is no target of that name, or it is none.
    """
    if isinstance(target, str):
        judged = import_target(target)
    else:
        judged = check_target(target, of="conformance")

    def test_conformance() -> None:
        __tracebackhide__ = True
        vars(test_conformance).pop(PROPERTIES, None)
        failed: NotConformant | None = None
        with WorldPool() as pool:
            judge = partial(run_case, pool=pool, target=judged)
            drawn = drawn_cases(judged, ranks_max=world_size_max, steps_max=steps_max)
            scenarios = islice(draws(drawn, seed=_series(seed)), cases)
            came = _judge_all(scenarios, judge, target=judged)
            if came.worst is not None:
                limits = Limits(seconds=shrink_seconds)
                name = target if isinstance(target, str) else name_of(judged)
                asked = _Asked(target=judged, name=name, judge=judge, pool=pool, limits=limits)
                failed = _shrunk(*came.worst, asked, heading=came.heading())
        if failed is not None:
            raise failed
        _require_pass(came.verdicts, judged, cases=cases)
        vars(test_conformance)[PROPERTIES] = properties = came.properties()
        # pytest captures it and prints it with -rA.
        print(printable(f"conformance of {judged.name}: {properties['verdicts']}"))  # noqa: T201

    test_conformance.__doc__ = f"{judged.name} equals the reference, bit for bit."
    return test_conformance


def _series(seed: int | None) -> str:
    """What cases are drawn from: the seed, or one of this time where nothing asks for the same."""
    if seed is None and not settings().derandomize:
        seed = secrets.randbits(64)
    return str(seed or 0)


@dataclass(kw_only=True, slots=True)
class _Came:
    """Results of cases."""

    verdicts: Counter[str] = field(default_factory=Counter)
    params_only: int = 0
    """Cases that pass with neither an averaged gradient nor optimizer state."""
    worst: tuple[Scenario, CaseResult] | None = None
    """The case that fails with values furthest apart."""
    apart: float = -1.0
    """How far they are; see `how_far_apart`."""
    manners: dict[str, Counter[str]] = field(default_factory=dict)
    """By check: in how many cases values differ in which manner."""

    def add(self, scenario: Scenario, result: CaseResult) -> None:
        """Note a result.

        Args:
            scenario: A case.
            result: What came of it.
        """
        self.verdicts[result.verdict] += 1
        self.params_only += result.passes_by_params_only
        if result.verdict in ("pass", "inconclusive"):
            return
        if (apart := how_far_apart(result)) > self.apart:
            self.worst, self.apart = (scenario, result), apart
        key = key_of(result)
        if key is not None:
            manner = key.manner if result.findings[:1] and result.findings[0].manner else ""
            self.manners.setdefault(key.check, Counter())[manner] += 1

    def properties(self) -> dict[str, str]:
        """Return properties of a test with these results."""
        return {
            "scope": "params-only" if self.params_only else "full",
            "verdicts": count_verdicts(self.verdicts, params_only=self.params_only),
        }

    def heading(self) -> str:
        """Return how many cases fail and in which manners; empty if one does."""
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
        return "\n".join([*lines, "The one with the largest difference, made smaller:", "", ""])


def _require_pass(verdicts: Counter[str], target: Target, *, cases: int) -> None:
    __tracebackhide__ = True
    if not verdicts and cases:
        raise AssertionError(f"{why_none_fits(target)}.")
    if not verdicts["pass"]:
        raise AssertionError(
            f"expected target {target.name!r} to pass in some of {cases} cases, got "
            f"{verdicts['inconclusive']} inconclusive ones: nothing was shown. Try more cases."
        )


def _judge_all(scenarios: Iterable[Scenario], judge: Judge, *, target: Target) -> _Came:
    """Judge cases, up to the first finding that is no difference of values."""
    came = _Came()
    for index, scenario in enumerate(scenarios):
        result = judge(scenario)
        if index % TWIN_EVERY == 0:
            result = with_twin(result, scenario, judge=judge, find=lambda: target)
        came.add(result.twin or scenario, result)
        if came.apart >= BEYOND_VALUES:
            break
    return came


@dataclass(frozen=True, kw_only=True, slots=True)
class _Asked:
    """What a test is of."""

    target: Target
    name: str
    """By which it can be imported; empty where there is no such name."""
    judge: Judge
    pool: WorldPool
    limits: Limits


def _shrunk(
    scenario: Scenario, result: CaseResult, asked: _Asked, *, heading: str
) -> NotConformant:
    """Make a case that fails smaller; one that could not be judged is shown as it is."""
    key = key_of(result)
    if key is None or result.verdict == "error" or not may_shrink(key):
        return _shown(scenario, asked, f"{render_case(result)}\n\nThe case")
    reduced, result = shrink_finding(
        scenario,
        result,
        judge=asked.judge,
        may_ask=lambda other: not refusals(asked.target, other),
        limits=asked.limits,
        right=right_judge(asked.target, pool=asked.pool),
    )
    result = marked(result, scenario)
    led = _led(reduced.scenario, result, asked)
    said = (
        f"{heading}{render_case(without_advice(result))}\n{render_reduced(reduced)}\n\n{led}\n\n"
        "The smallest case that was found"
    )
    return _shown(reduced.scenario, asked, said)


def _led(scenario: Scenario, result: CaseResult, asked: _Asked) -> str:
    """What was compared, by which rules, and the rule that would make the case pass."""
    declared = {
        each.name: getattr(numerics_of(asked.target, scenario), each.name)
        for each in fields(Numerics)
    }
    other = {name: value for name, value in declared.items() if value != getattr(PLAIN, name)}
    said = ", ".join(f"{name}={value!r}" for name, value in other.items())
    silent = ", ".join(result.unobserved)
    lines = [
        f"Not compared, since the target does not tell it: {silent}"
        if silent
        else "All that a target can tell was compared.",
        f"Rules that were assumed: Numerics({said})"
        + ("" if said else ", as nothing is declared; and what the case says"),
    ]
    lines.append(_proposal(scenario, result, asked, other=other))
    return "\n".join(lines)


def _proposal(
    scenario: Scenario, result: CaseResult, asked: _Asked, *, other: Mapping[str, Any]
) -> str:
    """At most one declaration with which the case passes, and cases that tell rules apart."""
    telling = _telling_cases(scenario, result, asked)
    candidates = declared_by(result)
    for change in candidates if telling else ():
        now, cases = with_change(other, change), [scenario, *telling]
        if "norm" in change or "clip" in change:
            cases += _clipping_cases(scenario, asked)
        if _all_pass(cases, now, asked):
            words = ", ".join(f"{name}={value!r}" for name, value in now.items())
            return (
                f"If this is intended, declare Numerics({words}): with it this case passes, and "
                f"so do {len(cases) - 1} others that tell rules apart."
            )
    if not candidates:
        return "No other known rule makes it pass."
    if telling:
        return "No rule is proposed: those that fit this case do not fit others of several ranks."
    return (
        "No rule is proposed: the target takes no case that tells rules apart, of several ranks "
        "and with sgd, or with optimizer state that is observed."
    )


def _telling_cases(scenario: Scenario, result: CaseResult, asked: _Asked) -> list[Scenario]:
    """Cases that tell rules apart and that the target takes; none if it takes no such case."""
    optimizers = [OptimizerSpec(name=name) for name in SEES_FACTORS]
    if PARTS not in result.unobserved:
        optimizers.append(scenario.optimizer)
    for optimizer in optimizers:
        cases = telling_cases(scenario, optimizer=replace(optimizer, lr=0.1))
        if taken := [case for case in cases if not refusals(asked.target, case)]:
            # Most candidates fail with several micro-batches, so those cases come first.
            return sorted(taken, key=lambda case: -case.run.micro_batches)
    return []


def _clipping_cases(scenario: Scenario, asked: _Asked) -> list[Scenario]:
    base = changed(
        BASE, model={"dtype": scenario.model.dtype}, system={"stage": scenario.system.stage}
    )
    return [case for case in clip_cases(base) if not refusals(asked.target, case)]


def _all_pass(cases: Sequence[Scenario], said: Mapping[str, Any], asked: _Asked) -> bool:
    try:
        target = Asked(asked.target, Numerics(**said))
    except UsageError:
        return False  # Rules that do not go together.
    return all(run_case(case, pool=asked.pool, target=target).verdict == "pass" for case in cases)


def _shown(scenario: Scenario, asked: _Asked, said: str) -> NotConformant:
    """A case with the command that repeats it."""
    registered = (*target_names(), *library_target_names())
    if asked.name not in registered:
        # A file can name a registered target only; another one the command names.
        system = replace(scenario.system, target=SystemSpec().target)
        scenario = replace(scenario, system=system)
    named = [] if asked.name in registered else ["--target", asked.name or "MODULE:NAME"]
    command = shlex.join(["zero-sim", "run", _FILE, *named])
    where = "" if asked.name else ", with the name under which a module has this target"
    return NotConformant(
        f"{said}, as a scenario file:\n\n{to_chosen_toml(scenario)}\n"
        f"Saved as {_FILE}, this repeats it{where}:\n\n    {command}\n",
        scenario=scenario,
    )
