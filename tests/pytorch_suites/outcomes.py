"""Recorded outcomes of tests, changes by a run, and their table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

RECORD = Path(__file__).with_name("outcomes.json")
PASS = "pass"
SKIP = "skip"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of one test on each backend."""

    baseline: str
    eager: str
    hostile: str
    reason: str = ""
    """Reason why simulated ranks fail although the baseline passes."""

    @property
    def differs(self) -> bool:
        """True if the test passes in the baseline but not on simulated ranks, in either timing."""
        return self.baseline == PASS and (self.eager, self.hostile) != (PASS, PASS)


Suites = Mapping[str, Mapping[str, Outcome]]


@dataclass(slots=True)
class Record:
    """Recorded outcomes of all suites."""

    torch: str = ""
    """Version of torch used for the record."""
    source: str = ""
    """Version of PyTorch's source that all suites but the installed one come from."""
    suites: dict[str, dict[str, Outcome]] = field(default_factory=dict)


def read_record(path: Path = RECORD) -> Record:
    """Read the record; empty if there is none."""
    if not path.exists():
        return Record()
    data = json.loads(path.read_text())
    suites = {
        suite: {test: Outcome(*fields) for test, fields in tests.items()}
        for suite, tests in data["suites"].items()
    }
    return Record(data["torch"], data["source"], suites)


def write_record(record: Record, path: Path = RECORD) -> None:
    """Write a record, with one line per test."""
    suites = []
    for name, tests in sorted(record.suites.items()):
        lines = []
        for test, outcome in sorted(tests.items()):
            fields = [outcome.baseline, outcome.eager, outcome.hostile]
            fields += [outcome.reason] if outcome.reason else []
            lines.append(f"{json.dumps(test)}: {json.dumps(fields)}")
        body = ",\n".join(f"   {line}" for line in lines)
        suites.append(f"  {json.dumps(name)}: {{\n{body}\n  }}")
    head = f' "torch": {json.dumps(record.torch)},\n "source": {json.dumps(record.source)},\n'
    path.write_text(f'{{\n{head} "suites": {{\n' + ",\n".join(suites) + "\n }\n}\n")


def with_reasons(tests: Mapping[str, Outcome], known: Mapping[str, Outcome]) -> dict[str, Outcome]:
    """Add recorded reasons to those outcomes of a run that differ."""
    return {
        test: Outcome(
            outcome.baseline,
            outcome.eager,
            outcome.hostile,
            known[test].reason if outcome.differs and test in known else "",
        )
        for test, outcome in tests.items()
    }


def find_losses(seen: Suites, known: Suites) -> list[str]:
    """Find tests that no longer pass on simulated ranks, or that differ without a reason."""
    losses = []
    for suite, tests in seen.items():
        recorded = known.get(suite, {})
        losses += [
            f"{suite} {test}: passed on simulated ranks, {name}, and is now: {now}"
            for test, before in recorded.items()
            if test in tests
            for name, was, now in (
                ("eager", before.eager, tests[test].eager),
                ("hostile", before.hostile, tests[test].hostile),
            )
            if was == PASS and now != PASS
        ]
        losses += [
            f"{suite} {test}: passed and is gone"
            for test, before in recorded.items()
            if test not in tests and before.eager == PASS
        ]
        losses += [
            f"{suite} {test}: differs from the baseline and has no reason"
            for test, outcome in tests.items()
            if outcome.differs
            and not outcome.reason
            and not (test in recorded and not recorded[test].differs)
        ]
    return losses


def find_gains(seen: Suites, known: Suites) -> list[str]:
    """Find tests that pass although the record has them as differing."""
    return [
        f"{suite} {test}"
        for suite, tests in seen.items()
        for test, before in known.get(suite, {}).items()
        if before.differs and test in tests and not tests[test].differs
    ]


def table(suites: Suites) -> list[str]:
    """Return a line for each suite, one for the total, and the reason of each test that differs."""
    rows = [("suite", "run", "baseline", "eager", "hostile")]
    rows += [(name, *_counts(tests.values())) for name, tests in suites.items()]
    everything = [outcome for tests in suites.values() for outcome in tests.values()]
    rows.append(("all", *_counts(everything)))
    width = max(len(row[0]) for row in rows)
    lines = [f"{name:{width}} " + " ".join(f"{part:>8}" for part in parts) for name, *parts in rows]
    differing = [
        f"  {test}: {'eager and hostile' if outcome.eager != PASS else 'hostile'}: "
        f"{outcome.reason or 'no reason yet'}"
        for tests in suites.values()
        for test, outcome in tests.items()
        if outcome.differs
    ]
    return [*lines, "", f"{len(differing)} differ from the baseline:", *differing]


def _counts(outcomes: Iterable[Outcome]) -> tuple[str, ...]:
    ran = [outcome for outcome in outcomes if outcome.baseline != SKIP]
    passed = [outcome for outcome in ran if outcome.baseline == PASS]
    parts = [ran, passed]
    parts.append([outcome for outcome in passed if outcome.eager == PASS])
    parts.append([outcome for outcome in passed if outcome.hostile == PASS])
    return tuple(str(len(part)) for part in parts)
