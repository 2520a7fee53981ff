"""Rules of arithmetic that fit what a system shows, where the one that it declares does not.

A right system whose rule is declared wrongly differs from the reference as a wrong one does. So
where a gradient or an update differs and other rules would have given other bits, each of them is
tried on all that is observed of that step: first those that differ in one thing, then, if none of
these fits, in two.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from torch import Tensor

from zero_sim.findings.compare import same_bits
from zero_sim.findings.records import Finding
from zero_sim.judge.factors import factor_of
from zero_sim.reference import OtherSums, OtherUpdate
from zero_sim.scenario.checks import Check
from zero_sim.scenario.spec import OptimizerName, Scenario
from zero_sim.targets import OwnedPart

UPDATED = (Check.EQUALITY_MASTER, Check.EQUALITY_STATE, Check.EQUALITY_PARAMS)
"""Checks of what comes of an update; what differs before it has another cause."""
_MANY = 3
_SEVERAL = 2
_ADVICE = re.compile(r"^If [a-z ]+ intended, declare (Numerics\(.*\))$\n?", flags=re.MULTILINE)
_AMBIGUOUS = (
    "a case that so many fit tells them hardly apart, and a fault may have these bits as well: "
    "`zero-sim rules` asks more of them"
)
_READ_SETTINGS = "The engine has to read all settings from scenario.optimizer, and lr_factor"

SEES_FACTORS: tuple[OptimizerName, ...] = ("sgd", "asgd")
"""Optimizers whose steps are as long as the gradient."""

What = Literal["gradient", "mistake", "update"]
"""Computed by the rules; a `mistake` is an update by no rule. Sorted by what is computed first."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class RulesTried:
    """What came of trying other rules on a step."""

    assumed: str
    """The rule that the reference followed, as a target declares it."""
    tried: int
    """How many others give other bits."""
    fitting: tuple[str, ...]
    """Those that give all bits that were observed."""
    what: What = "update"
    """What is computed by them."""
    blind: str = ""
    """Why the case does not tell rules apart, so that none is proposed; empty if it does."""
    factor: str = ""
    """The factor between the gradient by the fitting rules and the expected one, and its cause;
    empty if it is not the same by all of them."""
    also: RulesTried | None = None
    """Of a mistake: what came of trying rules."""

    @property
    def cause(self) -> str:
        """The cause, as the end of a message; empty if there is none or more than one."""
        is_only = self.also is None or not self.also.fitting
        if self.what == "mistake" and is_only and (len(self.fitting) == 1 or self._is_of_settings):
            return f"what came is the step {self.fitting[0]}"
        if self.what == "update" and self.factor:
            behind = (
                "its bits are those of a step by" if self.blind else "the gradient behind it is"
            )
            return f"{behind} {self.factor}"
        return ""

    @property
    def _is_of_settings(self) -> bool:
        """True if several settings fit: of these the fewest explain what came."""
        return bool(self.fitting) and all(" in place of " in each for each in self.fitting)

    def in_words(self) -> str:
        """A sentence for the reader of a finding; empty where there is nothing to say."""
        if self.what == "mistake":
            return self._mistakes_in_words()
        said = f"the reference computed the {self.what} with {self.assumed}"
        if not self.fitting:
            # Most gradients that are wrong are so by no rule, and the reader knows that.
            if not self.assumed.startswith("clip"):
                return ""
            many = {0: "every known rule gives", 1: "the one other known rule does not give"}.get(
                self.tried, f"none of the {self.tried} other known rules gives"
            )
            bits = "the same bits here" if not self.tried else "all the bits that the system has"
            return f"{said}; {many} {bits}"
        first = self.fitting[0].replace(" = ", "=")
        # Of one thing, its name is said once.
        names = {rule.partition(" = ")[0] for rule in self.fitting}
        is_one = len(names) == 1 and not any("," in rule for rule in self.fitting)
        lead = f"{next(iter(names))} = " if is_one else ""
        others = [rule.removeprefix(lead) for rule in self.fitting]
        which = " or ".join(others)
        intended = "this is" if len(others) == 1 else "one of these is"
        few = "" if len(others) < _MANY else f"; {_AMBIGUOUS}"
        advice = self.blind or f"If {intended} intended, declare Numerics({first})"
        return f"{said}; these are the bits of {lead}{which}{few}.\n{advice}"

    def _mistakes_in_words(self) -> str:
        lines = (
            [] if self.cause else [f"these are the bits of the step {' or '.join(self.fitting)}"]
        )
        lines += [_READ_SETTINGS] if self._is_of_settings else []
        lines += [self.also.in_words()] if self.also is not None else []
        return "\n".join(filter(None, lines)) if self.fitting else ""


def with_rules(found: tuple[Finding, ...], tried: RulesTried | None) -> tuple[Finding, ...]:
    """Return findings, the first one with what is known of rules, if that is what differs.

    Args:
        found: The earliest first.
        tried: What came of trying other rules; None where there is one only.
    """
    if tried is None or not found:
        return found
    meant = (Check.EQUALITY_GRAD,) if tried.what == "gradient" else UPDATED
    if found[0].check not in meant:
        return found
    detail = _with_one_advice("\n".join(filter(None, [found[0].detail, tried.in_words()])))
    message = f"{found[0].message}: {tried.cause}" if tried.cause else found[0].message
    return (replace(found[0], message=message, detail=detail), *found[1:])


def _with_one_advice(detail: str) -> str:
    """Return the detail of a finding with several proposals as alternatives, in its last line."""
    said = _ADVICE.findall(detail)
    if len(said) < _SEVERAL:
        return detail
    others = _ADVICE.sub("", detail).rstrip()
    return f"{others}\nIf this is intended, declare one of: {', '.join(said)}"


def rules_together(reported: Sequence[RulesTried | None]) -> RulesTried | None:
    """What judges say together, each of which was shown other ranks of one bad step.

    Args:
        reported: By judge; None of one to whom nothing differed.
    """
    # A gradient comes before what is made of it.
    said = sorted(filter(None, reported), key=lambda each: each.what)
    first = next(iter(said), None)
    if first is None:
        return None
    alike = [each if each and each.what == first.what else None for each in reported]
    fitting = [set(each.fitting) if each else set[str]() for each in alike]
    also = [each.also for each in alike if each is not None]
    return replace(
        first,
        fitting=tuple(r for r in first.fitting if all(r in f for f in fitting)),
        also=rules_together(also),
        # One rank that shows enough is enough; empty text sorts first.
        blind=min(each.blind for each in alike if each is not None),
    )


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
