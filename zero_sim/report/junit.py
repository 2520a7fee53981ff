"""JUnit XML of a run, for GitLab, Jenkins and GitHub reporters.

A case is a test, and its file is the test's class. A case that was not judged is an error, a case
that did not run is skipped.
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
    """A case, or an invalid scenario file."""

    # Otherwise pytest would collect this class because of its name.
    __test__ = False

    name: str
    source: str
    """Scenario file."""
    seconds: float = 0.0
    outcome: str = "passed"
    """`passed`, `failure`, `error` or `skipped`."""
    kind: str = ""
    """Check of the first finding, or the kind of error."""
    message: str = ""
    """First finding or error, on one line."""
    text: str = ""
    """Full report."""
    properties: Mapping[str, str] = field(default_factory=dict)


def case_of(result: CaseResult, *, scenario: Scenario, source: str, text: str) -> TestCase:
    """Return a judged case as a test.

    Args:
        result: Its result.
        scenario: The case with all overrides.
        source: Its file.
        text: Full report.
    """
    # An inconclusive case is a failure, so that CI does not count it as proof.
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
    """Return an invalid scenario file as a test."""
    return TestCase(
        name=error.source,
        source=error.source,
        outcome="error",
        kind="zero_sim.scenario",
        # Only the first line, because viewers list messages. The text has all problems.
        message=str(error).partition("\n")[0],
        text=str(error),
    )


def junit_xml(cases: Sequence[TestCase], *, seconds: float, started: str) -> bytes:
    """Return a run as XML.

    Args:
        cases: Tests in run order.
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
    # Totals on both levels, because some viewers only read one level.
    root = ElementTree.Element("testsuites", {"name": SUITE, **sums})
    facts = {"name": SUITE, "timestamp": started, **sums}
    suite = ElementTree.SubElement(root, "testsuite", facts)
    for case in cases:
        suite.append(_element(case))
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="utf-8", xml_declaration=True) + b"\n"


def write_junit(path: Path, document: bytes) -> None:
    """Write a document atomically.

    Args:
        path: The file; an existing file is replaced.
        document: Bytes from `junit_xml`.

    Raises:
        UsageError: If the file cannot be written.
        EnvironmentProblem: If the disk is full.
    """
    try:
        write_whole(path, document)
    except OSError as error:
        raise unwritten("JUnit XML", path, error) from None


def _element(case: TestCase) -> ElementTree.Element:
    # Viewers group tests by the dots in class names, as for Python modules.
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
        # `printable` escapes control characters, which XML 1.0 forbids.
        outcome = ElementTree.SubElement(element, case.outcome, facts)
        outcome.text = printable(case.text, lines=True)
    # For passing cases too, because their notes list unobserved quantities.
    if case.text:
        ElementTree.SubElement(element, "system-out").text = printable(case.text, lines=True)
    return element
