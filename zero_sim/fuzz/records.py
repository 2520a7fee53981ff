"""Records of a campaign: jobs, reports of batches, and findings. Plain data that travels."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, TypeVar

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from zero_sim.errors import UsageError
from zero_sim.scenario.load import parse_cases
from zero_sim.scenario.spec import Scenario
from zero_sim.shrink import Key
from zero_sim.untrusted import printable

BATCH_CASES = 50
_FAMILIES = 8
"""Of the most members that there is room for in a batch: its last one may be cut short."""
SHARDS_MAX = 1_000_000
"""Shards of a campaign, so that a stranger's corpus cannot make a reader list more of them."""
_SEED_BYTES = 8
_ROW_NUMBER_MAX = 2**63 - 1
"""Largest integer of SQLite."""
_FEATURES_MAX = 1_000
"""Of a batch: what has more was not written by us."""
_UNOBSERVED_MAX = 1_000
"""The same of what a target does not tell."""
_SHOWN_CHARS = 200

_RowNumber = Annotated[int, Field(ge=0, le=_ROW_NUMBER_MAX)]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Counted = Counter[str]
_Record = TypeVar("_Record")


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
    bundle: Annotated[str, Field(pattern=r"^([0-9a-f]{12})?$")]
    """Id of its bundle, which becomes part of paths; empty if zero_sim itself raised."""
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
    apart: Annotated[float, Field(allow_inf_nan=False)] = 0.0
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """What batches of one corpus have in common.

    Raises:
        UsageError: A number is out of range.
    """

    seed: Annotated[int, Field(ge=0)]
    target: str
    cases: Annotated[int, Field(ge=1)]
    """Cases of a batch."""
    shard: tuple[int, int]
    """Which shard of how many, counted from 1."""
    device: str = "cpu"
    """Where ranks and reference compute."""
    options: tuple[tuple[str, str], ...] = ()
    """Options of the target's own that all cases have."""
    family: int = 1
    """Most members of a family."""
    order: str | None = None
    """Order of addition of all cases, or `unknown`; any that the target declares, if omitted."""

    def __post_init__(self) -> None:
        number, count = self.shard
        if not 1 <= number <= count <= SHARDS_MAX:
            raise UsageError(
                f"expected a shard of 1/N to N/N, with N of at most {SHARDS_MAX:,}, "
                f"got {number}/{count}."
            )
        if self.family < 1:
            raise UsageError(f"expected a family of at least 1, got {self.family}")


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
    order: str | None = None
    """As in `Head`."""
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


@dataclass(kw_only=True, slots=True)
class Counts:
    """Counts over cases: of a batch, or of a campaign so far."""

    cases: _RowNumber = 0
    """Cases that were run, one after the other; shrinking is not counted."""
    seconds: _Seconds = 0.0
    """Over all workers; without shrinking."""
    verdicts: _Counted = field(default_factory=Counter)
    params_only: _RowNumber = 0
    """Cases that pass with neither an averaged gradient nor optimizer state."""
    keys: _Counted = field(default_factory=Counter)
    """Failing cases by finding, its key joined by `|`."""
    unproved: _Counted = field(default_factory=Counter)
    """Inconclusive cases by the check that says why."""
    unobserved: _Counted = field(default_factory=Counter)
    """By what the target does not tell, cases of which nothing is said of that."""
    taken: set[str] = field(default_factory=set)
    """Rules that were worked out because the target declares none."""

    def add(self, other: Counts) -> None:
        """Add the counts of further cases."""
        for name in (each.name for each in dataclasses.fields(self)):
            ours, theirs = getattr(self, name), getattr(other, name)
            if isinstance(ours, int | float):
                setattr(self, name, ours + theirs)
            else:
                ours.update(theirs)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchReport:
    """What came of a batch."""

    index: _RowNumber
    seed: int
    counts: Counts
    cases_with: dict[str, int] = field(default_factory=dict)
    """By feature, which cases had it, a bit a case; see `zero_sim.fuzz.coverage`."""
    found: tuple[Found, ...] = ()
    """New ones."""
    complete: bool = True
    """Whether it came to its end."""
    start: _RowNumber = 0
    """The first case that was run: those before are in an earlier report."""
    lost: str = ""
    """Why nothing is known of it, where its worker died."""
    futile: str = ""
    """Why further cases would show nothing: none fits the target, or all end in one error."""

    def may_have_met(self, found: Found) -> bool:
        """True if one of its cases can be of a finding."""
        return any(map(found.is_met_by, self.counts.keys))


def _checked(report: BatchReport) -> BatchReport:
    """The report, if its parts can belong together.

    Raises:
        ValueError: They cannot: it was not written by a campaign.
    """
    counts = report.counts
    if len(report.cases_with) > _FEATURES_MAX or any(
        which >> counts.cases for which in report.cases_with.values()
    ):
        raise ValueError(f"expected features of {counts.cases} cases, got others")
    # An earlier form kept the verdict of a case that it had not counted yet.
    most = counts.cases + (not report.complete)
    for each in (counts.verdicts, counts.keys, counts.unproved):
        if min(each.values(), default=0) < 0 or each.total() > most:
            raise ValueError(f"expected what came of {counts.cases} cases, got {dict(each)}")
    if counts.params_only > counts.verdicts["pass"]:
        raise ValueError(
            f"expected params_only of {counts.verdicts['pass']} passes, got {counts.params_only}"
        )
    silent = counts.unobserved
    if len(silent) > _UNOBSERVED_MAX or not all(0 <= each <= most for each in silent.values()):
        raise ValueError(f"expected what {counts.cases} cases did not tell, got {dict(silent)}")
    return report


@cache
def _adapter(record: type[_Record]) -> TypeAdapter[_Record]:
    if record is BatchReport:
        return TypeAdapter(Annotated[record, AfterValidator(_checked)])
    return TypeAdapter(record)


def to_json(record: object) -> str:
    """A record as JSON, for `from_json`."""
    return _adapter(type(record)).dump_json(record).decode()


def from_json(record: type[_Record], data: str | bytes) -> _Record:
    """The record that JSON holds, every value of its type: a corpus may come from anybody.

    Raises:
        ValueError: It is no such JSON.
    """
    try:
        return _adapter(record).validate_json(data, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = "".join(f"{part}: " for part in first["loc"])
        got = printable(repr(first["input"])[:_SHOWN_CHARS])
        raise ValueError(f"{where}{first['msg']}, got {got}") from None


def _untitled(scenario: str) -> str:
    """The TOML of a case without its name and description, which say where it came from."""
    lines = scenario.splitlines()
    return "\n".join(line for line in lines if not line.startswith(("name = ", "description = ")))


def batch_cases(family: int) -> int:
    """Number of cases of each batch but the last one, for families of so many members."""
    return BATCH_CASES if family == 1 else max(BATCH_CASES, _FAMILIES * family)


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
