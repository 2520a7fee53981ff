"""Rules of arithmetic that fit what a system shows, where the one that it declares does not.

A right system whose rule is declared wrongly differs from the reference as a wrong one does. So
where an update differs and other rules would have given other bits, each of them is tried on all
that is observed of that step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from zero_sim.findings.compare import same_bits
from zero_sim.findings.records import Finding
from zero_sim.reference import OtherUpdate, Otherwise
from zero_sim.scenario.checks import Check
from zero_sim.targets import OwnedPart

_UPDATED = (Check.EQUALITY_MASTER, Check.EQUALITY_STATE, Check.EQUALITY_PARAMS)
"""Checks of what comes of an update; what differs before it has another cause."""

Pick = Callable[[OtherUpdate], Mapping[str, Tensor]]
"""Takes from an update what is observed in one place, by what it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RulesTried:
    """What came of trying other rules on a step."""

    assumed: str
    """The rule that the reference followed, as a target declares it."""
    tried: int
    """How many others give other bits."""
    fitting: tuple[str, ...]
    """Those that give all bits that were observed."""

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON."""
        return {"assumed": self.assumed, "tried": self.tried, "fitting": list(self.fitting)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RulesTried:
        """What `as_dict` gave."""
        return cls(assumed=data["assumed"], tried=data["tried"], fitting=tuple(data["fitting"]))

    def in_words(self) -> str:
        """A sentence for the reader of a finding."""
        said = f"the reference computed the update with {self.assumed}"
        if not self.fitting:
            many = {0: "every known rule gives", 1: "the one other known rule does not give"}.get(
                self.tried, f"none of the {self.tried} other known rules gives"
            )
            bits = "the same bits here" if not self.tried else "all the bits that the system has"
            return f"{said}; {many} {bits}"
        first = self.fitting[0].replace(" ", "")
        word = self.assumed.split()[0]
        others = [rule.removeprefix(f"{word} = ") for rule in self.fitting]
        which = " or ".join(filter(None, [", ".join(others[:-1]), others[-1]]))
        advice = "if that is" if len(others) == 1 else "or whichever of them is"
        return (
            f"{said}; these are the bits of {word} = {which}: declare Numerics({first}), {advice} "
            "the rule of the system"
        )


def with_rules(found: tuple[Finding, ...], tried: RulesTried | None) -> tuple[Finding, ...]:
    """Return findings, the first one with what is known of rules, if an update is what differs.

    Args:
        found: The earliest first.
        tried: What came of trying other rules; None where there is one only.
    """
    if tried is None or not found or found[0].check not in _UPDATED:
        return found
    detail = "\n".join(filter(None, [found[0].detail, tried.in_words()]))
    return (replace(found[0], detail=detail), *found[1:])


def rules_together(reported: Sequence[RulesTried | None]) -> RulesTried | None:
    """What judges say together, each of which was shown other ranks of one bad step.

    Args:
        reported: By judge; None of one to whom nothing differed.
    """
    first = next(filter(None, reported), None)
    if first is None:
        return None
    fitting = [set(each.fitting) if each else set[str]() for each in reported]
    return replace(first, fitting=tuple(r for r in first.fitting if all(r in f for f in fitting)))


@dataclass(slots=True)
class _Step:
    """One step while ranks are shown with it."""

    agreed: list[Pick] = field(default_factory=list)
    """What was observed to be as expected, as long as all is."""
    updates: dict[str, OtherUpdate] | None = None
    """By rule that fits so far; None as long as nothing differs."""
    tried: RulesTried | None = None

    def keep(self, pick: Pick, got: Mapping[str, Tensor]) -> None:
        """Keep the rules that give what was observed."""
        assert self.updates is not None
        self.updates = {
            rule: update for rule, update in self.updates.items() if _same(pick(update), got)
        }


class RulesTrial:
    """Tries all known rules on each step of which something differs."""

    def __init__(self) -> None:
        self._steps: dict[int, _Step] = {}

    def look(
        self,
        step: int,
        otherwise: Otherwise | None,
        *,
        pick: Pick,
        got: Mapping[str, Tensor],
        agrees: bool,
    ) -> None:
        """Note what was observed after an update.

        Args:
            step: Index of the step, from 0.
            otherwise: How it could have gone on; None where there is one rule only.
            pick: Takes the same from an update.
            got: What the rank has, by the same names.
            agrees: Whether it is as the reference has it.
        """
        if otherwise is None:
            return
        state = self._steps.setdefault(step, _Step())
        if state.updates is None and agrees:
            state.agreed.append(pick)
            return
        if state.updates is None:
            rules = otherwise.rules()
            state.updates = {rule: otherwise.update(rule) for rule in rules}
            state.tried = RulesTried(assumed=otherwise.assumed, tried=len(rules), fitting=())
            assumed = otherwise.update(otherwise.assumed)
            for earlier in state.agreed:
                state.keep(earlier, earlier(assumed))
            state.agreed.clear()
        state.keep(pick, got)

    def forget(self, step: int) -> None:
        """Forget a step of which nothing differed."""
        if step in self._steps and self._steps[step].updates is None:
            del self._steps[step]

    def of_step(self, step: int | None) -> RulesTried | None:
        """What came of a step; None where nothing differed, or there is one rule only."""
        state = None if step is None else self._steps.get(step)
        if state is None or state.tried is None or state.updates is None:
            return None
        return replace(state.tried, fitting=tuple(state.updates))


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
