"""Findings as one HTML page that stands alone: no script, no font, nothing from elsewhere.

Bundles may come from anybody. All that is in them is escaped (`zero_sim.report.markup`), and the
page forbids its reader's browser to load or run anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from zero_sim.bundle import Bundle
from zero_sim.findings.records import Finding
from zero_sim.host.files import unwritten, write_whole
from zero_sim.report.calls import calls_near, observed_grads
from zero_sim.report.commands import replay_command
from zero_sim.report.explain import EXPLANATIONS
from zero_sim.report.html_calls import near_calls
from zero_sim.report.html_tables import calls_table, table, values_table
from zero_sim.report.markup import Markup, element, joined
from zero_sim.report.svg_buffer_map import buffer_map_pictures
from zero_sim.report.svg_timeline import draw_timeline
from zero_sim.report.text import render_finding, render_location
from zero_sim.report.text_buffer_map import describe_buffer_map, describe_spread, equal_elems
from zero_sim.scenario.dump import to_chosen_toml, to_toml

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
STYLE = """
:root { color-scheme: light dark; --ink: #1a1c20; --paper: #fcfcfa; --soft: #eceef1;
  --line: #c9ccd2; --dim: #5c626d; --bad: #c62828; --badsoft: #fbe3e1; --own: #e3edfb; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e6ea; --paper: #16181c; --soft: #22262c;
  --line: #3c424c; --dim: #9aa1ad; --bad: #ff7369; --badsoft: #4a2422; --own: #1f3352; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 75rem; padding: 1rem; color: var(--ink);
  background: var(--paper); font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.25rem; } h3 { font-size: 1.05rem; margin: 1.5rem 0 0; }
article { border-top: 1px solid var(--line); margin-top: 2rem; }
p, li { max-width: 50rem; } p { margin: .4rem 0; }
.dim { color: var(--dim); }
a { color: inherit; }
pre, code, td { font-family: ui-monospace, monospace; font-size: .85rem; }
pre { background: var(--soft); padding: .6rem .8rem; overflow-x: auto; border-radius: .3rem; }
summary { cursor: pointer; margin: .6rem 0; }
.scroll { overflow-x: auto; max-width: 100%; margin: .5rem 0; }
.tall { max-height: 26rem; overflow-y: auto; border: 1px solid var(--line); }
table { border-collapse: collapse; }
th, td { text-align: left; padding: .1rem .7rem; white-space: nowrap;
  overflow-wrap: normal; border-bottom: 1px solid var(--soft); }
th { position: sticky; top: 0; background: var(--soft); font-size: .85rem; }
tr.bad td { background: var(--badsoft); } tr.own td { background: var(--own); }
svg.timeline { display: block; width: 100%; min-width: 56rem; height: auto; }
.hint { display: none; color: var(--dim); } @media (max-width: 60rem) { .hint { display: block; } }
.picture { display: grid; grid-template-columns: 3.8rem minmax(0, 1fr); margin: .5rem 0; }
.labels { padding-top: 18px; } svg.strip { overflow: visible; }
.labels span { display: block; height: 26px; line-height: 22px;
  font: 12px/22px ui-monospace, monospace; }
.legend span { display: inline-block; margin-right: 1.1rem; }
.key { display: inline-block; width: 1.1rem; height: .8rem; margin-right: .35rem;
  vertical-align: baseline; border: 1px solid var(--line); }
.missing { border-left: .3rem solid var(--bad); padding-left: .6rem; }
table.near { width: 100%; } table.near td { white-space: normal; vertical-align: top;
  padding: .15rem .35rem; overflow-wrap: anywhere; }
table.near th { white-space: normal; padding: .1rem .35rem; }
table.near td.rank { width: 1.6rem; } table.near td.rank .key { margin: 0; width: .9rem; }
table.near th.own { text-decoration: underline; }
table.near tr.step { background: var(--own); } table.near tr.when td { color: var(--dim); }
table.near tr.suspect td { background: var(--badsoft); }
table.near tr.suspect td:first-child { border-left: .3rem solid var(--bad); }
svg text { font: 12px ui-monospace, monospace; fill: var(--ink); pointer-events: none; }
svg text.in { fill: #16181c; } svg .tick { font-size: 11px; fill: var(--dim); }
svg rect.part { fill: #d5d8dd; stroke: #16181c; stroke-width: .5; }
svg rect.padding { fill: #a3a7ae; stroke: #16181c; stroke-dasharray: 3 2; }
svg rect.unowned { fill: #fff; stroke: #c62828; stroke-width: 1.5; stroke-dasharray: 3 2; }
svg rect.differs { fill: var(--bad); stroke: var(--bad); stroke-width: 3; }
svg rect.veil { fill: var(--bad); opacity: .16;
  pointer-events: none; }
.step { fill: var(--own); } .key.step { background: var(--own); }
svg text.call { font-size: 8px; fill: #16181c; }
.rs { fill: #7fa9ee; background: #7fa9ee; } .ar { fill: #f0ad5c; background: #f0ad5c; }
.ag { fill: #8fcf98; background: #8fcf98; } .aa { fill: #6fcfc9; background: #6fcfc9; }
.bc { fill: #e8dc72; background: #e8dc72; } .mail { fill: #d3a9e8; background: #d3a9e8; }
.other { fill: #c4c8cf; background: #c4c8cf; }
.open { stroke: var(--bad); stroke-dasharray: 3 2; } svg rect.refused, .key.refused
  { fill: var(--bad); background: var(--bad); }
.key.open, .key.lacks { border: 1px dashed var(--bad); background: none; }
svg rect.suspect { stroke: #b3001b; stroke-width: 2.5; }
.key.suspect { border: 2px solid #d3283f; background: none; }
"""


def write_page(path: Path, bundles: Sequence[Bundle], *, bundles_folder: Path | None) -> None:
    """Write the page.

    Args:
        path: The file; one that is there is replaced.
        bundles: What to tell of.
        bundles_folder: Where they are kept, if not where commands look for them anyway.

    Raises:
        UsageError: It cannot be written there.
        EnvironmentProblem: There is no room for it.
    """
    page = render_page(bundles, bundles_folder=bundles_folder)
    try:
        write_whole(path, page.encode(errors="replace"))
    except OSError as error:
        raise unwritten("a page", path, error) from None


def page_head(title: str, *, policy: str, style: str) -> Markup:
    """The head of a page that stands alone.

    Args:
        title: What it is about.
        policy: What it may load and run, as a Content-Security-Policy.
        style: CSS, ours alone: it does not survive escaping, and is not escaped.
    """
    return element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", f"zero_sim: {title}"),
        element("style", Markup(style)),
    )


def render_page(bundles: Sequence[Bundle], *, bundles_folder: Path | None = None) -> str:
    """The page as text; see `write_page`."""
    count = f"{len(bundles)} failed case{'' if len(bundles) == 1 else 's'}"
    head = page_head(count, policy=_POLICY, style=STYLE)
    body = element(
        "body",
        element("h1", f"zero_sim: {count}"),
        _contents(bundles) if len(bundles) > 1 else "",
        *(_article(bundle, bundles_folder=bundles_folder) for bundle in bundles),
    )
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


def _contents(bundles: Sequence[Bundle]) -> Markup:
    rows = [
        (
            "",
            (
                element("a", bundle.id, href=f"#b-{bundle.id}"),
                bundle.scenario.name,
                bundle.findings[0].check,
                render_location(bundle.findings[0]),
            ),
        )
        for bundle in bundles
    ]
    return table(("bundle", "case", "first finding", "where"), rows)


def _article(bundle: Bundle, *, bundles_folder: Path | None) -> Markup:
    first = bundle.findings[0]
    written = f", written {bundle.written}" if bundle.written else ""
    return element(
        "article",
        element("h2", f"{first.check}: {first.message}"),
        element("p", f"case {bundle.scenario.name}, bundle {bundle.id}{written}", class_="dim"),
        element("pre", render_finding(first)),
        *_strip(bundle),
        *_timeline(bundle),
        *_values(bundle),
        *_others(bundle),
        *_case(bundle, bundles_folder=bundles_folder),
        *_explanation(first.check),
        *_run(bundle),
        id=f"b-{bundle.id}",
    )


def _strip(bundle: Bundle) -> Iterator[Markup]:
    buffer_map = bundle.strip
    if buffer_map is None:
        return
    yield element("h3", "Where it differs")
    of = "" if buffer_map.check == bundle.findings[0].check else f"{buffer_map.check}: "
    yield element("p", f"{of}{describe_buffer_map(buffer_map)}")
    equal = equal_elems(buffer_map)
    # With less than one equal element a part, no place tells more than another.
    if equal is not None and equal < len(buffer_map.pieces):
        spread = describe_spread(buffer_map)
        yield element("p", f"{spread[0].upper()}{spread[1:]}.")
        summary = element("summary", "The buffer as a picture")
        yield element("details", summary, buffer_map_pictures(buffer_map))
        return
    if (buffer_map.start, buffer_map.stop) != (0, buffer_map.elems):
        yield element("p", f"Of it, elements [{buffer_map.start:,}, {buffer_map.stop:,}):")
    yield buffer_map_pictures(buffer_map)


def _timeline(bundle: Bundle) -> Iterator[Markup]:
    if not bundle.logs or not bundle.logs[-1].collectives:
        return
    first, log = bundle.findings[0], bundle.logs[-1]
    buffer_map = bundle.strip
    shows_grads = observed_grads(bundle.notes)
    nearby = calls_near(log, first, buffer_map, shows_grads=shows_grads)
    suspects = () if nearby is None else [call.index for call in nearby.suspects]
    picture, said = draw_timeline(log, first, suspects=suspects)
    yield element("h3", "Calls of torch.distributed around it")
    near = near_calls(log, first, buffer_map, shows_grads=shows_grads)
    if near is not None:
        yield near
    world = f" of world {len(bundle.logs)} of {len(bundle.logs)}" if len(bundle.logs) > 1 else ""
    title = element("summary", f"The calls of all ranks in time: {said}{world}")
    # Where no call is near, all of them are what there is to see.
    yield element("details", title, picture, open="" if near is None else None)
    calls, said = calls_table(log, first)
    yield element("details", element("summary", f"The calls as a table: {said}"), calls)


def _values(bundle: Bundle) -> Iterator[Markup]:
    found = [f for f in bundle.findings if f.evidence is not None and f.evidence.expected.numel()]
    if found:
        yield element("h3", "Values around the first difference")
    for index, finding in enumerate(found):
        assert finding.evidence is not None
        rank = "" if finding.rank is None else f"rank {finding.rank}, "
        param = "" if finding.param is None else f", {finding.param}"
        title = f"{rank}{finding.check}: {finding.message}{param}"
        content = element("summary", title), values_table(finding, finding.evidence)
        yield element("details", *content, open="" if index == 0 else None)


def _others(bundle: Bundle) -> Iterator[Markup]:
    others: Sequence[Finding] = bundle.findings[1:]
    if others:
        yield element("h3", "Other findings of the same step")
        yield element("pre", "\n\n".join(render_finding(finding) for finding in others))


def _case(bundle: Bundle, *, bundles_folder: Path | None) -> Iterator[Markup]:
    yield element("h3", "How to repeat it")
    ran = bundle.ran
    again = replay_command(
        bundle.id, bundles=bundles_folder, target=ran.target, device=ran.device_named
    )
    yield element("pre", again)
    yield element("p", "The case, without what is as by default:")
    yield element("pre", to_chosen_toml(bundle.scenario))
    full = element("pre", to_toml(bundle.scenario))
    yield element("details", element("summary", "The case with every default"), full)


def _explanation(check: str) -> Iterator[Markup]:
    explanation = EXPLANATIONS.get(check)
    if explanation is None:
        # A bundle may be of a newer version, or made up.
        return
    yield element("h3", f"What {check} means")
    yield element("p", explanation.meaning)
    yield element("p", explanation.why)
    for title, entries in (
        ("Usual causes:", explanation.causes),
        ("Nearest public bugs:", explanation.seen_in),
    ):
        if entries:
            yield element("p", title)
            yield element("ul", *(element("li", entry) for entry in entries))


def _run(bundle: Bundle) -> Iterator[Markup]:
    environment = bundle.environment
    lines = [f"note: {note}" for note in bundle.notes]
    lines.append(
        f"zero_sim {environment.zero_sim}, torch {environment.torch}, Python {environment.python}, "
        f"numpy {environment.numpy}, {environment.platform}, {environment.cpu_capability}"
    )
    text = joined(element("p", line, class_="dim") for line in lines)
    yield element("details", element("summary", "Notes and environment"), text)
