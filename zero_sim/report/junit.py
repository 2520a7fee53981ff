"""JUnit XML of a run, in the form that GitLab, Jenkins and reporters for GitHub read.

A case is a test and its file the class. Properties contain the summation order, schedule, timing
and seed, the failure contains the report. A case that could not be judged is an error, a case that
never ran is skipped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from zero_sim.errors import ScenarioError
from zero_sim.host.files import unwritten, write_whole
from zero_sim.untrusted import printable

if TYPE_CHECKING:
    from zero_sim.findings.records import CaseResult
    from zero_sim.scenario.spec import Scenario

SUITE = "zero-sim"


@dataclass(frozen=True, kw_only=True, slots=True)
class TestCase:
    """One case, or one invalid scenario file."""

    # pytest would otherwise collect this class because of its name.
    __test__ = False

    name: str
    source: str
    """Its file."""
    seconds: float = 0.0
    outcome: str = "passed"
    """`passed`, `failure`, `error` or `skipped`."""
    kind: str = ""
    """Check of the first finding, or the kind of error."""
    message: str = ""
    """First finding or error, in one line."""
    text: str = ""
    """Full report."""
    properties: Mapping[str, str] = field(default_factory=dict)


def case_of(result: CaseResult, *, scenario: Scenario, source: str, text: str) -> TestCase:
    """Return the test of a judged case.

    Args:
        result: Its result.
        scenario: The case with all overrides.
        source: Its file.
        text: Full report.
    """
    # An inconclusive case is a failure, because CI must not count it as a proof.
    world = scenario.world
    first = result.findings[0] if result.findings else None
    outcome = {"pass": "passed", "error": "error"}.get(result.verdict, "failure")
    return TestCase(
        name=result.id,
        source=source,
        seconds=result.seconds,
        outcome=outcome,
        kind="zero_sim.error" if first is None else first.check,
        message=result.error or ("" if first is None else f"{first.check}: {first.message}"),
        text=text,
        properties={
            "verdict": result.verdict,
            "scope": result.scope,
            "order": world.order if world.order_known else "any",
            "schedule": world.schedule,
            "timing": world.timing,
            "seed": str(scenario.run.seed),
            "compared_elems": str(result.compared_elems),
            "unobserved": ", ".join(result.unobserved),
        },
    )


def file_of(error: ScenarioError) -> TestCase:
    """Return the test of an invalid scenario file."""
    return TestCase(
        name=error.source,
        source=error.source,
        outcome="error",
        kind="zero_sim.scenario",
        # One line, because viewers show the message in a list. The text has all problems.
        message=str(error).partition("\n")[0],
        text=str(error),
    )


def junit_xml(cases: Sequence[TestCase], *, seconds: float, started: str) -> bytes:
    """Return the document.

    Args:
        cases: Tests in the order of the run.
        seconds: Time of the whole run.
        started: Start time in ISO 8601.
    """
    counts = {
        "tests": len(cases),
        "failures": sum(case.outcome == "failure" for case in cases),
        "errors": sum(case.outcome == "error" for case in cases),
        "skipped": sum(case.outcome == "skipped" for case in cases),
    }
    sums = {name: str(count) for name, count in counts.items()} | {"time": f"{seconds:.3f}"}
    # Totals on both levels, because some viewers read only one of them.
    root = ElementTree.Element("testsuites", {"name": SUITE, **sums})
    facts = {"name": SUITE, "timestamp": started, **sums}
    suite = ElementTree.SubElement(root, "testsuite", facts)
    for case in cases:
        suite.append(_element(case))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="utf-8", xml_declaration=True) + b"\n"


def write_junit(path: Path, document: bytes) -> None:
    """Write the document, whole or not at all.

    Args:
        path: The file; an existing one is replaced.
        document: Bytes from `junit_xml`.

    Raises:
        UsageError: The file cannot be written.
        EnvironmentProblem: The disk is full.
    """
    try:
        write_whole(path, document)
    except OSError as error:
        raise unwritten("JUnit XML", path, error) from None


def _element(case: TestCase) -> ElementTree.Element:
    # Viewers group tests by the dots of the class name, as if it were a module.
    folder = Path(case.source).with_suffix("")
    element = ElementTree.Element(
        "testcase",
        {
            "name": printable(case.name),
            "classname": printable(".".join(part for part in folder.parts if part != "/")),
            "file": printable(case.source),
            "time": f"{case.seconds:.3f}",
        },
    )
    if case.properties:
        properties = ElementTree.SubElement(element, "properties")
        for name, value in case.properties.items():
            ElementTree.SubElement(
                properties, "property", {"name": name, "value": printable(value)}
            )
    if case.outcome != "passed":
        facts = {"message": printable(case.message)}
        if case.outcome != "skipped":
            facts["type"] = printable(case.kind)
        # `printable` also spells out control characters, which XML 1.0 does not allow.
        outcome = ElementTree.SubElement(element, case.outcome, facts)
        outcome.text = printable(case.text, lines=True)
    # Passing cases too, because their notes list quantities that were not observed.
    if case.text:
        ElementTree.SubElement(element, "system-out").text = printable(case.text, lines=True)
    return element
