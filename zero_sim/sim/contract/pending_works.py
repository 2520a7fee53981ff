"""Asynchronous calls whose work nobody has waited for yet.

What they write is not there for the rank before it has waited; on a device a program that never
does reads whatever happens to be there, and mostly that is right.
"""

from __future__ import annotations

from collections.abc import Sequence

from zero_sim.sim.failures import ContractViolation
from zero_sim.sim.log import CollectiveRecord

_SHOWN = 16


def never_waited(records: Sequence[CollectiveRecord]) -> ContractViolation:
    """The error for a run that ended although these calls were not waited for.

    Args:
        records: At least one, in the order of their issue; every call site of theirs is named.
    """
    ranks = sorted({record.rank for record in records})
    mine = [record for record in records if record.rank == ranks[0]]
    sites = sorted({record.site for record in records} - {record.site for record in mine})
    lines = [
        f"rank {ranks[0]} returned without having waited for {len(mine)} asynchronous "
        f"call{'s' if len(mine) > 1 else ''}:",
        *(f"  {record.text}" for record in mine[:_SHOWN]),
    ]
    if mine[_SHOWN:]:
        lines.append(f"  and {len(mine) - _SHOWN} more")
    if ranks[1:]:
        others = ", ".join(map(str, ranks[1 : 1 + _SHOWN])) + (", ..." * bool(ranks[_SHOWN + 1 :]))
        lines.append(f"so did other ranks: {others}")
    lines.extend(f"  at {site}" for site in sites[:_SHOWN])
    lines.append(
        "Without it the results may not be there yet. Call wait() on the work or on its future, "
        "or poll the work's is_completed() until it says yes."
    )
    return ContractViolation(
        "\n".join(lines),
        aspect="never-waited",
        rank=ranks[0],
        other_rank=ranks[1] if ranks[1:] else ranks[0],
    )
