"""Records of a campaign: jobs, reports of batches, and findings; plain data for any worker."""

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
# Families of full size per batch; the end of a batch may cut the last one short.
_FAMILIES = 8
SHARDS_MAX = 1_000_000
"""Maximum number of shards; bounds the list of missing shards of a forged corpus."""
_SEED_BYTES = 8
# Largest integer of SQLite.
_ROW_NUMBER_MAX = 2**63 - 1
# Maximum number of features of a batch; a file with more is forged.
_FEATURES_MAX = 1_000
# Maximum number of unobserved quantities of a batch; a file with more is forged.
_UNOBSERVED_MAX = 1_000
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
    """The finding in one sentence."""
    seed: int
    """Seed of the batch that found it."""
    case: int
    """Index of the case in the batch."""
    scenario: str
    """The shrunk case, as TOML."""
    bundle: Annotated[str, Field(pattern=r"^([0-9a-f]{12})?$")]
    """Id of its bundle, which becomes part of paths; empty if zero_sim itself raised."""
    text: str
    """The report of the finding."""
    size: str
    """Size of the shrunk case, in words."""
    places: tuple[str, ...] = ()
    """Parts of the buffer with differences, as named in keys, in the shrunk case and in others that
    shrank to it."""
    complete: bool = False
    """True if no smaller case that the search tries has this finding."""

    as_met: bool = False
    """True if its case is not shrunk yet, or an interrupt ended the search."""
    unkept: str = ""
    """Reason why it has no bundle; empty if it has one or needs none."""
    apart: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    """Largest difference of values, from `how_far_apart`; 0 in files of earlier versions."""

    @property
    def is_of(self) -> tuple[object, ...]:
        """Identity of the finding: its key without the place, and its smallest case."""
        return *self.key[:-1], _untitled(self.scenario)

    def case_again(self) -> Scenario:
        """Return the case of the finding.

        Raises:
            ScenarioError: It cannot be read, for example because another version wrote it.
        """
        (scenario,) = parse_cases(self.scenario, source="the corpus", stem="drawn")
        return scenario

    def joined(self, other: Found) -> Found:
        """Return this finding with the places that another batch saw."""
        places = tuple(dict.fromkeys((*self.places, *other.places)))
        return dataclasses.replace(self, places=places)

    def is_met_by(self, key: str) -> bool:
        """Return True if cases with a key, in the form of a report, may show this finding."""
        # Keys in reports are strings with the place last; an empty place fits any finding.
        kind, _, place = key.rpartition("|")
        return kind == "|".join(self.key[:-1]) and place in ("", *self.places)


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """Settings that all batches of a corpus share.

    Raises:
        UsageError: A number is out of range.
    """

    seed: Annotated[int, Field(ge=0)]
    target: str
    cases: Annotated[int, Field(ge=1)]
    """Cases per batch."""
    shard: tuple[int, int]
    """Number of the shard, from 1, and count of shards."""
    device: str = "cpu"
    """Device of the ranks and the reference."""
    options: tuple[tuple[str, str], ...] = ()
    """The target's own options that all cases get, by name."""
    family: int = 1
    """Maximum members of a family."""
    order: str | None = None
    """Summation order of all cases, or `unknown`; None for any that the target declares."""

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
    """One batch of cases, to run on any worker."""

    index: int
    """Index in the campaign, independent of shards."""
    seed: int
    """Determines every case."""
    cases: int
    target: str
    """Name of a registered target, or `module:name`."""
    device: str = "cpu"
    """Device of the ranks and the reference."""
    options: tuple[tuple[str, str], ...] = ()
    """The target's own options that all cases get, by name."""
    family: int = 1
    """Maximum members of a family; 1 for cases without one."""
    order: str | None = None
    """See `Head`."""
    bundles: str
    """Folder for bundles of findings."""
    known: tuple[Found, ...] = ()
    """Findings that need not be shrunk again."""
    seconds: float | None = None
    """Time after which no case is started; None for no limit."""
    shrink_seconds: float = 60.0
    """Limit on the time to shrink one finding."""
    unfinished: str = ""
    """File for findings while the batch runs; empty for none."""
    start: int = 0
    """Index of the first case to run; earlier runs did those before."""
    unshrunk: tuple[Found, ...] = ()
    """Findings of the earlier cases that are not shrunk yet."""


@dataclass(kw_only=True, slots=True)
class Counts:
    """Counts over the cases of a batch, or of a campaign so far."""

    cases: _RowNumber = 0
    """Cases judged, not counting those of shrinking."""
    seconds: _Seconds = 0.0
    """Time of all workers, not counting shrinking."""
    verdicts: _Counted = field(default_factory=Counter)
    params_only: _RowNumber = 0
    """Cases that pass with neither an averaged gradient nor optimizer state."""
    keys: _Counted = field(default_factory=Counter)
    """Failing cases by key, with its parts joined by `|`."""
    unproved: _Counted = field(default_factory=Counter)
    """Inconclusive cases by check."""
    unobserved: _Counted = field(default_factory=Counter)
    """Cases by quantity that the target did not report."""
    taken: set[str] = field(default_factory=set)
    """Rules that were inferred because the target declares none."""

    def add(self, other: Counts) -> None:
        """Add the counts of further cases."""
        for name in (each.name for each in dataclasses.fields(self)):
            ours, theirs = getattr(self, name), getattr(other, name)
            if isinstance(ours, int | float):
                setattr(self, name, ours + theirs)
            else:
                # `update` adds for a Counter and unites for a set.
                ours.update(theirs)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchReport:
    """Results of a batch."""

    index: _RowNumber
    seed: int
    counts: Counts
    cases_with: dict[str, int] = field(default_factory=dict)
    """Bit mask of the cases with a feature, by feature; see `zero_sim.fuzz.coverage`."""
    found: tuple[Found, ...] = ()
    """New findings."""
    complete: bool = True
    """True if all its cases ran."""
    start: _RowNumber = 0
    """Index of its first case; an earlier report contains those before."""
    lost: str = ""
    """Reason why its worker died; empty if it did not."""
    futile: str = ""
    """Reason why further cases are useless: none fits the target, or all end in one error."""

    def may_have_met(self, found: Found) -> bool:
        """Return True if one of its cases may show a finding."""
        return any(map(found.is_met_by, self.counts.keys))


def _checked(report: BatchReport) -> BatchReport:
    """Return the report if its parts are consistent.

    Raises:
        ValueError: They are not, so no campaign wrote it.
    """
    counts = report.counts
    # A bit at or above the number of cases would belong to no case.
    if len(report.cases_with) > _FEATURES_MAX or any(
        which >> counts.cases for which in report.cases_with.values()
    ):
        raise ValueError(f"expected features of {counts.cases} cases, got others")
    # Earlier versions may have saved the verdict of a case before they counted it.
    most = counts.cases + (not report.complete)
    for each in (counts.verdicts, counts.keys, counts.unproved):
        if min(each.values(), default=0) < 0 or each.total() > most:
            raise ValueError(f"expected counts of {counts.cases} cases, got {dict(each)}")
    if counts.params_only > counts.verdicts["pass"]:
        raise ValueError(
            f"expected params_only of {counts.verdicts['pass']} passes, got {counts.params_only}"
        )
    silent = counts.unobserved
    if len(silent) > _UNOBSERVED_MAX or not all(0 <= each <= most for each in silent.values()):
        raise ValueError(f"expected unobserved in {counts.cases} cases, got {dict(silent)}")
    return report


@cache
def _adapter(record: type[_Record]) -> TypeAdapter[_Record]:
    # Only reports have parts that may contradict each other.
    if record is BatchReport:
        return TypeAdapter(Annotated[record, AfterValidator(_checked)])
    return TypeAdapter(record)


def to_json(record: object) -> str:
    """Return a record as JSON for `from_json`."""
    return _adapter(type(record)).dump_json(record).decode()


def from_json(record: type[_Record], data: str | bytes) -> _Record:
    """Return the record of a JSON text.

    Raises:
        ValueError: The text is no such JSON, or a value has another type.
    """
    # Strict, because a corpus may come from a stranger.
    try:
        return _adapter(record).validate_json(data, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = "".join(f"{part}: " for part in first["loc"])
        got = printable(repr(first["input"])[:_SHOWN_CHARS])
        raise ValueError(f"{where}{first['msg']}, got {got}") from None


def _untitled(scenario: str) -> str:
    """Return the TOML of a case without its name and description, which contain its origin."""
    lines = scenario.splitlines()
    return "\n".join(line for line in lines if not line.startswith(("name = ", "description = ")))


def batch_cases(family: int) -> int:
    """Return the number of cases per batch, for families of at most `family` members."""
    return BATCH_CASES if family == 1 else max(BATCH_CASES, _FAMILIES * family)


def batch_seed(seed: int, index: int) -> int:
    """Return the seed of a batch, the same on any machine."""
    # Hashed, so that campaigns with neighbouring seeds share no batches.
    digest = hashlib.sha256(f"{seed}/{index}".encode()).digest()
    return int.from_bytes(digest[:_SEED_BYTES], "big")


def size_in_words(scenario: Scenario) -> str:
    """Return the size of a case in words: ranks, params with shapes, steps."""
    shapes = scenario.model.shapes
    if shapes is None:
        model = f"model {scenario.model.name}"
    else:
        model = f"{len(shapes)} param{'s' if len(shapes) != 1 else ''} {list(map(list, shapes))}"
    ranks, steps = scenario.world.size, scenario.run.steps
    return (
        f"{ranks} rank{'s' if ranks != 1 else ''}, {model}, {steps} step{'s' if steps != 1 else ''}"
    )
