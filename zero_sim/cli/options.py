"""Options of `zero-sim run` that replace what scenarios say, and of a target's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import click

from zero_sim.cli.parts import DEVICE, STALL_SECONDS, option
from zero_sim.errors import UsageError
from zero_sim.host.packages import packages_needed

if TYPE_CHECKING:
    from zero_sim.scenario.discover import Case
    from zero_sim.scenario.spec import Scenario

UNKNOWN_ORDER = ("any", "unknown")
"""Names of an order that the judge is not told."""
"""Instead of an order's name: one that the judge is not told."""
_OWN_ORDERS = {"sim": "random-tree", "gloo": "gloo", "nccl": "nccl-ring"}
"""The order that each backend then adds in, or is said to."""
_OWN_OPTION: dict[str, Any] = {
    "multiple": True,
    "metavar": "NAME=VALUE",
    "help": "An option of the target's own, whatever the case says; several times for several.",
}
own_options = click.option("--option", "said", **_OWN_OPTION)


def parse_own_options(said: Sequence[str]) -> dict[str, str]:
    """What `--option` says, by name.

    Raises:
        UsageError: One has no name, or no value.
    """
    parsed: dict[str, str] = {}
    for each in said:
        name, equals, value = each.partition("=")
        if not name or not equals:
            raise UsageError(
                f"expected --option NAME=VALUE, got {each!r}. Try --option {name or 'NAME'}=VALUE."
            )
        parsed[name] = value
    return parsed


def own_options_again(said: Mapping[str, str]) -> list[str]:
    """What has to be said again to set the same options."""
    return [word for name, value in said.items() for word in ("--option", f"{name}={value}")]


def imported(target: str | None) -> str | None:
    """The target as `module:name`, or None if it is registered or is not given."""
    return target if target is not None and ":" in target else None


def with_target(scenario: Scenario, target: str | None, said: Sequence[str]) -> Scenario:
    """The case of a registered target, so that its bundle names it, with options of its own.

    Args:
        scenario: Any case.
        target: What `--target` says. A case does not name a target that is imported.
        said: What `--option` says.
    """
    from zero_sim.scenario.derived import with_options

    if own := parse_own_options(said):
        scenario = with_options(scenario, own)
    if target is None or imported(target):
        return scenario
    return replace(scenario, system=replace(scenario.system, target=target))


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """How cases are judged, as the command line asks for it."""

    backend: Literal["sim", "gloo", "nccl"] = option(
        "--backend",
        type=click.Choice(["sim", "gloo", "nccl"]),
        default="sim",
        show_default=True,
        help="What carries the collectives: the simulated world, or real processes; nccl, and "
        "several machines, under torchrun.",
    )
    order: str | None = option(
        "--order",
        metavar="NAME",
        help="Order in which reductions add, whatever the scenarios say; unknown: one that the "
        "judge is not told, so that sums are judged by proven bounds.",
    )
    native: bool = option(
        "--native",
        is_flag=True,
        help="Let gloo or nccl add in its own order, whatever the scenarios say; only cases that "
        "owe nothing to an order are run.",
    )
    device: str = option("--device", **DEVICE)
    target: str | None = option(
        "--target",
        metavar="NAME",
        help="System to judge, whatever the scenarios say: a registered name, or module:name, "
        "which is imported.",
    )
    able: bool = option(
        "--able", is_flag=True, help="Leave out cases that the target cannot be asked for."
    )
    said: tuple[str, ...] = option("--option", **_OWN_OPTION)
    stall_seconds: float | None = option(
        "--stall-seconds",
        **STALL_SECONDS,
        metavar="SECONDS",
        help="Longest time without a call of torch.distributed, whatever the scenarios say.",
    )
    jobs: int = option(
        "--jobs",
        type=click.IntRange(min=1),
        default=1,
        show_default=True,
        metavar="J",
        help="Cases at a time, each on a process of its own; told in the same order.",
    )
    covering: bool = option(
        "--cover",
        is_flag=True,
        help="Run few of the cases that still have every file, feature and pair of features.",
    )

    def check(self, *, traced: bool) -> None:
        """Check that options go together.

        Args:
            traced: True if `--trace` is given.

        Raises:
            UsageError: They do not, or there is no such order.
        """
        _ = self.world
        if self.backend == "sim":
            if self.native:
                raise UsageError(
                    "expected --native with --backend gloo or nccl, got --backend sim."
                )
            return
        for name, given, why in (
            ("--device", self.device != "cpu", "gloo computes on the CPU, nccl on each rank's GPU"),
            ("--trace", traced, "only the simulated world records events"),
            ("--jobs", self.jobs > 1, "there each rank is a process already"),
        ):
            if given:
                raise UsageError(
                    f"expected {name} with --backend sim, got --backend {self.backend}: {why}."
                )

    @property
    def world(self) -> Mapping[str, Any]:
        """Fields of `world` in place of what the scenarios say.

        Raises:
            UsageError: There is no such order; lists those there are.
        """
        from zero_sim.scenario.spec import OrderName
        from zero_sim.scenario.suggest import nearest

        known = get_args(OrderName)
        if self.order is None:
            return {}
        if self.order in UNKNOWN_ORDER:
            return {"order": _OWN_ORDERS[self.backend], "order_known": False}
        if self.order not in known:
            names = nearest(self.order, (*known, *UNKNOWN_ORDER))
            raise UsageError(f"expected a known --order, got {self.order!r}. Choose {names}.")
        return {"order": self.order}

    @property
    def again(self) -> list[str]:
        """Options to give again for the same verdict, other than target and stall limit."""
        words = [] if self.backend == "sim" else ["--backend", self.backend]
        if self.order is not None:
            words += ["--order", self.order]
        if self.device != "cpu":
            words += ["--device", self.device]
        native = ["--native"] if self.native else []
        return [*words, *native, *own_options_again(parse_own_options(self.said))]

    def of_target(self, case: Case) -> Case:
        """The case of the target, with the target's own options."""
        return replace(case, scenario=with_target(case.scenario, self.target, self.said))

    def in_world(self, scenario: Scenario) -> Scenario:
        """The scenario in the order of addition that is asked for."""
        return replace(scenario, world=replace(scenario.world, **self.world))

    def as_asked(self, scenario: Scenario) -> Scenario:
        """The scenario with all that replaces what it says."""
        scenario = self.in_world(scenario)
        if self.stall_seconds is None:
            return scenario
        return replace(scenario, run=replace(scenario.run, stall_seconds=self.stall_seconds))

    def why_order_needed(self, scenario: Scenario) -> str:
        """Why a case cannot be judged if its order of addition is unknown, as is asked for."""
        from zero_sim.scenario.conditions import why_order_matters

        why = "" if self.order not in UNKNOWN_ORDER else why_order_matters(scenario)
        return f"its order must be known: it has {why}" if why else ""

    def why_package_missing(self, scenario: Scenario) -> str:
        """Why a case's own target cannot run here; one that was asked for is an error instead."""
        from zero_sim.scenario.spec import SystemSpec

        if self.target is not None or scenario.system.target == SystemSpec().target:
            return ""
        with packages_needed():
            from zero_sim.targets import find_target, library_target_names, why_missing
        if scenario.system.target not in library_target_names():
            return ""
        return why_missing(find_target(scenario.system.target))

    def why_refused(self, scenario: Scenario, *, as_written: Scenario) -> str:
        """Why the target refuses a case for the order that is asked for, or at all with `--able`.

        A case that the target refuses as it is written is a mistake, and is told when the case is
        judged.

        Args:
            scenario: As it is asked for.
            as_written: As its file has it.
        """
        if self.order is None and not self.able:
            return ""
        with packages_needed():
            from zero_sim.targets import import_target, refusals
        # The cases of a registered one name it; see `with_target`.
        target = import_target(imported(self.target) or scenario.system.target)
        problems = refusals(target, scenario)
        if problems and self.order is not None and not refusals(target, as_written):
            if self.order in UNKNOWN_ORDER:
                paths = ", ".join(problem.path for problem in problems)
                return f"target {target.name!r} must know its order: {paths}"
            return f"target {target.name!r} does not support world.order = {self.order!r}"
        if problems and self.able:
            return f"target {target.name!r} cannot be asked for {problems[0].path}"
        return ""


def left_out_lines(counts: Mapping[str, int]) -> list[str]:
    """A line for each reason why cases were left out.

    Args:
        counts: Number of cases, by reason.
    """
    return [
        f"{count} case{'' if count == 1 else 's'} left out: {reason}"
        for reason, count in sorted(counts.items())
    ]
