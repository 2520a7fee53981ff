"""Records of the rules that were tried on a step, and what they add to a finding."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from zero_sim.findings.records import Finding
from zero_sim.scenario.checks import Check

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

What = Literal["gradient", "mistake", "update"]
"""Computed by the rules; a `mistake` is an update by no rule. Sorted by what is computed first."""


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
