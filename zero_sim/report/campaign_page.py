"""A fuzzing campaign as an HTML page: verdicts, findings, and a heat map of feature pairs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from zero_sim.fuzz.totals import CampaignTotals
from zero_sim.report import pages
from zero_sim.report.commands import replay_command
from zero_sim.report.text import count_verdicts

if TYPE_CHECKING:
    from zero_sim.fuzz.campaign import Plan
    from zero_sim.fuzz.coverage import Coverage
    from zero_sim.fuzz.records import Found

CELL = 8
"""Side of a square in the heat map, in SVG units."""
# Findings contain foreign text. If escaping failed, the policy would still block scripts.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_VERDICTS = ("pass", "fail", "error", "inconclusive")
# Lightness in percent: of a pair that occurred once, and of the most frequent pair.
_LIGHT_MAX, _LIGHT_MIN = 88, 28


def write_campaign_page(
    path: Path, totals: CampaignTotals, *, plan: Plan, elapsed: float, names: Sequence[str]
) -> None:
    """Write a campaign's page; an existing file is replaced.

    Args:
        path: The file.
        totals: Results so far.
        plan: The campaign's target, seed and corpus.
        elapsed: Seconds.
        names: Features that its cases can have.

    Raises:
        UsageError: If the file cannot be written.
    """
    verdicts = totals.counts.verdicts
    # At least 1, to divide by it in a campaign without cases.
    cases = max(sum(verdicts.values()), 1)
    known = [name for name in _VERDICTS if verdicts.get(name)]
    # Include features of the corpus, because other versions may have more.
    rows = sorted(dict.fromkeys((*names, *totals.coverage.features)))
    page = pages.render(
        "campaign.html",
        title=f"{totals.counts.cases:,} generated cases",
        policy=_POLICY,
        target=plan.head.target,
        seed=plan.head.seed,
        summary=totals.progress(seconds=elapsed),
        verdicts=count_verdicts(verdicts, params_only=totals.counts.params_only),
        bars=[(name, f"{100 * verdicts[name] / cases:.2f}") for name in known],
        keys=[(name, f"{name}: {verdicts[name]:,}") for name in known],
        findings=[_finding(found, totals, plan) for found in totals.found],
        cells=list(_cells(totals.coverage, rows)) if totals.coverage.cases else [],
        side=len(rows) * CELL,
        size=CELL,
        table=_table(totals.coverage, rows),
    )
    pages.write_page(path, str(page))


def _finding(found: Found, totals: CampaignTotals, plan: Plan) -> dict[str, str]:
    count = totals.cases_with(found)
    replay = ""
    if found.bundle:
        folder = str(plan.bundles / found.bundle)
        replay = replay_command(folder, target=plan.head.target, device=plan.head.device)
    return {
        "title": f"{found.key.check}: {found.message}",
        "met": f"met in {count:,} case{'' if count == 1 else 's'}",
        "size": str(found.size),
        "text": found.text,
        "replay": replay,
        "case": found.scenario,
    }


def _cells(coverage: Coverage, names: Sequence[str]) -> Iterator[dict[str, object]]:
    """Yield the heat map's squares, by row."""
    most = max([*coverage.pairs.values(), *coverage.features.values()], default=1)
    for row, first in enumerate(names):
        # Pairs have no order, so one triangle shows all of them.
        for column, second in enumerate(names[row:], row):
            if row == column:
                count, title = coverage.features[first], first
            else:
                # `pairs_of` sorts the names in a key.
                low, high = sorted((first, second))
                count, title = coverage.pairs[low, high], f"{low} + {high}"
            # Logarithmic, because counts span several powers of ten.
            share = math.log(count) / math.log(most) if count > 1 and most > 1 else 0.0
            light = round(_LIGHT_MAX - share * (_LIGHT_MAX - _LIGHT_MIN))
            if count:
                yield {
                    "x": column * CELL,
                    "y": row * CELL,
                    "light": light,
                    "title": f"{title}: {count:,}",
                }


def _table(coverage: Coverage, names: Sequence[str]) -> object:
    rows = [("", (name, f"{coverage.features[name]:,}")) for name in names]
    return pages.render("table.html", head=("feature", "cases"), rows=rows)
