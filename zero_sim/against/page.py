"""One self-contained HTML page of verdicts on a script, styled like pages of failed cases."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from zero_sim.against.text import Reported, headline, render
from zero_sim.report import pages
from zero_sim.report.svg_buffer_map import buffer_map_pictures
from zero_sim.report.text_buffer_map import equal_elems

ROWS_MAX = 200
"""Number of differences listed per verdict."""
# The script chooses tensor and file names, so the page must run no scripts.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_HEAD = ("step and moment", "tensor", "of the largest value", "times rounding")


def write_against_page(path: Path, reported: Sequence[Reported]) -> None:
    """Write verdicts on one script as a page, replacing an existing file.

    Raises:
        UsageError: The file cannot be written.
    """
    title = f"{len(reported)} verdict{'' if len(reported) == 1 else 's'} on a script"
    cases = [_case(each) for each in reported]
    page = pages.render("against.html", title=title, policy=_POLICY, cases=cases)
    pages.write_page(path, str(page))


def _case(reported: Reported) -> dict[str, object]:
    verdict, account = reported.verdict, reported.account
    rows = [
        (
            "",
            (
                each.point.when,
                each.point.name,
                f"{each.measured.relative:.1e}",
                f"{each.multiple:.0e}",
            ),
        )
        for each in verdict.differences[:ROWS_MAX]
    ]
    has_picture = account is not None and equal_elems(account.picture) != 0
    return {
        "headline": headline(verdict),
        "got": verdict.got,
        "expected": verdict.expected,
        "text": render(verdict, account),
        "pictures": buffer_map_pictures(account.picture) if account and has_picture else "",
        "table": pages.render("table.html", head=_HEAD, rows=rows) if rows else "",
        "rows": len(rows),
        "cut": len(verdict.differences) if len(rows) < len(verdict.differences) else 0,
        "command": reported.command,
    }
