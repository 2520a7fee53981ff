"""The effort of judging a case, estimated in whole numbers before it runs, and what keeps it small.

[Note: units]
A unit is about a tenth of a millisecond of CPU time. The weights are those with which 500 drawn
cases came closest to what they took, rounded: what counts is how cases compare, which no machine
changes much. Of these, nine in ten took between 0.6 and 2.6 times what was estimated.
"""

from __future__ import annotations

from collections.abc import Sequence

from zero_sim.scenario.spec import Scenario

EFFORT_MAX = 2_000
"""Units up to which steps and micro-batches are drawn."""
_CASE, _WORLD_RANK = 90, 23
_MICRO_BATCH, _PARAM, _BUCKET, _PARAM_MICRO_BATCH = 9, 3, 7, 1
_RACES, _RACES_PARAM = 2, 2
_LATE, _LATE_BUCKET = 7, 11
_RELOAD, _RELOAD_PARAM = 105, 9


def effort_of(scenario: Scenario, *, sizes: Sequence[int]) -> int:
    """Units that judging a case takes, about.

    Args:
        scenario: Its model does not matter beside the sizes of the params.
        sizes: Elements of each param.
    """
    run, after = scenario.run, scenario.reload
    ranks = scenario.world.size
    if after is None:
        return _CASE + _WORLD_RANK * ranks + ranks * run.steps * _step_of_rank(scenario, sizes)
    others = after.world_size or ranks
    rank_steps = ranks * (after.step + after.async_steps) + others * (run.steps - after.step)
    reloading = _RELOAD + _RELOAD_PARAM * (ranks + others) * len(sizes)
    of_worlds = _CASE + _WORLD_RANK * (ranks + others)
    return of_worlds + reloading + rank_steps * _step_of_rank(scenario, sizes)


def steps_within(scenario: Scenario, *, sizes: Sequence[int], most: int) -> int:
    """How many steps a case can have within `EFFORT_MAX`: at least two, which many faults need.

    Args:
        scenario: The case, whose own number of steps does not matter.
        sizes: Elements of each param.
        most: Never more than these.
    """
    ranks = scenario.world.size
    left = EFFORT_MAX - _CASE - _WORLD_RANK * ranks
    return min(most, max(2, left // (ranks * _step_of_rank(scenario, sizes))))


def _step_of_rank(scenario: Scenario, sizes: Sequence[int]) -> int:
    params, micro_batches = len(sizes), scenario.run.micro_batches
    elems = scenario.system.bucket_elems
    buckets = 1 if elems is None else min(params, 1 + sum(sizes) // elems)
    units = _PARAM * params + _BUCKET * buckets
    units += micro_batches * (_MICRO_BATCH + _PARAM_MICRO_BATCH * params)
    if scenario.world.races:
        units += micro_batches * (_RACES + _RACES_PARAM * params)
    if scenario.world.timing != "eager":
        units += _LATE + _LATE_BUCKET * buckets
    return units
