"""Findings that a campaign knows: whether a further case shows one, and whether one is fixed.

[Note: what a known finding explains]
A key alone does not tell: two causes may make the same quantity wrong in the same manner. So a case
counts as one of a known finding only if it has all that the smallest case of that finding has: no
fewer ranks, params, elements and steps, and each setting that is not as by default there. A case
that lacks any of it fails for another reason, and is made smaller by itself, through cases that
lack it, too. Where the search for the smallest case did not come to its end, the key has to do.

[Note: needs]
A case needs no fewer ranks, params, elements and steps than a smallest case has, and each setting
that is not as by default there, to whatever value. All that could go of a smallest case is gone;
but one by one, so that another case may show the same without it, by other means.
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

_NO_NEED = frozenset({"model.name", "system.target", "optimizer.lr", "data.rows"})
"""Settings in which one value does as well as another."""
_OF_A_KIND_MAX = 4
"""Findings whose keys differ in their places alone; of more, further ones are taken for known: one
cause that shows in many ways must not take all the time."""
Outcome = Literal["fixed", "fails", "fails-otherwise", "unknown"]
"""`fixed`: its case passes; `fails`: as it did; `fails-otherwise`: with another finding;
`unknown`: that could not be found out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Needs:
    """What a case must have."""

    size: Size
    settings: frozenset[str]
    """Paths of settings that are not as by default."""

    @classmethod
    def of(cls, smallest: Scenario) -> Self:
        """What a smallest case has."""
        return cls(size=size_of(smallest), settings=_settings_of(smallest))

    def met_by(self, scenario: Scenario) -> bool:
        """Whether a case has all of it."""
        size, least = size_of(scenario), self.size
        is_large_enough = (
            size.ranks >= least.ranks
            and size.params >= least.params
            # No search goes on to a case without elements.
            and max(size.elements, 1) >= least.elements
            and size.steps >= least.steps
        )
        return is_large_enough and self.settings <= _settings_of(scenario)


NOTHING = Needs(size=Size(ranks=0, params=0, elements=0, steps=0, features=0), settings=frozenset())
"""What any case has."""


def _settings_of(scenario: Scenario) -> frozenset[str]:
    return settings_of(scenario) - _NO_NEED


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

    def is_of_kind(self, key: Key) -> bool:
        """Whether a key is this finding's, as far as smaller cases keep it."""
        return key[:-1] == self.key[:-1]

    def explains(self, key: Key, scenario: Scenario) -> bool:
        """Whether a case with a finding of this key shows this one."""
        lies_there = not key.place or key == self.key or key.place in self.places
        return self.is_of_kind(key) and lies_there and self.needs.met_by(scenario)


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
            if known.is_of_kind(key) and not known.needs.met_by(scenario)
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rechecked:
    """What came of a finding."""

    found: Found
    outcome: Outcome
    said: str = ""
    """What the case comes to now, where that is neither a pass nor the finding."""

    def as_dict(self) -> dict[str, object]:
        """Everything, ready for JSON."""
        return {
            "key": list(self.found.key),
            "bundle": self.found.bundle,
            "outcome": self.outcome,
            "said": self.said,
        }


def recheck(findings: Iterable[Found], *, target: str, device: str = "cpu") -> Iterator[Rechecked]:
    """Judge the shrunk case of each finding again; those without one are passed over.

    Args:
        findings: Of an earlier run.
        target: Name of a registered target, or `module:name`.
        device: Where ranks and reference compute.

    Raises:
        UsageError: There is no such target.
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
        return Rechecked(found=found, outcome="unknown", said=str(error))
    # One that nobody foresaw is one way to fail, and was kept as such.
    except Exception as error:  # noqa: BLE001
        same = found.key[:2] == (Check.INTERNAL_ERROR, type(error).__name__)
        said = "" if same else f"{type(error).__name__}: {error}"
        return Rechecked(found=found, outcome="fails" if same else "fails-otherwise", said=said)
    if may_become(found.key, result):
        return Rechecked(found=found, outcome="fails")
    if result.verdict == "pass":
        return Rechecked(found=found, outcome="fixed")
    if result.findings:
        first = result.findings[0]
        said = f"{first.check}: {first.message}"
        return Rechecked(found=found, outcome="fails-otherwise", said=said)
    return Rechecked(found=found, outcome="unknown", said=result.error or result.verdict)
