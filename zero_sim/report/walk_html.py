"""Walks as pages that stand alone: a step at a time, with keys; nothing from elsewhere.

Without a script all steps are there, one below the other. The page allows its one script by its
hash and nothing else; whatever comes from files is escaped (`zero_sim.report.markup`).
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from pathlib import Path

from zero_sim.host.files import unwritten, write_whole
from zero_sim.report.html import STYLE, page_head
from zero_sim.report.markup import Markup, element, joined
from zero_sim.report.walks import Bars, Cell, Step, Table, Walk

_SCRIPT = """
const steps = [...document.querySelectorAll('section.walk')];
const place = document.getElementById('place');
let now = 0;
function show(index) {
  now = Math.min(Math.max(index, 0), steps.length - 1);
  steps.forEach((step, i) => { step.hidden = i !== now; });
  place.textContent = (now + 1) + ' of ' + steps.length;
  document.getElementById('back').disabled = now === 0;
  document.getElementById('on').disabled = now === steps.length - 1;
  if (location.hash !== '#' + (now + 1)) history.replaceState(null, '', '#' + (now + 1));
}
document.getElementById('back').onclick = () => show(now - 1);
document.getElementById('on').onclick = () => show(now + 1);
document.addEventListener('keydown', (event) => {
  if (event.altKey || event.ctrlKey || event.metaKey) return;
  const to = { ArrowRight: now + 1, ArrowLeft: now - 1, n: now + 1, p: now - 1, ' ': now + 1,
    Home: 0, End: steps.length - 1 }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  show(to);
});
window.addEventListener('hashchange', () => show((parseInt(location.hash.slice(1)) || 1) - 1));
document.body.classList.add('stepped');
show((parseInt(location.hash.slice(1)) || 1) - 1);
"""
_WALK_STYLE = """
nav { display: none; position: sticky; top: 0; background: var(--paper); padding: .5rem 0;
  border-bottom: 1px solid var(--line); z-index: 1; gap: .6rem; align-items: center;
  flex-wrap: wrap; }
body.stepped nav { display: flex; } nav button { font: inherit; padding: .25rem .9rem;
  color: inherit; background: var(--soft); border: 1px solid var(--line); border-radius: .3rem; }
nav button:disabled { opacity: .4; } nav span { white-space: nowrap; }
section.walk { margin: 1rem 0 2rem; } section.walk[hidden] { display: none; }
table.walk td, table.walk th { padding: .15rem .55rem; } table.walk th { position: static; }
td.own { background: var(--own); } td.new { background: #2e7d3240; }
td.sent { background: #f0ad5c55; } td.got { background: #7fa9ee55; }
td.done { background: #8fcf9866; } td.wrong { background: var(--badsoft); }
.key.own { background: var(--own); } .key.new { background: #2e7d3240; }
.key.sent { background: #f0ad5c55; } .key.got { background: #7fa9ee55; }
.key.done { background: #8fcf9866; } .key.wrong { background: var(--badsoft); }
.bars { display: grid; grid-template-columns: minmax(6rem, max-content) 1fr max-content;
  gap: .1rem .6rem; font-size: .8rem; max-width: 60rem; align-items: center; }
.bars i { display: block; height: .8rem; background: #7fa9ee; }
.bars .now { font-weight: bold; } .bars i.now { background: var(--bad); }
svg.ring { width: 100%; max-width: 28rem; height: auto; }
svg.ring .node { fill: var(--soft); stroke: var(--line); } svg.ring line { stroke: var(--ink); }
svg.ring .tip { fill: var(--ink); } svg.ring text { text-anchor: middle; }
"""


def write_walk(path: Path, walk: Walk) -> None:
    """Write a walk's page; one that is there is replaced.

    Raises:
        UsageError: It cannot be written there.
        EnvironmentProblem: There is no room for it.
    """
    try:
        write_whole(path, render_walk_page(walk).encode(errors="replace"))
    except OSError as error:
        raise unwritten("a page", path, error) from None


def render_walk_page(walk: Walk) -> str:
    """The page as text."""
    digest = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    head = page_head(walk.title, policy=policy, style=STYLE + _WALK_STYLE)
    keys = element("span", "arrow keys, Home, End", class_="dim")
    body = element(
        "body",
        element("h1", walk.title),
        element("p", walk.about),
        element(
            "nav",
            element("button", "Back", id="back", type="button"),
            element("button", "On", id="on", type="button"),
            element("span", "", id="place"),
            keys,
        ),
        *(_section(step, number) for number, step in enumerate(walk.steps, start=1)),
        element("script", Markup(_SCRIPT)),
    )
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


def _section(step: Step, number: int) -> Markup:
    return element(
        "section",
        element("h2", f"{number}. {step.title}"),
        *(element("p", line) for line in step.text if line),
        step.picture or "",
        *(part for table in step.tables for part in _table(table)),
        *([] if step.bars is None else _bars(step.bars)),
        class_="walk",
    )


def _table(table: Table) -> Iterator[Markup]:
    if table.title:
        yield element("h3", table.title)
    rows = [element("tr", *(_cell(cell) for cell in row)) for row in table.rows]
    top = element("thead", element("tr", *(element("th", cell) for cell in table.head)))
    yield element(
        "div", element("table", top, element("tbody", *rows), class_="walk"), class_="scroll"
    )
    if table.marks:
        named = [
            element("span", element("i", class_=f"key {mark}"), said)
            for mark, said in table.marks.items()
        ]
        yield element("p", *named, class_="legend")


def _cell(cell: Cell | str) -> Markup:
    if isinstance(cell, str):
        return element("td", cell)
    return element("td", cell.text, class_=cell.mark or None)


def _bars(bars: Bars) -> Iterator[Markup]:
    most = max((amount for _, amount in bars.amounts), default=0) or 1
    yield element("h3", f"{bars.title}, in {bars.unit}")
    parts: list[Markup] = []
    for index, (name, amount) in enumerate(bars.amounts):
        class_ = "now" if index == bars.now else None
        width = f"width: {amount / most * 100:.2f}%"
        parts += [
            element("span", name, class_=class_),
            element("i", style=width, class_=class_),
            element("span", f"{amount:,.0f}", class_=class_),
        ]
    yield element("div", joined(parts), class_="bars")
