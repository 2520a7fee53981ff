"""`zero-sim doctor --target`: find library globals that simulated ranks would share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import click

from zero_sim.errors import UsageError
from zero_sim.host.packages import packages_needed

if TYPE_CHECKING:
    from zero_sim.rules.rank_globals import RankGlobals
    from zero_sim.scenario.spec import Scenario
    from zero_sim.targets import Target


def print_rank_globals(name: str, *, packages: Sequence[str]) -> int:
    """Find per-process state in a target's library, print its declaration, return the exit status.

    Args:
        name: Name of the target.
        packages: Top-level packages to search. If empty, the target's library or own package.

    Raises:
        UsageError: The target supports no case on two ranks.
    """
    with packages_needed():
        from zero_sim.rules.rank_globals import find_rank_globals
        from zero_sim.script.rank_local_modules import check_found
        from zero_sim.targets import import_target
    target = import_target(name)
    # Before the target runs, so that a wrong --package is reported at once.
    check_found(packages)
    chosen = tuple(packages) or _own_packages(target)
    cases = list(_cases(target))
    if not cases:
        raise UsageError(
            f"expected a target that supports two ranks, got {name!r}, whose capabilities rule "
            "them out. Widen its `capabilities`."
        )
    found = find_rank_globals(target, cases, packages=chosen)
    for line in _lines(found):
        click.echo(line)
    return 0 if all(result.verdict == "pass" for result in found.results) else 1


def _own_packages(target: Target) -> tuple[str, ...]:
    # A library target names its package. For any other target, search its own package.
    library = getattr(target, "library", None)
    if library is not None:
        return (library.package.partition(".")[0],)
    return (type(target).__module__.partition(".")[0],)


def _cases(target: Target) -> Iterator[Scenario]:
    """Yield a case on two ranks for each stage that the target supports."""
    # Two ranks suffice to share state. Tiny params keep the cases fast.
    from zero_sim.scenario.spec import ModelSpec, RunSpec, Scenario, SystemSpec, WorldSpec
    from zero_sim.targets import capabilities_of, refusals

    able = capabilities_of(target)
    # Two micro-batches if possible, to detect state between micro-batches too.
    micro_batches = 2 if "run.micro_batches" in able.follows else 1
    # If the target has no known order, use the default order and hide it from the judge.
    order = (*able.known_orders, WorldSpec().order)[0]
    for stage in able.stages:
        case = Scenario(
            schema=1,
            name=f"two-ranks-at-stage-{stage}",
            model=ModelSpec(name=able.models[0], dtype=able.dtypes[0], hidden=3),
            world=WorldSpec(size=2, order=order, order_known=bool(able.known_orders)),
            system=SystemSpec(stage=stage),
            run=RunSpec(steps=2, micro_batches=micro_batches),
        )
        if not refusals(target, case):
            yield case


def _lines(found: RankGlobals) -> Iterator[str]:
    """Yield counts, verdicts, and the declaration as Python to paste."""
    cases = len(found.results)
    yield (
        f"{found.looked_at:,} names of {', '.join(found.packages)} were swapped between two ranks "
        f"in {cases} case{'s' if cases > 1 else ''}; {len(found.names)} changed."
    )
    for result in found.results:
        yield f"  {result.id}, with these alone: {result.verdict}"
        yield from (f"    {finding.check}: {finding.message}" for finding in result.findings)
    if not found.names:
        yield "Ranks share no state in them: you need not declare `rank_local`."
        return
    wrong = any(result.verdict != "pass" for result in found.results)
    yield "Declare in the target" + (", and fix the findings above:" if wrong else ":")
    yield ""
    yield "rank_local = RankLocal("
    yield "    names=("
    # repr would quote with ', and formatters would change it in the pasted code.
    yield from (f'        "{name}",' for name in found.names)
    yield "    )"
    yield ")"
