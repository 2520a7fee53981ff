"""Pages of the site that come from the code: scenario fields, checks, commands, API and gallery."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import mkdocs_gen_files

from zero_sim.findings.records import CaseResult
from zero_sim.report.explain import EXPLANATIONS
from zero_sim.report.svg_buffer_map import buffer_map_svg
from zero_sim.report.text import render_location
from zero_sim.report.walks import render_walk_page
from zero_sim.rules.judging import run_case
from zero_sim.scenario.load import load_scenario
from zero_sim.scenario.schema import scenario_schema
from zero_sim.scenario.spec import ExpectSpec, Scenario
from zero_sim.targets.rank_local import why_missing
from zero_sim.targets.registry import find_target
from zero_sim.walkthrough import walk_lifecycle, walk_ring, walk_zero1

ROOT = Path(__file__).resolve().parents[2]
UPSTREAM = ROOT / "scenarios" / "upstream"
APIS = {
    "zero_sim": ("zero_sim.sim.World", "zero_sim.rules.judging.run_case",
                 "zero_sim.scenario.load.load_scenario"),
    "zero_sim.targets": (
        "zero_sim.targets.protocol", "zero_sim.targets.declared", "zero_sim.targets.numerics",
        "zero_sim.targets.costs", "zero_sim.targets.torch.engines",
    ),
    "zero_sim.testing": ("zero_sim.testing.conformance", "zero_sim.testing.explore"),
}  # fmt: skip


PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
"""Files of the checkout, by their pages."""
LINKS = {
    **PAGES,
    "scenarios/upstream/README.md": "gallery/index.md",
    "LICENSE": "https://www.apache.org/licenses/LICENSE-2.0",
}


def _with_links(text: str) -> str:
    """Return a file of the checkout with links to pages of the site."""
    return re.sub(
        r"\]\(([^)\s]+)\)", lambda m: f"]({LINKS.get(m[1], m[1].removeprefix('docs/'))})", text
    )


def write(path: str, lines: Iterator[str]) -> None:
    with mkdocs_gen_files.open(path, "w") as file:
        file.write("\n".join(lines) + "\n")


def commands() -> Iterator[str]:
    yield "# Commands\n"
    yield "`zero-sim COMMAND --help` prints this text in a terminal.\n"
    yield "::: mkdocs-click\n    :module: zero_sim.cli.main\n    :command: main"
    yield "    :prog_name: zero-sim\n    :depth: 1\n    :style: table\n"


def scenario_fields() -> Iterator[str]:
    schema = scenario_schema()
    records = schema["$defs"]
    yield "# Scenario fields\n"
    yield "A scenario is a TOML file. `zero-sim schema` prints these fields as a JSON Schema.\n"
    yield from _fields("The file", schema, records)
    for name, record in sorted(records.items()):
        yield from _fields(name.removesuffix("Spec"), record, records)


def _fields(title: str, record: dict, records: dict) -> Iterator[str]:
    yield f"## {title}\n"
    yield f"{_cell(record.get('description', ''))}\n"
    yield "| field | values | default | meaning |"
    yield "|---|---|---|---|"
    for name, field in record["properties"].items():
        if name == "matrix":
            field = {key: value for key, value in field.items() if key != "properties"}
        default = f"`{_toml(field['default'])}`" if "default" in field else ""
        meaning = _cell(field.get("description", ""))
        yield f"| `{name}` | {_values(field)} | {default} | {meaning} |"
    yield ""


def _values(field: dict) -> str:
    if "enum" in field:
        return ", ".join(f"`{_toml(value)}`" for value in field["enum"])
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2].removesuffix("Spec")
        return f"table, see [{name}](#{name.lower()})"
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_values(each) for each in field["anyOf"]))
    kind = field.get("type", "")
    if kind == "array" and isinstance(field.get("items"), dict):
        return f"array of {_values(field['items'])}"
    bounds = [
        f"{sign} {field[key]:,}"
        for key, sign in (
            ("minimum", "≥"),
            ("exclusiveMinimum", ">"),
            ("maximum", "≤"),
            ("exclusiveMaximum", "<"),
        )
        if key in field
    ]
    return " ".join([str(kind), *bounds])


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def checks() -> Iterator[str]:
    yield "# Checks\n"
    yield "Each finding names its check. `zero-sim explain CHECK` prints one section.\n"
    for check, entry in EXPLANATIONS.items():
        yield f"## {check}\n"
        yield f"{entry.meaning}\n"
        yield f"**Why it matters.** {entry.why}\n"
        yield "**Usual causes**\n"
        yield from (f"- {_cell(cause)}" for cause in entry.causes)
        yield f"\n**Next.** {entry.next}\n"
        if entry.seen_in:
            yield "**Seen in**\n"
            yield from (f"- {_cell(bug)}" for bug in entry.seen_in)
        yield ""


def api() -> Iterator[str]:
    yield "# Python API\n"
    for module, names in APIS.items():
        yield f"**{module}**\n"
        yield from (f"::: {name}\n" for name in names)


def gallery() -> Iterator[tuple[str, str]]:
    """Yield name and title of each known fault, and write its page."""
    for path in sorted(UPSTREAM.glob("*.md")):
        if path.stem == "README":
            continue
        text = path.read_text()
        title = re.match(r"# (.*)", text)
        assert title, path
        write(f"gallery/{path.stem}.md", _gallery_page(path.stem, text))
        yield path.stem, title[1]


def _gallery_page(name: str, text: str) -> Iterator[str]:
    yield text
    case, script = UPSTREAM / f"{name}.toml", UPSTREAM / f"{name}.py"
    if case.exists():
        scenario = load_scenario(case)
        yield from _finding(name, scenario)
        yield f"## The smallest case\n\n{scenario.description}\n"
        yield f"```toml\n{case.read_text()}```\n"
        yield f"Run it with `zero-sim run scenarios/upstream/{name}.toml`.\n"
    if script.exists():
        yield f"## Without zero_sim\n\n```python\n{script.read_text()}```\n"


def _finding(name: str, scenario: Scenario) -> Iterator[str]:
    """Yield the expected finding of a case, as a picture and a table.

    Yield nothing if the library is not installed, or if its installed version has the fault fixed.
    """
    if why_missing(find_target(scenario.system.target)):
        return
    result: CaseResult = run_case(replace(scenario, expect=ExpectSpec()))
    first = next((f for f in result.findings if f.check == scenario.expect.finding), None)
    if first is None:
        return
    yield "## The finding\n"
    if result.strip is not None and result.strip.check == first.check:
        with mkdocs_gen_files.open(f"gallery/{name}.svg", "w") as file:
            file.write(buffer_map_svg(result.strip, title=f"Where {first.check} differs"))
        yield f"![Flat buffer with the elements that differ]({name}.svg)\n"
    extent = f"{first.differ_count} of {first.compared_count}" if first.differ_count else ""
    yield f"| check | [{first.check}](../reference/checks.md#{first.check.replace('.', '')}) |"
    yield "|---|---|"
    rows = {
        "message": _cell(first.message),
        "at": render_location(first),
        "expected": first.expected_value,
        "got": first.got_value,
        "elements that differ": extent,
    }
    yield from (f"| {row} | {value} |" for row, value in rows.items() if value)
    yield ""


def walkthroughs() -> Iterator[str]:
    """Yield the page that lists the walkthroughs, and write their own pages."""
    yield "# Walkthroughs\n"
    yield "Every number on these pages comes from a run. Arrow keys move from step to step.\n"
    walks = {"zero1": walk_zero1, "ring": walk_ring, "lifecycle": walk_lifecycle}
    for name, make in walks.items():
        walk = make()
        with mkdocs_gen_files.open(f"walkthrough/{name}.html", "w") as file:
            file.write(render_walk_page(walk))
        yield f"- [{walk.title}]({name}.html), {len(walk.steps)} steps. {walk.about}"
    yield "\n`zero-sim walkthrough step --scenario FILE --html PAGE` writes one for your own case."


write("reference/commands.md", commands())
write("reference/scenario.md", scenario_fields())
write("reference/checks.md", checks())
write("reference/api.md", api())
write("walkthrough/index.md", walkthroughs())
for path, page in PAGES.items():
    write(page, iter([_with_links((ROOT / path).read_text())]))
entries = list(gallery())
write("gallery/index.md", iter([
    "# Gallery\n",
    "Faults that zero_sim found in released versions of libraries. Each page is a report for the "
    "library's authors: the version, the output, the cause, the smallest case, and a script that "
    "shows the fault without zero_sim.\n",
    *(f"- [{title}]({name}.md)" for name, title in entries),
]))  # fmt: skip
