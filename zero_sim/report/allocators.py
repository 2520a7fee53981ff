"""Allocators that were shown a run, as text and for JSON: with an arena and without."""

from __future__ import annotations

from collections.abc import Sequence

from zero_sim.cost.allocator import replay
from zero_sim.report.amounts import aligned, in_unit, unit_for
from zero_sim.run.measure import Measured
from zero_sim.untrusted import printable

_HEAD = ("allocated", "reserved", "free", "largest free block", "fragmented")


def render_allocators(runs: Sequence[Measured]) -> str:
    """The allocator of the first rank of each run, at the moments that count.

    Args:
        runs: Of one case: as it is and, where that can be, with an arena and without.
    """
    moments = [(run, moment) for run in runs for moment in replay(run.ledgers[0].events)]
    unit = unit_for([moment.state.reserved / 1000 for _, moment in moments])
    table = [["rank 0", "moment", "phase", *(f"{name} {unit[0]}" for name in _HEAD)]]
    for run, moment in moments:
        state = moment.state
        amounts = (
            state.allocated,
            state.reserved,
            state.free,
            state.largest_free,
            state.fragmented,
        )
        table.append(
            [_way(run), moment.what, moment.phase, *(in_unit(each, unit) for each in amounts)]
        )
    lines = [
        "What a caching allocator as torch's makes of it: best fit, split and joined blocks.",
        "",
        *aligned(table, left=3).splitlines(),
    ]
    if len(runs) == 1:
        lines += [
            "",
            "There is no arena to compare it with: no whole gradients come and go bucket by "
            "bucket, as they do at stages 2 and 3.",
        ]
    return printable("\n".join(lines), lines=True)


def allocator_dicts(runs: Sequence[Measured]) -> list[dict[str, object]]:
    """The same, ready for JSON, of all ranks."""
    return [
        {
            "arena": run.scenario.system.arena,
            "rank": ledger.rank,
            "moment": moment.what,
            "phase": moment.phase,
            "allocated": moment.state.allocated,
            "reserved": moment.state.reserved,
            "free": moment.state.free,
            "largest_free": moment.state.largest_free,
            "fragmented": moment.state.fragmented,
        }
        for run in runs
        for ledger in run.ledgers
        for moment in replay(ledger.events)
    ]


def _way(run: Measured) -> str:
    return "with an arena" if run.scenario.system.arena else "without an arena"
