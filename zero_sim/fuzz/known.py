"""Known findings of a campaign: recognised in further cases, and rechecked later.

[Note: recognising a known finding]
The key does not suffice, because two causes may make the same quantity wrong in the same way. So a
case shows a known finding only if it contains the finding's smallest case: at least as many ranks,
params, elements and steps, and all its non-default settings. If a case lacks any of these, its
cause is another. Then it is shrunk separately, through cases that do not contain the smallest case
either. If the search for the smallest case was not completed, the key must suffice.

[Note: needs]
A finding needs the ranks, params, elements and steps of its smallest case, and its non-default
settings, with any value. Shrinking removes settings one by one. So another case may show the same
fault by another combination of settings.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal, Self

from zero_sim.backends.worlds import WorldPool
from zero_sim.errors import ZeroSimError
from zero_sim.fuzz.records import Found
from zero_sim.rules.judging import run_case
from zero_sim.scenario.checks import Check
from zero_sim.scenario.load import parse_cases
from zero_sim.scenario.spec import Scenario
from zero_sim.shrink import Key, Size, may_become, settings_of, size_of
from zero_sim.targets import Target, import_target

# Settings that findings do not depend on.
_NO_NEED = frozenset({"model.name", "system.target", "optimizer.lr", "data.rows"})
# Maximum number of findings whose keys differ only in the place. Further findings count as known,
# because a single cause with many places must not use up the campaign's time.
_OF_A_KIND_MAX = 4
Outcome = Literal["fixed", "fails", "fails-otherwise", "unknown"]
"""`fixed`: the case passes; `fails`: same finding; `fails-otherwise`: another finding; `unknown`:
the case could not be judged."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """Requirements on a case; see [Note: needs]."""

    size: Size
    settings: frozenset[str]
    """Paths of non-default settings."""

    @classmethod
    def of(cls, smallest: Scenario) -> Self:
        """Return the needs of a finding with this smallest case."""
        return cls(size=size_of(smallest), settings=_settings_of(smallest))

    def met_by(self, scenario: Scenario) -> bool:
        """Return True if a case meets all needs."""
        size, least = size_of(scenario), self.size
        is_large_enough = (
            size.ranks >= least.ranks
            and size.params >= least.params
            # Shrinking never gives a case without elements.
            and max(size.elements, 1) >= least.elements
            and size.steps >= least.steps
        )
        return is_large_enough and self.settings <= _settings_of(scenario)


NOTHING = Needs(size=Size(ranks=0, params=0, elements=0, steps=0, features=0), settings=frozenset())
"""Needs that any case meets."""


def _settings_of(scenario: Scenario) -> frozenset[str]:
    return settings_of(scenario) - _NO_NEED


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """A known finding and its needs."""

    key: Key
    places: Collection[str]
    """Parts of the buffer where the smallest case has differences."""
    needs: Needs
    """Requirements on other cases with this finding."""

    @classmethod
    def of(cls, found: Found) -> Self:
        """Return a finding as a known finding."""
        if not found.complete:
            return cls(key=found.key, places=found.places, needs=NOTHING)
        (scenario,) = parse_cases(found.scenario, source="smallest case", stem="smallest")
        return cls(key=found.key, places=found.places, needs=Needs.of(scenario))

    def is_of_kind(self, key: Key) -> bool:
        """Return True if a key equals this finding's key, apart from the place."""
        # The place is last, and shrinking may move it.
        return key[:-1] == self.key[:-1]

    def explains(self, key: Key, scenario: Scenario) -> bool:
        """Return True if a case with this key shows this finding."""
        # A key without a place fits any place.
        lies_there = not key.place or key == self.key or key.place in self.places
        return self.is_of_kind(key) and lies_there and self.needs.met_by(scenario)


@dataclass(slots=True)
class KnownFindings:
    """Findings that a campaign knows so far."""

    findings: list[Known] = field(default_factory=list)

    def add(self, found: Found) -> None:
        """Add a finding."""
        self.findings.append(Known.of(found))

    def explain(self, key: Key, scenario: Scenario) -> bool:
        """Return True if a case shows a known finding, or if its kind has enough findings."""
        of_kind = [known for known in self.findings if known.is_of_kind(key)]
        is_shown = any(known.explains(key, scenario) for known in of_kind)
        return is_shown or len(of_kind) >= _OF_A_KIND_MAX

    def others(self, key: Key, scenario: Scenario) -> list[Known]:
        """Return known findings of the same kind whose needs a case does not meet."""
        return [
            known
            for known in self.findings
            if known.is_of_kind(key) and not known.needs.met_by(scenario)
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rechecked:
    """An earlier finding, judged again."""

    found: Found
    outcome: Outcome
    reason: str = ""
    """New finding or error; empty if the case passes or has the same finding."""

    def as_dict(self) -> dict[str, object]:
        """Return all fields, ready for JSON."""
        return {
            "key": list(self.found.key),
            "bundle": self.found.bundle,
            "outcome": self.outcome,
            "reason": self.reason,
        }


def recheck(findings: Iterable[Found], *, target: str, device: str = "cpu") -> Iterator[Rechecked]:
    """Judge the shrunk case of each finding again. Findings without a case are skipped.

    Args:
        findings: Findings of earlier runs.
        target: Registered name, or `module:name`.
        device: Device for ranks and reference.

    Raises:
        UsageError: The target does not exist.
    """
    having = [found for found in findings if found.scenario]
    if not having:
        return
    system = import_target(target)
    with WorldPool() as pool:
        for found in having:
            yield _judge(found, target=system, pool=pool, device=device)


def _judge(found: Found, *, target: Target, pool: WorldPool, device: str) -> Rechecked:
    try:
        result = run_case(found.case_again(), pool=pool, target=target, device=device)
    except ZeroSimError as error:
        return Rechecked(found=found, outcome="unknown", reason=str(error))
    # The finding itself may be an unexpected exception.
    except Exception as error:  # noqa: BLE001
        same = found.key[:2] == (Check.INTERNAL_ERROR, type(error).__name__)
        reason = "" if same else f"{type(error).__name__}: {error}"
        return Rechecked(found=found, outcome="fails" if same else "fails-otherwise", reason=reason)
    # The place may differ, because it may move even without shrinking.
    if may_become(found.key, result):
        return Rechecked(found=found, outcome="fails")
    if result.verdict == "pass":
        return Rechecked(found=found, outcome="fixed")
    if result.findings:
        first = result.findings[0]
        reason = f"{first.check}: {first.message}"
        return Rechecked(found=found, outcome="fails-otherwise", reason=reason)
    return Rechecked(found=found, outcome="unknown", reason=result.error or result.verdict)
