"""Result of trying other rules on a step, and its text in a finding."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from zero_sim.findings.records import Finding
from zero_sim.scenario.checks import Check

UPDATED = (Check.EQUALITY_MASTER, Check.EQUALITY_STATE, Check.EQUALITY_PARAMS)
"""Checks that a wrong update rule can fail."""
# Add `_AMBIGUOUS` if at least this many rules fit.
_MANY = 3
# Merge the proposals of a finding if there are at least this many.
_SEVERAL = 2
_ADVICE = re.compile(r"^If [a-z ]+ intended, declare (Numerics\(.*\))$\n?", flags=re.MULTILINE)
_AMBIGUOUS = (
    # `zero_sim.rules.declared` parses these first words: they end the list of rules.
    "a case that fits so many rules hardly tells them apart, and a fault may have these bits as "
    "well: `zero-sim rules` tries more cases"
)
_READ_SETTINGS = "Read all settings, and lr_factor, from scenario.optimizer in the engine"

What = Literal["gradient", "mistake", "update"]
"""Quantity that the rules compute. A `mistake` is an update with a bug, such as a wrong setting.
Alphabetical order is dataflow order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RulesTried:
    """Result of trying other rules on a step."""

    assumed: str
    """Declared rule, which the reference followed."""
    tried: int
    """Number of other rules whose bits differ from the reference's."""
    fitting: tuple[str, ...]
    """Rules that give all observed bits."""
    what: What = "update"
    blind: str = ""
    """Reason why this case cannot distinguish rules, so none is proposed; empty if it can."""
    factor: str = ""
    """Factor from the expected gradient to the gradient of the fitting rules, with its cause. Empty
    unless all fitting rules give the same factor."""
    also: RulesTried | None = None
    """If `what` is `mistake`: the result of trying rules."""

    @property
    def cause(self) -> str:
        """Cause, as the end of a message; empty unless it is unique."""
        is_only = self.also is None or not self.also.fitting
        if self.what == "mistake" and is_only and (len(self.fitting) == 1 or self._is_of_settings):
            return f"the system took the step {self.fitting[0]}"
        if self.what == "update" and self.factor:
            behind = (
                "its bits are those of a step by" if self.blind else "the gradient behind it is"
            )
            return f"{behind} {self.factor}"
        return ""

    @property
    def _is_of_settings(self) -> bool:
        """True if all fitting mistakes are wrong settings, such as torch's default `lr`."""
        return bool(self.fitting) and all(" in place of " in each for each in self.fitting)

    def in_words(self) -> str:
        """Return the result as sentences for a finding's detail; may be empty."""
        if self.what == "mistake":
            return self._mistakes_in_words()
        given = f"the reference computed the {self.what} with {self.assumed}"
        if not self.fitting:
            # Most wrong gradients fit no rule, so only report that no clipping rule fits.
            if not self.assumed.startswith("clip"):
                return ""
            many = {0: "every known rule gives", 1: "the one other known rule does not give"}.get(
                self.tried, f"none of the {self.tried} other known rules gives"
            )
            bits = "the same bits here" if not self.tried else "all the bits that the system has"
            return f"{given}; {many} {bits}"
        # A declaration is a Python argument, so remove spaces around "=".
        first = self.fitting[0].replace(" = ", "=")
        # If all rules are values of the same setting, print its name once.
        names = {rule.partition(" = ")[0] for rule in self.fitting}
        is_one = len(names) == 1 and not any("," in rule for rule in self.fitting)
        lead = f"{next(iter(names))} = " if is_one else ""
        others = [rule.removeprefix(lead) for rule in self.fitting]
        which = " or ".join(others)
        intended = "this is" if len(others) == 1 else "one of these is"
        few = "" if len(others) < _MANY else f"; {_AMBIGUOUS}"
        advice = self.blind or f"If {intended} intended, declare Numerics({first})"
        return f"{given}; these are the bits of {lead}{which}{few}.\n{advice}"

    def _mistakes_in_words(self) -> str:
        lines = (
            [] if self.cause else [f"these are the bits of the step {' or '.join(self.fitting)}"]
        )
        lines += [_READ_SETTINGS] if self._is_of_settings else []
        lines += [self.also.in_words()] if self.also is not None else []
        return "\n".join(filter(None, lines)) if self.fitting else ""


def with_rules(found: tuple[Finding, ...], tried: RulesTried | None) -> tuple[Finding, ...]:
    """Add the result of trying rules to the first finding, if rules may explain it.

    Args:
        found: Findings, earliest first.
        tried: Result of trying rules; None if none were tried.
    """
    if tried is None or not found:
        return found
    meant = (Check.EQUALITY_GRAD,) if tried.what == "gradient" else UPDATED
    if found[0].check not in meant:
        # An earlier check failed, which rules do not explain.
        return found
    detail = _with_one_advice("\n".join(filter(None, [found[0].detail, tried.in_words()])))
    message = f"{found[0].message}: {tried.cause}" if tried.cause else found[0].message
    return (replace(found[0], message=message, detail=detail), *found[1:])


def _with_one_advice(detail: str) -> str:
    """Merge the proposals in a detail into a single last line."""
    given = _ADVICE.findall(detail)
    if len(given) < _SEVERAL:
        return detail
    others = _ADVICE.sub("", detail).rstrip()
    return f"{others}\nIf this is intended, declare one of: {', '.join(given)}"


def rules_together(reported: Sequence[RulesTried | None]) -> RulesTried | None:
    """Merge the results of judges that observed different ranks of the same bad step.

    Args:
        reported: Result of each judge; None if its ranks have no differences.
    """
    # A gradient sorts before the update that uses it.
    given = sorted(filter(None, reported), key=lambda each: each.what)
    first = next(iter(given), None)
    if first is None:
        return None
    alike = [each if each and each.what == first.what else None for each in reported]
    fitting = [set(each.fitting) if each else set[str]() for each in alike]
    # Only results for the same quantity: the others explain another difference.
    also = [each.also for each in alike if each is not None]
    return replace(
        first,
        # A rule must fit the observations of every judge.
        fitting=tuple(r for r in first.fitting if all(r in f for f in fitting)),
        also=rules_together(also),
        # One judge with enough evidence suffices. Empty sorts first, so `min` finds it.
        blind=min(each.blind for each in alike if each is not None),
    )
