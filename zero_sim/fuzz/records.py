"""Records of a campaign (jobs, batch reports, findings): plain data for any worker."""

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
# Full families per batch. The end of the batch may cut the last family short.
_FAMILIES = 8
SHARDS_MAX = 1_000_000
"""Maximum number of shards. Bounds the list of missing shards in a forged corpus."""
_SEED_BYTES = 8
# SQLite's largest integer.
_ROW_NUMBER_MAX = 2**63 - 1
# Maximum number of features in a batch. A file with more is forged.
_FEATURES_MAX = 1_000
# Maximum number of unobserved quantities in a batch. A file with more is forged.
_UNOBSERVED_MAX = 1_000
_SHOWN_CHARS = 200

_RowNumber = Annotated[int, Field(ge=0, le=_ROW_NUMBER_MAX)]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Counted = Counter[str]
_Record = TypeVar("_Record")


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A distinct finding with its smallest case."""

    key: Key
    message: str
    """The finding as a sentence."""
    seed: int
    """Seed of the batch that found it."""
    case: int
    """Index of the original case in the batch."""
    scenario: str
    """Shrunk case as TOML."""
    bundle: Annotated[str, Field(pattern=r"^([0-9a-f]{12})?$")]
    """Bundle id, which becomes part of paths. Empty without a bundle."""
    text: str
    """Report of the finding."""
    size: str
    """Shrunk case in words: size and non-default settings."""
    places: tuple[str, ...] = ()
    """Parts of the buffer with differences, as in keys. Includes other cases that shrank to the
    same case.
    """
    complete: bool = False
    """True if the search for the smallest case was completed."""

    as_met: bool = False
    """True if the case is not shrunk yet, or an interrupt ended the search."""
    unkept: str = ""
    """Error that prevented the bundle; empty if there was no error."""
    apart: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    """Largest difference between values, from `how_far_apart`. 0 in files of earlier versions."""

    @property
    def is_of(self) -> tuple[object, ...]:
        """Identity of the finding: key without the place, and smallest case."""
        return *self.key[:-1], _untitled(self.scenario)

    def case_again(self) -> Scenario:
        """Return the finding's case.

        Raises:
            ScenarioError: The case cannot be read, for example because another version wrote it.
        """
        (scenario,) = parse_cases(self.scenario, source="the corpus", stem="drawn")
        return scenario

    def joined(self, other: Found) -> Found:
        """Return this finding with the other's places added."""
        places = tuple(dict.fromkeys((*self.places, *other.places)))
        return dataclasses.replace(self, places=places)

    def is_met_by(self, key: str) -> bool:
        """Return True if a case with this key, in report form, may show this finding."""
        # In reports, keys are strings with the place last. An empty place fits any finding.
        kind, _, place = key.rpartition("|")
        return kind == "|".join(self.key[:-1]) and place in ("", *self.places)


@dataclass(frozen=True, kw_only=True, slots=True)
class Head:
    """Settings that all batches in a corpus share.

    Raises:
        UsageError: A number is out of range.
    """

    seed: Annotated[int, Field(ge=0)]
    target: str
    cases: Annotated[int, Field(ge=1)]
    """Cases per batch."""
    shard: tuple[int, int]
    """Shard number, from 1, and number of shards."""
    device: str = "cpu"
    """Device for ranks and reference."""
    options: tuple[tuple[str, str], ...] = ()
    """Names and values of the target's own options, set in all cases."""
    family: int = 1
    """Maximum family size; 1 for no families."""
    order: str | None = None
    """Summation order of all cases, or `unknown`; None for all declared orders."""

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
    """A batch to run on any worker."""

    index: int
    """Index in the campaign, over all shards."""
    seed: int
    """Seed of all cases."""
    cases: int
    target: str
    """Registered name, or `module:name`."""
    device: str = "cpu"
    options: tuple[tuple[str, str], ...] = ()
    family: int = 1
    order: str | None = None
    """See `Head`, also for the three fields above."""
    bundles: str
    """Folder for bundles of findings."""
    known: tuple[Found, ...] = ()
    """Known findings, which are not shrunk again."""
    seconds: float | None = None
    """Time limit for starting cases; None for no limit."""
    shrink_seconds: float = 60.0
    """Time limit for shrinking a finding."""
    unfinished: str = ""
    """File for findings while the batch runs; empty for no file."""
    start: int = 0
    """Index of the first case to run. Earlier runs judged the cases before."""
    unshrunk: tuple[Found, ...] = ()
    """Findings of earlier runs that are not shrunk yet."""


@dataclass(kw_only=True, slots=True)
class Counts:
    """Counts of a batch or campaign."""

    cases: _RowNumber = 0
    """Judged cases, without cases judged for shrinking."""
    seconds: _Seconds = 0.0
    """Total time of all workers, without shrinking."""
    verdicts: _Counted = field(default_factory=Counter)
    params_only: _RowNumber = 0
    """Passing cases where neither averaged gradients nor optimizer state were compared."""
    keys: _Counted = field(default_factory=Counter)
    """Failing cases by key. The parts of a key are joined by `|`."""
    unproved: _Counted = field(default_factory=Counter)
    """Inconclusive cases by check."""
    unobserved: _Counted = field(default_factory=Counter)
    """Cases by unreported quantity."""
    taken: set[str] = field(default_factory=set)
    """Rules that were inferred because the target does not declare them."""

    def add(self, other: Counts) -> None:
        """Add other counts."""
        for name in (each.name for each in dataclasses.fields(self)):
            ours, theirs = getattr(self, name), getattr(other, name)
            if isinstance(ours, int | float):
                setattr(self, name, ours + theirs)
            else:
                # `update` adds Counters and unites sets.
                ours.update(theirs)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchReport:
    """Results of a batch."""

    index: _RowNumber
    seed: int
    counts: Counts
    cases_with: dict[str, int] = field(default_factory=dict)
    """Cases by feature, as bit masks; see `note_features`."""
    found: tuple[Found, ...] = ()
    """New findings."""
    complete: bool = True
    """True if all cases ran."""
    start: _RowNumber = 0
    """Index of the first case. An earlier report contains the cases before."""
    lost: str = ""
    """Reason why the worker died; empty if it did not."""
    futile: str = ""
    """Reason why further cases are useless: no case fits the target, or all end in the same error.
    """

    def may_have_met(self, found: Found) -> bool:
        """Return True if a case of this batch may show a finding."""
        return any(map(found.is_met_by, self.counts.keys))


def _checked(report: BatchReport) -> BatchReport:
    """Return the report if its parts are consistent.

    Raises:
        ValueError: They contradict each other, so no campaign wrote the report.
    """
    counts = report.counts
    # Bits beyond the number of cases belong to no case.
    if len(report.cases_with) > _FEATURES_MAX or any(
        which >> counts.cases for which in report.cases_with.values()
    ):
        raise ValueError(f"expected features of {counts.cases} cases, got others")
    # Earlier versions may have saved a case's verdict before they counted the case.
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
    # Only in reports can parts contradict each other.
    if record is BatchReport:
        return TypeAdapter(Annotated[record, AfterValidator(_checked)])
    return TypeAdapter(record)


def to_json(record: object) -> str:
    """Return a record as JSON for `from_json`."""
    return _adapter(type(record)).dump_json(record).decode()


def from_json(record: type[_Record], data: str | bytes) -> _Record:
    """Return the record in a JSON text.

    Raises:
        ValueError: The text is not JSON of this record, or a value has another type.
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
    """Return a case's TOML without name and description, because these contain its origin."""
    lines = scenario.splitlines()
    return "\n".join(line for line in lines if not line.startswith(("name = ", "description = ")))


def batch_cases(family: int) -> int:
    """Return the number of cases per batch for a maximum family size."""
    return BATCH_CASES if family == 1 else max(BATCH_CASES, _FAMILIES * family)


def batch_seed(seed: int, index: int) -> int:
    """Return a batch's seed, which is the same on all machines."""
    # A hash, so that campaigns with neighbouring seeds have no batches in common.
    digest = hashlib.sha256(f"{seed}/{index}".encode()).digest()
    return int.from_bytes(digest[:_SEED_BYTES], "big")
