"""Options of `zero-sim run` that override scenarios, and targets' own options."""

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
"""Values of `--order` that hide the order from the judge."""
# `world.order` for an unknown order. In the simulated world it is a random tree, because bounds
# must hold for irregular orders too. On processes it is only a label: the library chooses.
_OWN_ORDERS = {"sim": "random-tree", "gloo": "gloo", "nccl": "nccl-ring"}
_OWN_OPTION: dict[str, Any] = {
    "multiple": True,
    "metavar": "NAME=VALUE",
    "help": "Set one of the target's own options, overriding the case. Repeatable.",
}
own_options = click.option("--option", "option_values", **_OWN_OPTION)


def parse_own_options(option_values: Sequence[str]) -> dict[str, str]:
    """Return the values of `--option` by name.

    Raises:
        UsageError: An option has no name or no value.
    """
    parsed: dict[str, str] = {}
    for each in option_values:
        # Only the first = separates, so a value may contain =.
        name, equals, value = each.partition("=")
        if not name or not equals:
            raise UsageError(
                f"expected --option NAME=VALUE, got {each!r}. Try --option {name or 'NAME'}=VALUE."
            )
        parsed[name] = value
    return parsed


def own_options_again(option_values: Mapping[str, str]) -> list[str]:
    """Return command line words that set the same options."""
    # One value per name: if a name was repeated, its last value counts.
    return [
        word for name, value in option_values.items() for word in ("--option", f"{name}={value}")
    ]


def imported(target: str | None) -> str | None:
    """Return a target that is written as `module:name`, else None."""
    return target if target is not None and ":" in target else None


def with_target(scenario: Scenario, target: str | None, option_values: Sequence[str]) -> Scenario:
    """Return the case with the target and the target's own options set.

    Args:
        scenario: Case to change.
        target: Value of `--target`.
        option_values: Values of `--option`.
    """
    from zero_sim.scenario.derived import with_options

    if own := parse_own_options(option_values):
        scenario = with_options(scenario, own)
    # Only registered targets are named in a case, because a file must not decide which code is
    # imported.
    if target is None or imported(target):
        return scenario
    return replace(scenario, system=replace(scenario.system, target=target))


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRequest:
    """Options that decide how cases are judged."""

    backend: Literal["sim", "gloo", "nccl"] = option(
        "--backend",
        type=click.Choice(["sim", "gloo", "nccl"]),
        default="sim",
        show_default=True,
        help="Run collectives in the simulated world or on real processes. Start nccl, and runs "
        "on several machines, with torchrun.",
    )
    order: str | None = option(
        "--order",
        metavar="NAME",
        help="Override the scenarios' summation order. With `unknown`, the order is hidden from "
        "the judge and sums are checked against proven bounds.",
    )
    native: bool = option(
        "--native",
        is_flag=True,
        help="Let gloo or nccl add in its own order, and skip cases that require a certain order.",
    )
    device: str = option("--device", **DEVICE)
    target: str | None = option(
        "--target",
        metavar="NAME",
        help="Override the scenarios' target: a registered name, or module:name to import.",
    )
    able: bool = option("--able", is_flag=True, help="Skip cases that the target does not support.")
    option_values: tuple[str, ...] = option("--option", **_OWN_OPTION)
    stall_seconds: float | None = option(
        "--stall-seconds",
        **STALL_SECONDS,
        metavar="SECONDS",
        help="Override the scenarios' limit for the time between two calls of torch.distributed.",
    )
    jobs: int = option(
        "--jobs",
        type=click.IntRange(min=1),
        default=1,
        show_default=True,
        metavar="J",
        help="Judge J cases at a time, each in its own process. The output keeps its order.",
    )
    covering: bool = option(
        "--cover",
        is_flag=True,
        help="Run a small subset of the cases that covers every file, feature and pair of "
        "features.",
    )

    def check(self, *, traced: bool) -> None:
        """Refuse meaningless combinations of options.

        Args:
            traced: True if `--trace` is given.

        Raises:
            UsageError: Options contradict each other, or the order is unknown.
        """
        _ = self.world  # Raises for an unknown order.
        if self.backend == "sim":
            if self.native:
                raise UsageError(
                    "expected --native with --backend gloo or nccl, got --backend sim. Add "
                    "--backend gloo, or remove --native."
                )
            return
        # Refuse options without effect on processes: ignoring them would mislead.
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
        """Overrides for the fields of `world`.

        Raises:
            UsageError: The order is unknown. The message lists the known orders.
        """
        from zero_sim.scenario.spec import OrderName
        from zero_sim.scenario.suggest import nearest

        known = get_args(OrderName)
        if self.order is None:
            return {}
        # The world still adds in this order; `order_known` only hides it from the judge.
        if self.order in UNKNOWN_ORDER:
            return {"order": _OWN_ORDERS[self.backend], "order_known": False}
        if self.order not in known:
            names = nearest(self.order, (*known, *UNKNOWN_ORDER))
            raise UsageError(f"expected a known --order, got {self.order!r}. Choose {names}.")
        return {"order": self.order}

    @property
    def again(self) -> list[str]:
        """Command line words that repeat these overrides, without target and stall limit."""
        # Only non-default values, to keep the printed command short.
        words = [] if self.backend == "sim" else ["--backend", self.backend]
        if self.order is not None:
            words += ["--order", self.order]
        if self.device != "cpu":
            words += ["--device", self.device]
        native = ["--native"] if self.native else []
        return [*words, *native, *own_options_again(parse_own_options(self.option_values))]

    def of_target(self, case: Case) -> Case:
        """Return the case with the target and its options set."""
        return replace(case, scenario=with_target(case.scenario, self.target, self.option_values))

    def in_world(self, scenario: Scenario) -> Scenario:
        """Return the scenario with the summation order set."""
        return replace(scenario, world=replace(scenario.world, **self.world))

    def with_overrides(self, scenario: Scenario) -> Scenario:
        """Return the scenario with all overrides."""
        # `in_world` sets no stall limit, because this limit depends on the machine and must not get
        # into a bundle.
        scenario = self.in_world(scenario)
        if self.stall_seconds is None:
            return scenario
        return replace(scenario, run=replace(scenario.run, stall_seconds=self.stall_seconds))

    def why_order_needed(self, scenario: Scenario) -> str:
        """Return why a case needs a known summation order; empty if it can be judged."""
        from zero_sim.scenario.conditions import why_order_matters

        why = "" if self.order not in UNKNOWN_ORDER else why_order_matters(scenario)
        return f"its order must be known, because it has {why}" if why else ""

    def why_package_missing(self, scenario: Scenario) -> str:
        """Return why the case's own target cannot run here; empty if it can."""
        from zero_sim.scenario.spec import SystemSpec

        # A missing --target is an error, and our own system is never missing.
        if self.target is not None or scenario.system.target == SystemSpec().target:
            return ""
        with packages_needed():
            from zero_sim.targets import find_target, library_target_names, why_missing
        if scenario.system.target not in library_target_names():
            return ""
        return why_missing(find_target(scenario.system.target))

    def why_refused(self, scenario: Scenario, *, as_written: Scenario) -> str:
        """Return why to skip a case; empty to judge it.

        A case is skipped if its target refuses it because of `--order`, or with `--able` for any
        reason.

        Args:
            scenario: The case with all overrides.
            as_written: The case in the file.
        """
        # Without these options, a refused case is the user's mistake, and judging it reports the
        # mistake.
        if self.order is None and not self.able:
            return ""
        with packages_needed():
            from zero_sim.targets import import_target, refusals
        # Cases name their registered target; see `with_target`.
        target = import_target(imported(self.target) or scenario.system.target)
        problems = refusals(target, scenario)
        # Blame --order only if the target accepts the case without it.
        if problems and self.order is not None and not refusals(target, as_written):
            if self.order in UNKNOWN_ORDER:
                paths = ", ".join(problem.path for problem in problems)
                return f"target {target.name!r} must know its order: {paths}"
            return f"target {target.name!r} does not support world.order = {self.order!r}"
        if problems and self.able:
            return f"target {target.name!r} does not support {problems[0].path}"
        return ""


def left_out_lines(counts: Mapping[str, int]) -> list[str]:
    """Return a line for each reason that left out cases.

    Args:
        counts: Number of cases by reason.
    """
    return [
        f"{count} case{'' if count == 1 else 's'} left out: {reason}"
        for reason, count in sorted(counts.items())
    ]
