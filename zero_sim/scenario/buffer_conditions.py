"""Conditions for reduce buffers, through which gradients leave in place of buckets of their own."""

from __future__ import annotations

from zero_sim.scenario.conditions import Condition

BUFFER_CONDITIONS = (
    Condition(
        reads=("system.reduce_buffer_elems", "system.stage"),
        broken=lambda s: s.system.reduce_buffer_elems is not None and s.system.stage not in (1, 2),
        message="reduce buffers are of stages 1 and 2, whose params are whole and whose gradients "
        "have owners, got {got}.",
        suggestion="Leave it out, or write stage = 2.",
        holds_after=True,
    ),
    Condition(
        reads=("system.reduce_buffer_elems", "system.sum_by"),
        broken=lambda s: (
            s.system.reduce_buffer_elems is not None and s.system.sum_by == "first-rank"
        ),
        message="what such a buffer holds is reduced to its owners, or to all, got {got} with sums "
        "at the first rank.",
        suggestion="Leave either out.",
        holds_after=True,
    ),
    Condition(
        reads=("system.reduce_buffer_elems", "system.redundancy"),
        broken=lambda s: s.system.reduce_buffer_elems is not None and s.system.redundancy > 1,
        message="expected one copy of the state, as sums end with one owner and go on to no "
        "copies, got {got} with system.redundancy.",
        suggestion="Leave either out.",
        holds_after=True,
    ),
    # Of no use before a checkpoint and of use behind it: what is of none at all is unused.
    Condition(
        reads=("system.arena", "system.reduce_buffer_elems", "reload.stage"),
        broken=lambda s: (
            s.system.arena
            and s.system.reduce_buffer_elems is not None
            and s.reload is not None
            and s.reload.stage == 3
        ),
        message="an arena holds whole gradients that come and go bucket by bucket, got {got} with "
        "system.reduce_buffer_elems, which has buffers of its own.",
        suggestion="Leave either out.",
    ),
    Condition(
        reads=("system.reduce_buffer_elems", "system.stage", "system.sync"),
        broken=lambda s: (
            s.system.reduce_buffer_elems is not None
            and s.system.stage == 2
            and s.system.sync == "last"
        ),
        message="at stage 2 gradients leave as backward goes, and none stays for the next "
        'micro-batch, got {got} with system.sync = "last".',
        suggestion='Write sync = "every", or stage = 1.',
        holds_after=True,
    ),
)
"""Conditions over several fields, one of which is a reduce buffer's."""
