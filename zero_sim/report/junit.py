"""JUnit XML of a run, as GitLab, Jenkins and reporters for GitHub read it.

A case is a test: its file the class, its order of addition, schedule, timing and seed among the
properties. What is wrong with it stands in the failure; a case that was not judged, as where the
machine cannot run it, is an error, one that never ran is skipped.
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
    """One case, or one file that is no scenario."""

    # Not a class of tests, whatever it is called.
    __test__ = False

    name: str
    source: str
    """The file that it is from."""
    seconds: float = 0.0
    outcome: str = "passed"
    """`passed`, `failure`, `error` or `skipped`."""
    kind: str = ""
    """The check that found something; of an error, what it is of."""
    message: str = ""
    """The first finding or the error, in a line."""
    text: str = ""
    """All there is to say of it."""
    properties: Mapping[str, str] = field(default_factory=dict)


def case_of(result: CaseResult, *, scenario: Scenario, source: str, text: str) -> TestCase:
    """A case that was judged.

    One that is inconclusive has failed as a test: it could not have shown anything.

    Args:
        result: What came of it.
        scenario: The case, as it was run.
        source: Its file.
        text: All there is to say of it.
    """
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
    """A file that is no scenario."""
    return TestCase(
        name=error.source,
        source=error.source,
        outcome="error",
        kind="zero_sim.scenario",
        message=str(error).partition("\n")[0],
        text=str(error),
    )


def junit_xml(cases: Sequence[TestCase], *, seconds: float, started: str) -> bytes:
    """The document.

    Args:
        cases: What was run, in order.
        seconds: Time of the whole run.
        started: When it began, in ISO 8601.
    """
    counts = {
        "tests": len(cases),
        "failures": sum(case.outcome == "failure" for case in cases),
        "errors": sum(case.outcome == "error" for case in cases),
        "skipped": sum(case.outcome == "skipped" for case in cases),
    }
    sums = {name: str(count) for name, count in counts.items()} | {"time": f"{seconds:.3f}"}
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
        path: The file; one that is there is replaced.
        document: As `junit_xml` gives it.

    Raises:
        UsageError: It cannot be written there.
        EnvironmentProblem: There is no room for it.
    """
    try:
        write_whole(path, document)
    except OSError as error:
        raise unwritten("JUnit XML", path, error) from None


def _element(case: TestCase) -> ElementTree.Element:
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
        outcome = ElementTree.SubElement(element, case.outcome, facts)
        outcome.text = printable(case.text, lines=True)
    if case.text:
        ElementTree.SubElement(element, "system-out").text = printable(case.text, lines=True)
    return element
