"""Walks as pages that stand alone: a step at a time, with keys; nothing from elsewhere.

Without a script all steps are there, one below the other. The page allows its one script by its
hash and nothing else; whatever comes from files is escaped (`zero_sim.report.pages`).
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from zero_sim.report import pages
from zero_sim.report.walks import Walk


def write_walk(path: Path, walk: Walk) -> None:
    """Write a walk's page; one that is there is replaced.

    Raises:
        UsageError: It cannot be written there.
        EnvironmentProblem: There is no room for it.
    """
    pages.write_page(path, render_walk_page(walk))


def render_walk_page(walk: Walk) -> str:
    """The page as text."""
    script = hashlib.sha256(pages.asset("walk.js").encode()).digest()
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{base64.b64encode(script).decode()}'"
    )
    return str(pages.render("walk.html", title=walk.title, policy=policy, walk=walk))
