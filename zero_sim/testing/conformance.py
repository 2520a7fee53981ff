"""One test that judges a target over drawn scenarios, shrinks what fails, and shows it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import hypothesis
from hypothesis import HealthCheck, Phase, Verbosity, given, settings

from zero_sim.fuzz.strategies import scenarios
from zero_sim.launch import WorldPool
from zero_sim.report.text import render_case
from zero_sim.scenario.dump import to_chosen_toml
from zero_sim.scenario.spec import Scenario
from zero_sim.targets import Target, import_target
from zero_sim.verify import run_case


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
) -> Callable[[], None]:
    """Make a test, for pytest or any other runner, of a target over drawn scenarios.

        test_mine = conformance(MyTarget())

    Every case runs on a simulated world and all that the target tells is compared, bit for bit,
    with a reference on one device, after every step.

    Args:
        target: What is judged; or its name, a registered one or `module:name`.
        cases: How many to draw within its capabilities.
        seed: What they are drawn from, so that every run draws the same; None for new ones each
            time, but for Hypothesis's profiles that derandomise.
        world_size_max: Most ranks of a case.
        steps_max: Most optimizer steps of a case.

    Returns:
        A function without arguments. It raises `NotConformant` with the findings of the smallest
        case that fails and that case as TOML; or where no case could have shown anything.

    Raises:
        UsageError: There is no target of that name.
    """
    judged = import_target(target) if isinstance(target, str) else target

    def test_conformance() -> None:
        __tracebackhide__ = True
        verdicts: Counter[str] = Counter()
        with WorldPool() as pool:
            check = _build_check(
                judged,
                pool=pool,
                verdicts=verdicts,
                cases=cases,
                seed=seed,
                world_size_max=world_size_max,
                steps_max=steps_max,
            )
            try:
                check()
            except NotConformant as failed:
                # As it is, without the way through Hypothesis, which helps nobody here.
                raise failed.with_traceback(None) from None
        if not verdicts["pass"]:
            raise AssertionError(
                f"expected target {judged.name!r} to pass in some of {cases} cases, got "
                f"{verdicts['inconclusive']} inconclusive ones: nothing was shown. Try more cases."
            )

    test_conformance.__doc__ = f"{judged.name} equals the reference, bit for bit."
    return test_conformance


def _build_check(
    target: Target,
    *,
    pool: WorldPool,
    verdicts: Counter[str],
    cases: int,
    seed: int | None,
    world_size_max: int,
    steps_max: int,
) -> Callable[[], None]:
    drawn = scenarios(target, ranks_max=world_size_max, steps_max=steps_max)

    def check(scenario: Scenario) -> None:
        result = run_case(scenario, pool=pool, target=target)
        verdicts[result.verdict] += 1
        if result.verdict not in ("pass", "inconclusive"):
            raise NotConformant(
                f"{render_case(result)}\n\nThe smallest case that was found, as a scenario "
                f"file:\n\n{to_chosen_toml(scenario)}",
                scenario=scenario,
            )

    chosen = settings(
        max_examples=cases,
        deadline=None,
        database=None,
        phases=(Phase.generate, Phase.shrink),
        print_blob=False,
        report_multiple_bugs=False,
        # The case is shown as TOML, not as the repr of a record.
        verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
    )
    property_test = chosen(given(scenario=drawn)(check))
    return property_test if seed is None else hypothesis.seed(seed)(property_test)
