"""Findings that a campaign knows, and whether one of them is what a further case shows.

A key alone does not tell: two causes may make the same quantity wrong in the same manner. So a case
counts as one of a known finding only if it has all that the smallest case of that finding has: no
fewer ranks, params, elements and steps, and each setting that is not as by default there. A case
that lacks any of it fails for another reason, and is made smaller by itself, through cases that
lack it, too. Where the search for the smallest case did not come to its end, the key has to do.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Self

from zero_sim.fuzz.needs import NOTHING, Needs
from zero_sim.fuzz.records import Found
from zero_sim.scenario.load import parse_cases
from zero_sim.scenario.spec import Scenario
from zero_sim.shrink import Key

_OF_A_KIND_MAX = 4
"""Findings whose keys differ in their places alone; of more, further ones are taken for known: one
cause that shows in many ways must not take all the time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """A finding, and what its smallest case has."""

    key: Key
    places: Collection[str]
    """Parts of the buffer in which all that differs lies in its smallest case."""
    needs: Needs
    """What its smallest case has."""

    @classmethod
    def of(cls, found: Found) -> Self:
        """What is known of a finding."""
        if not found.complete:
            return cls(key=found.key, places=found.places, needs=NOTHING)
        (scenario,) = parse_cases(found.scenario, source="smallest case", stem="smallest")
        return cls(key=found.key, places=found.places, needs=Needs.of(scenario))

    def has_what_it_takes(self, scenario: Scenario) -> bool:
        """Whether a case has all that the smallest case of this finding has."""
        return self.needs.met_by(scenario)

    def is_of_kind(self, key: Key) -> bool:
        """Whether a key is this finding's, as far as smaller cases keep it."""
        return key[:-1] == self.key[:-1]

    def explains(self, key: Key, scenario: Scenario) -> bool:
        """Whether a case with a finding of this key shows this one."""
        lies_there = not key.place or key == self.key or key.place in self.places
        return self.is_of_kind(key) and lies_there and self.has_what_it_takes(scenario)


@dataclass(slots=True)
class KnownFindings:
    """All findings that a campaign knows so far."""

    findings: list[Known] = field(default_factory=list)

    def add(self, found: Found) -> None:
        """Note one more."""
        self.findings.append(Known.of(found))

    def explain(self, key: Key, scenario: Scenario) -> bool:
        """Whether a case shows one of them, or one more of a kind that there are many of."""
        of_kind = [known for known in self.findings if known.is_of_kind(key)]
        is_shown = any(known.explains(key, scenario) for known in of_kind)
        return is_shown or len(of_kind) >= _OF_A_KIND_MAX

    def others(self, key: Key, scenario: Scenario) -> list[Known]:
        """Those of the same kind that a case cannot be showing."""
        return [
            known
            for known in self.findings
            if known.is_of_kind(key) and not known.has_what_it_takes(scenario)
        ]
