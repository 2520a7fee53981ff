"""Fingerprints as text."""

from __future__ import annotations

from zero_sim.calculators.fingerprint import GRAMMARS, Fingerprint, shortened
from zero_sim.report.amounts import aligned


def render_fingerprint(found: Fingerprint) -> str:
    """What the calls look like, what is odd, and how large their messages are."""
    lines = [
        f"{found.stage or 'no stage'}: {found.why}",
        f"step: {shortened(found.letters)}",
        "  A all-reduce, R reduce-scatter, C sum over copies, G gather, D reduce, B broadcast",
        f"seen {found.steps:g} times in {found.calls:,} calls; copies of what is sharded: "
        f"{found.copies}",
        f"{found.overlapping:,} of {found.calls:,} calls were in flight when the next was issued",
    ]
    lines += [f"odd: {each}" for each in found.odd] or ["odd: nothing"]
    if not found.stage:
        lines += ["", "What there is:"]
        lines += [f"  {grammar:<14} {stage}: {why}" for grammar, stage, why in GRAMMARS]
    if found.sizes:
        rows = [["messages of", "calls"]]
        rows += [[f"{low:,} to {high:,} bytes", f"{count:,}"] for low, high, count in found.sizes]
        lines += ["", aligned(rows)]
    return "\n".join(lines)
