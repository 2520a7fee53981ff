"""Rules of arithmetic that fit what a system shows, where the one that it declares does not.

A right system whose rule is declared wrongly differs from the reference as a wrong one does. So
where a gradient or an update differs and other rules would have given other bits, each of them is
tried on all that is observed of that step: first those that differ in one thing, then, if none of
these fits, in two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor

from zero_sim.findings.compare import same_bits
from zero_sim.judge.factors import factor_of
from zero_sim.judge.rules_tried import RulesTried, What
from zero_sim.reference import OtherSums, OtherUpdate
from zero_sim.scenario.spec import OptimizerName, Scenario
from zero_sim.targets import OwnedPart

SEES_FACTORS: tuple[OptimizerName, ...] = ("sgd", "asgd")
"""Optimizers whose steps are as long as the gradient."""

Pick = Callable[[Any], Mapping[str, Tensor]]
"""Takes what is observed in one place, by what it is, from what a rule gives."""


class Alternatives(Protocol):
    """The rules by which something could have been computed."""

    @property
    def assumed(self) -> str:
        """The rule that the reference followed, as a target declares it."""
        ...

    def singles(self) -> Sequence[str]:
        """Those that differ in one thing."""
        ...

    def pairs(self) -> Sequence[str]:
        """Those that differ in two."""
        ...

    def update(self, rule: str) -> object:
        """What a rule gives, for `Pick`."""
        ...


@dataclass(slots=True)
class _Step:
    """One step while ranks are shown with it."""

    agreed: list[Pick] = field(default_factory=list)
    """What was observed to be as expected, as long as all is."""
    updates: dict[str, object] | None = None
    """What each rule that fits so far gives; None as long as nothing differs."""
    tried: RulesTried | None = None
    shows_state: bool = False
    """True if optimizer state was observed, which shows a gradient's factor."""
    sums: OtherSums | None = None
    """From which the gradients by other rules are."""

    def keep(self, pick: Pick, got: Mapping[str, Tensor]) -> None:
        """Keep the rules that give what was observed."""
        assert self.updates is not None
        self.updates = {
            rule: update for rule, update in self.updates.items() if _same(pick(update), got)
        }


class RulesTrial:
    """Tries all known rules on each step of which something differs.

    Args:
        what: What is computed by these rules.
        scenario: The case, which may not tell rules apart.
    """

    def __init__(self, what: What = "update", *, scenario: Scenario | None = None) -> None:
        self._what: What = what
        self._scenario = scenario
        self._steps: dict[int, _Step] = {}

    def look(
        self,
        step: int,
        otherwise: Alternatives | None,
        *,
        pick: Pick,
        got: Mapping[str, Tensor],
        agrees: bool,
    ) -> None:
        """Note what was observed.

        Args:
            step: Index of the step, from 0.
            otherwise: How it could have gone on; None where there is one rule only.
            pick: Takes the same from what a rule gives.
            got: What the rank has, by the same names.
            agrees: Whether it is as the reference has it.
        """
        if otherwise is None:
            return
        state = self._steps.setdefault(step, _Step())
        state.shows_state |= len(got) > 1
        if state.updates is None and agrees:
            state.agreed.append(pick)
            return
        if state.updates is None:
            self._begin(state, otherwise, pick=pick, got=got)
        state.keep(pick, got)

    def _begin(
        self, state: _Step, otherwise: Alternatives, *, pick: Pick, got: Mapping[str, Tensor]
    ) -> None:
        """Try all rules on what differs first."""
        tried = 0
        for rules in (otherwise.singles, otherwise.pairs):
            candidates = rules()
            tried += len(candidates)
            state.updates = {rule: otherwise.update(rule) for rule in candidates}
            state.keep(pick, got)
            if state.updates:
                break
        state.tried = RulesTried(
            assumed=otherwise.assumed, tried=tried, fitting=(), what=self._what
        )
        state.sums = getattr(otherwise, "sums", None)
        if state.updates:
            assumed = otherwise.update(otherwise.assumed)
            for earlier in state.agreed:
                state.keep(earlier, earlier(assumed))
        state.agreed.clear()

    def forget(self, step: int) -> None:
        """Forget a step of which nothing differed."""
        if step in self._steps and self._steps[step].updates is None:
            del self._steps[step]

    def of_step(self, step: int | None) -> RulesTried | None:
        """What came of a step; None where nothing differed, or there is one rule only."""
        state = None if step is None else self._steps.get(step)
        if state is None or state.tried is None or state.updates is None:
            return None
        # Forms of the clip differ by a few units in the last place, no factor.
        is_factor = self._what == "update" and not state.tried.assumed.startswith("clip")
        shows_factor = state.shows_state or not is_factor
        blind = "" if self._scenario is None else why_blind(self._scenario, shows_factor)
        fitting = tuple(state.updates)
        factors = {factor_of(rule, state.sums) for rule in fitting}
        return replace(
            state.tried,
            fitting=fitting,
            blind=blind,
            factor=factors.pop() if len(factors) == 1 else "",
        )


def why_blind(scenario: Scenario, shows_factor: bool) -> str:
    """Say why a case does not tell rules apart; empty if it does.

    Args:
        scenario: The case that was judged.
        shows_factor: Whether a gradient, or state that is made of it, is observed.
    """
    name = scenario.optimizer.name
    if scenario.world.size == 1:
        return "No rule is proposed: a case of one rank does not tell rules apart"
    if not shows_factor and name not in SEES_FACTORS:
        return f"No rule is proposed: params that {name} stepped hardly show a gradient's factor"
    return ""


def part_picked(part: OwnedPart) -> tuple[Pick, Mapping[str, Tensor]]:
    """How to take what belongs to a part from an update, and what it holds now.

    Args:
        part: The part of a param that a rank owns, as its engine shows it.
    """
    place = part.place

    def pick(update: OtherUpdate) -> dict[str, Tensor]:
        held = {"master": update.masters[place.param], **update.state[place.param]}
        return {
            name: value.reshape(-1)[place.start : place.stop]
            if value.dim() or name == "master"
            else value
            for name, value in held.items()
        }

    return pick, {"master": part.master, **part.state}


def grad_picked(
    name: str, got: Tensor, *, cut: Callable[[Tensor], Tensor]
) -> tuple[Pick, Mapping[str, Tensor]]:
    """The same of a reduced gradient.

    Args:
        name: Name of the param.
        got: What the rank tells of it.
        cut: Cuts a whole one to that.
    """
    return lambda told: {name: cut(told(name))}, {name: got}


def param_picked(name: str, got: Tensor) -> tuple[Pick, Mapping[str, Tensor]]:
    """The same of a working param.

    Args:
        name: Name of the working param.
        got: What the rank has.
    """
    return lambda update: {name: update.params[name]}, {name: got}


def _same(wanted: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> bool:
    return wanted.keys() == got.keys() and all(
        value.dtype == got[name].dtype
        and value.numel() == got[name].numel()
        and same_bits(value.reshape(-1), got[name].reshape(-1))
        for name, value in wanted.items()
    )
