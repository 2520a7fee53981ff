"""Results of trying other rules on a step, and their text in a finding."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from zero_sim.findings.records import Finding
from zero_sim.scenario.checks import Check

UPDATED = (Check.EQUALITY_MASTER, Check.EQUALITY_STATE, Check.EQUALITY_PARAMS)
"""Checks that an update affects; a difference in an earlier check has another cause."""
# Number of fitting rules from which the text adds `_AMBIGUOUS`.
_MANY = 3
# Number of fitting rules from which a finding warns that the case hardly tells them apart.
_SEVERAL = 2
_ADVICE = re.compile(r"^If [a-z ]+ intended, declare (Numerics\(.*\))$\n?", flags=re.MULTILINE)
_AMBIGUOUS = (
    # `zero_sim.rules.declared` finds the end of the rules by these first words.
    "a case that fits so many rules hardly tells them apart, and a fault may have these bits as "
    "well: `zero-sim rules` tries more cases"
)
_READ_SETTINGS = "Read all settings, and lr_factor, from scenario.optimizer in the engine"

What = Literal["gradient", "mistake", "update"]
"""Quantity that the rules compute; a `mistake` is an update by no rule. Sorted by dataflow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RulesTried:
    """Result of trying other rules on a step."""

    assumed: str
    """Rule that the reference followed, as a target declares it."""
    tried: int
    """Number of other rules that give other bits."""
    fitting: tuple[str, ...]
    """Rules that give all observed bits."""
    what: What = "update"
    """Quantity that they compute."""
    blind: str = ""
    """Reason why the case cannot tell rules apart, so none is proposed; empty if it can."""
    factor: str = ""
    """Factor from the expected gradient to that of the fitting rules, with its cause; empty if the
    rules differ in it."""
    also: RulesTried | None = None
    """Result of trying rules, for a mistake."""

    @property
    def cause(self) -> str:
        """Cause as the end of a message; empty unless there is exactly one."""
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
        """True if several settings fit; the fewest of them explain the difference."""
        return bool(self.fitting) and all(" in place of " in each for each in self.fitting)

    def in_words(self) -> str:
        """Return sentences for the reader of a finding; empty if there are none."""
        if self.what == "mistake":
            return self._mistakes_in_words()
        said = f"the reference computed the {self.what} with {self.assumed}"
        if not self.fitting:
            # Most wrong gradients fit no rule; only clipping is worth a sentence.
            if not self.assumed.startswith("clip"):
                return ""
            many = {0: "every known rule gives", 1: "the one other known rule does not give"}.get(
                self.tried, f"none of the {self.tried} other known rules gives"
            )
            bits = "the same bits here" if not self.tried else "all the bits that the system has"
            return f"{said}; {many} {bits}"
        # Declarations are Python arguments, so without spaces around "=".
        first = self.fitting[0].replace(" = ", "=")
        # If all rules are values of one setting, print its name once.
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
    """Add the result of trying rules to the first finding, if it is about them.

    Args:
        found: Findings, earliest first.
        tried: Result of trying rules; None if there was no other rule.
    """
    if tried is None or not found:
        return found
    meant = (Check.EQUALITY_GRAD,) if tried.what == "gradient" else UPDATED
    if found[0].check not in meant:
        # Something earlier differs, so rules do not explain it.
        return found
    detail = _with_one_advice("\n".join(filter(None, [found[0].detail, tried.in_words()])))
    message = f"{found[0].message}: {tried.cause}" if tried.cause else found[0].message
    return (replace(found[0], message=message, detail=detail), *found[1:])


def _with_one_advice(detail: str) -> str:
    """Return a detail with its proposals merged into one last line."""
    said = _ADVICE.findall(detail)
    if len(said) < _SEVERAL:
        return detail
    # Move all proposals to the end, as alternatives in one line.
    others = _ADVICE.sub("", detail).rstrip()
    return f"{others}\nIf this is intended, declare one of: {', '.join(said)}"


def rules_together(reported: Sequence[RulesTried | None]) -> RulesTried | None:
    """Merge the results of judges that observed different ranks of one bad step.

    Args:
        reported: Result of each judge; None from one without differences.
    """
    # Sorted: a gradient comes before the update that uses it.
    said = sorted(filter(None, reported), key=lambda each: each.what)
    first = next(iter(said), None)
    if first is None:
        return None
    alike = [each if each and each.what == first.what else None for each in reported]
    fitting = [set(each.fitting) if each else set[str]() for each in alike]
    # Only of judges with the same quantity: rules of others explain another difference.
    also = [each.also for each in alike if each is not None]
    return replace(
        first,
        # A rule must fit the observations of every judge.
        fitting=tuple(r for r in first.fitting if all(r in f for f in fitting)),
        also=rules_together(also),
        # One rank with enough evidence suffices; the empty text sorts first.
        blind=min(each.blind for each in alike if each is not None),
    )
