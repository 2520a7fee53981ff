"""Search for the smallest case with the same finding, without slipping to another bug."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace

from zero_sim.backends.worlds import WorldPool
from zero_sim.findings.records import CaseResult
from zero_sim.rules.judging import run_case
from zero_sim.scenario.dump import to_chosen_data
from zero_sim.scenario.fields import show
from zero_sim.scenario.spec import Scenario
from zero_sim.shrink.keys import keeps_apart, key_of, may_become
from zero_sim.shrink.reduce import Limits, Reduced, shrink
from zero_sim.shrink.size import settings_of, size_of
from zero_sim.targets import Target, find_target

OURS = "zero_sim"
_PLAIN_NUMBERS = frozenset({"optimizer.lr", "data.rows"})
"""Settings that may change even if the case has defaults, because any value is as plain."""
_OMITTED_FIELDS = frozenset(
    {"schema", "name", "description", "model.name", "model.dtype", "model.shapes", "world.size",
     "system.target", "run.steps", "run.seed", "run.stall_seconds"}
)  # fmt: skip
"""Fields that `in_words` shows first, or that do not affect the computation."""
_SETTINGS_SHOWN = 8
_NAME_CHARS_MAX = 80
Judge = Callable[[Scenario], CaseResult]


def shrink_finding(
    scenario: Scenario,
    result: CaseResult,
    *,
    judge: Judge,
    may_run: Callable[[Scenario], bool],
    limits: Limits,
    is_over: Callable[[], bool] = lambda: False,
    right: Judge | None = None,
) -> tuple[Reduced, CaseResult]:
    """Make a case smaller as long as it has the same finding for the same reason.

    A smaller case is only accepted if:

    - its finding has the same key (see `keys`);
    - its difference is more than rounding, unless the original's is not;
    - it passes all controls that the original passes: a right system, and the system itself without
      the planned faults. Otherwise the smaller case may fail for another reason;
    - it has no setting that the original lacks, because this may be another cause.

    Args:
        scenario: A failing case for which `may_shrink` is true.
        result: Its result.
        judge: Judges a case.
        may_run: Returns True if the target supports a case.
        limits: As for `shrink`.
        is_over: As for `shrink`.
        right: Judges a case with a system that is known to be right; None without one.

    Returns:
        Result of the search, and result of its smallest case, which gets its own name and
        description.

    Raises:
        ValueError: If `result` has no finding.
    """
    key, best = key_of(result), result
    if key is None:
        raise ValueError(f"expected a case with a finding, got {scenario.name!r} without one")
    # A control that the original fails proves nothing about a smaller case.
    controls = [control for control in _controls(scenario, judge, right) if control(scenario)]

    def has_it(other: Scenario) -> bool:
        nonlocal best
        judged = judge(other)
        # First the key, because each control needs another run.
        if not may_become(key, judged) or not keeps_apart(judged, before=result):
            return False
        if not all(control(other) for control in controls):
            return False
        # Keep a single result, because event logs are large and only the smallest case is reported.
        best = judged
        return True

    had = settings_of(scenario) | _PLAIN_NUMBERS

    def may_be(other: Scenario) -> bool:
        return all(_is_of(path, had) for path in settings_of(other)) and may_run(other)

    reduced = shrink(scenario, fails=has_it, may_run=may_be, limits=limits, is_over=is_over)
    # Nothing smaller fails, so the case keeps its name.
    if reduced.scenario == scenario:
        return reduced, best
    named = titled(reduced.scenario, before=scenario, check=key.check)
    return replace(reduced, scenario=named), replace(best, id=named.name)


def _is_of(path: str, had: Collection[str]) -> bool:
    """Return True if a setting, or a table around it, is in `had`."""
    names = path.split(".")
    return any(".".join(names[:count]) in had for count in range(1, len(names) + 1))


def right_judge(target: Target, *, pool: WorldPool, device: str = "cpu") -> Judge | None:
    """Return a judge of zero_sim's own system, which passes every case that it supports.

    Args:
        target: The system under test.
        pool: Worlds to run on.
        device: Compute device.

    Returns:
        None if the target is zero_sim's own system.
    """
    ours = find_target(OURS)
    if target is ours or target.name == ours.name:
        return None

    def judge(scenario: Scenario) -> CaseResult:
        system = replace(scenario.system, target=OURS)
        case = replace(scenario, system=system)
        return run_case(case, pool=pool, target=ours, device=device)

    return judge


def _controls(
    scenario: Scenario, judge: Judge, right: Judge | None
) -> list[Callable[[Scenario], bool]]:
    """Return a case's controls: runs that must pass if its finding has the expected cause."""
    found: list[Callable[[Scenario], bool]] = []
    if scenario.faults:
        # The planned faults are the cause, so the case must have faults and pass without them.
        found.append(
            lambda other: bool(other.faults) and judge(replace(other, faults=())).verdict == "pass"
        )
    if right is not None:
        found.append(lambda other: right(other).verdict == "pass")
    return found


def titled(scenario: Scenario, *, before: Scenario, check: str) -> Scenario:
    """Give a smaller case its own name and description.

    Args:
        scenario: The smaller case.
        before: The original case.
        check: Check that fails in both.
    """
    origin = before.name[:_NAME_CHARS_MAX]
    made = f"Made from {origin!r}" if origin else "Made from a larger case"
    return replace(
        scenario,
        name=name_of(scenario),
        description=f"{in_words(scenario)}. {made} as the smallest case found with {check}.",
    )


def name_of(scenario: Scenario) -> str:
    """Return a name by size, such as `2-ranks-1-param-3-elements-1-step`."""
    size = size_of(scenario)
    counts = (
        (size.ranks, "ranks"),
        (size.params, "params"),
        (size.elements, "elements"),
        (size.steps, "steps"),
    )
    return "-".join(_count(number, noun).replace(" ", "-") for number, noun in counts)


def in_words(scenario: Scenario) -> str:
    """Describe a case: ranks, model, steps, and its non-default settings.

    Args:
        scenario: A valid case.
    """
    size, model = size_of(scenario), scenario.model
    shapes = "" if model.shapes is None else f" {show([list(each) for each in model.shapes])}"
    bare = f"{_count(size.params, 'params')}{shapes}"
    what = bare if model.name == "params" else f"model {model.name} with {bare}"
    head = (
        f"{_count(scenario.world.size, 'ranks')}, {what} in {model.dtype}, "
        f"{_count(size.steps, 'steps')}"
    )
    settings = list(_settings(to_chosen_data(scenario), ""))
    left = len(settings) - _SETTINGS_SHOWN
    shown = ", ".join(settings[:_SETTINGS_SHOWN]) + (f" and {left} more" if left > 0 else "")
    return f"{head}; {shown}" if shown else head


def _settings(table: Mapping[str, object], prefix: str) -> Iterator[str]:
    for name, value in table.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict) and value:
            yield from _settings(value, f"{path}.")
        elif isinstance(value, dict):
            # A table in which all settings are defaults.
            yield path
        elif path not in _OMITTED_FIELDS and value is not None:
            yield f"{path} = {show(value)}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun if number != 1 else noun.removesuffix('s')}"
