"""Records of a campaign: jobs, reports of batches, and findings. Plain data that travels."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from zero_sim.scenario.load import parse_cases
from zero_sim.scenario.spec import Scenario
from zero_sim.shrink import Key

BATCH_CASES = 50
_SEED_BYTES = 8
_FEATURES_MAX = 1_000
"""Of a batch: what has more was not written by us."""
_UNOBSERVED_MAX = 1_000
"""The same of what a target does not tell."""
_BUNDLE = re.compile(r"([0-9a-f]{12})?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """One distinct finding, shrunk."""

    key: Key
    message: str
    """What is wrong, in one sentence."""
    seed: int
    """Of the batch that met it."""
    case: int
    """Which case of that batch, counted from 0."""
    scenario: str
    """The shrunk case, as TOML."""
    bundle: str
    """Id of its bundle; empty where there is none, as for what zero_sim itself raised."""
    text: str
    """The failure block."""
    size: str
    """How large the shrunk case is, in words."""
    places: tuple[str, ...] = ()
    """Parts of the buffer that all that differs lies in, as keys name them, in the shrunk case and
    in those that came to the same one."""
    complete: bool = False
    """Whether nothing smaller that would be tried has this finding."""

    as_met: bool = False
    """Whether its case is yet to be made smaller: nothing began with that, or an interrupt ended
    it."""
    unkept: str = ""
    """Why it has no bundle, where it should have one."""
    apart: float = 0.0
    """How far apart values are in its case, as `how_far_apart` has it; 0 if an earlier version did
    not say."""

    @property
    def is_of(self) -> tuple[object, ...]:
        """What makes two findings one: what a smaller case keeps, and the smallest one."""
        return *self.key[:-1], _untitled(self.scenario)

    def case_again(self) -> Scenario:
        """The case that `scenario` is the TOML of.

        Raises:
            ScenarioError: It cannot be read, as one of another version.
        """
        (scenario,) = parse_cases(self.scenario, source="the corpus", stem="drawn")
        return scenario

    def joined(self, other: Found) -> Found:
        """This finding with what another batch saw of it."""
        places = tuple(dict.fromkeys((*self.places, *other.places)))
        return dataclasses.replace(self, places=places)

    def is_met_by(self, key: str) -> bool:
        """Whether cases with a key, as a report has it, can be of this finding."""
        kind, _, place = key.rpartition("|")
        return kind == "|".join(self.key[:-1]) and place in ("", *self.places)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Found:
        """What a report's `as_dict` holds of a finding.

        Raises:
            TypeError, KeyError, ValueError: It is not of that form.
        """
        fields = dict(data)
        fields["key"] = Key.from_list(data["key"])
        fields["places"] = tuple(data.get("places", ()))
        found = cls(**fields)
        _require_typed(found)
        # Becomes part of paths.
        if not _BUNDLE.fullmatch(found.bundle):
            raise ValueError(f"expected the id of a bundle, got {found.bundle!r}")
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One batch of cases, to be run anywhere."""

    index: int
    """Place in the campaign, whichever shard runs it."""
    seed: int
    """Decides every case."""
    cases: int
    target: str
    """Name of a registered target, or `module:name`."""
    device: str = "cpu"
    """Where ranks and reference compute."""
    options: tuple[tuple[str, str], ...] = ()
    """Options of the target's own that all cases have, by name."""
    family: int = 1
    """Most members of a family; 1 for cases that have none."""
    bundles: str
    """Folder in which findings go."""
    known: tuple[Found, ...] = ()
    """Findings that need not be shrunk again."""
    seconds: float | None = None
    """After so long no further case is begun."""
    shrink_seconds: float = 60.0
    """How long one finding may be shrunk."""
    unfinished: str = ""
    """File in which what it has met so far is kept while it runs; empty for none."""
    start: int = 0
    """The first case to run: those before were run earlier."""
    unshrunk: tuple[Found, ...] = ()
    """What those have met and nobody has made smaller."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchReport:
    """What came of a batch."""

    index: int
    seed: int
    asked: int
    """Cases that it has."""
    cases: int
    """Cases that were run, one after the other; shrinking is not counted."""
    seconds: float
    verdicts: dict[str, int] = field(default_factory=dict)
    params_only: int = 0
    """Cases that pass with neither an averaged gradient nor optimizer state."""
    cases_with: dict[str, int] = field(default_factory=dict)
    """By feature, which cases had it, a bit a case; see `zero_sim.fuzz.coverage`."""
    keys: dict[str, int] = field(default_factory=dict)
    """Failing cases by finding, its key joined by `|`."""
    unproved: dict[str, int] = field(default_factory=dict)
    """Inconclusive cases by the check that says why."""
    unobserved: dict[str, int] = field(default_factory=dict)
    """By what the target does not tell, cases of which nothing is said of that."""
    taken: tuple[str, ...] = ()
    """Rules that were worked out because the target declares none."""
    found: tuple[Found, ...] = ()
    """New ones."""
    complete: bool = True
    """Whether it came to its end."""
    start: int = 0
    """The first case that was run: those before are in an earlier report."""
    lost: str = ""
    """Why nothing is known of it, where its worker died."""
    futile: str = ""
    """Why further cases would show nothing: none fits the target, or all end in one error."""

    def as_dict(self) -> dict[str, object]:
        """Everything, ready for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> BatchReport:
        """What `as_dict` gave.

        Raises:
            TypeError, KeyError, ValueError: It is not of that form.
        """
        fields = dict(data)
        fields["found"] = tuple(map(Found.from_dict, data["found"]))
        fields["taken"] = tuple(data.get("taken", ()))
        # Of an earlier form, from which which case had what cannot be told any more.
        fields.pop("layouts", None)
        report = cls(**fields)
        _require_typed(report)
        if len(report.cases_with) > _FEATURES_MAX or any(
            which >> report.cases for which in report.cases_with.values()
        ):
            raise ValueError(f"expected features of {report.cases} cases, got others")
        # An earlier form kept the verdict of a case that it had not counted yet.
        most = report.cases + (not report.complete)
        for counts in (report.verdicts, report.keys, report.unproved):
            if min(counts.values(), default=0) < 0 or sum(counts.values()) > most:
                raise ValueError(f"expected what came of {report.cases} cases, got {counts}")
        if not 0 <= report.params_only <= report.verdicts.get("pass", 0):
            raise ValueError(
                f"expected params_only of {report.verdicts.get('pass', 0)} passes, got "
                f"{report.params_only}"
            )
        silent = report.unobserved
        if len(silent) > _UNOBSERVED_MAX or any(
            not 0 <= count <= most for count in silent.values()
        ):
            raise ValueError(f"expected what {report.cases} cases did not tell, got {silent}")
        return report


def _require_typed(record: Found | BatchReport) -> None:
    """Hold every field to its type: a corpus may come from anybody.

    Raises:
        TypeError: One is of another.
    """
    hints = get_type_hints(type(record))
    for name, hint in hints.items():
        value = getattr(record, name)
        if hint == dict[str, int]:
            fits = isinstance(value, dict) and all(type(count) is int for count in value.values())
        elif hint is float:
            fits = type(value) in (int, float) and math.isfinite(value)
        elif hint in (str, int, bool):
            fits = type(value) is hint
        else:
            fits = all(isinstance(part, str | Found) for part in value)
        if not fits:
            raise TypeError(f"expected {name} to be {hint}, got {value!r}")


def _untitled(scenario: str) -> str:
    """The TOML of a case without its name and description, which say where it came from."""
    lines = scenario.splitlines()
    return "\n".join(line for line in lines if not line.startswith(("name = ", "description = ")))


def batch_seed(seed: int, index: int) -> int:
    """The seed of one batch of a campaign: the same on any machine."""
    digest = hashlib.sha256(f"{seed}/{index}".encode()).digest()
    return int.from_bytes(digest[:_SEED_BYTES], "big")


def size_in_words(scenario: Scenario) -> str:
    """How much a person has to hold: ranks, params, elements, steps."""
    shapes = scenario.model.shapes
    if shapes is None:
        model = f"model {scenario.model.name}"
    else:
        model = f"{len(shapes)} param{'s' if len(shapes) != 1 else ''} {list(map(list, shapes))}"
    ranks, steps = scenario.world.size, scenario.run.steps
    return (
        f"{ranks} rank{'s' if ranks != 1 else ''}, {model}, {steps} step{'s' if steps != 1 else ''}"
    )
