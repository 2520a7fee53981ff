"""Estimated effort of judging a case, and its limits.

[Note: units]
A unit is about 0.1 ms of CPU time. The weights are a rounded fit to 500 drawn cases; nine in ten of
these took between 0.6 and 2.6 times their estimate. Estimates only serve to compare cases, so the
machine hardly matters.

[Note: gathers in chunks]
Each chunk is a call, and a shard with much padding has many chunks. The estimate includes these
calls. For 135 drawn cases (45 with chunks), this raised the rank correlation between estimate and
CPU time from 0.84 to 0.89. Among 90 of these cases, the largest ratio CPU time / estimate fell from
19 to 4.3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from zero_sim.scenario.spec import Scenario

EFFORT_USUAL, EFFORT_MAX = 600, 2_000
"""Limits in units for drawn cases: the usual limit, and the limit for a few cases."""
# A fault that many chunks show also shows in a few.
CHUNKS_MAX = 16
"""Approximate maximum number of gather calls per bucket."""
# Weights in units: per case, per rank of a world, per step of a rank, and so on.
_CASE, _WORLD_RANK = 90, 23
_MICRO_BATCH, _PARAM, _BUCKET, _PARAM_MICRO_BATCH = 9, 3, 7, 1
_RACES, _RACES_PARAM = 2, 2
_LATE, _LATE_BUCKET = 7, 11
_RELOAD, _RELOAD_PARAM = 105, 9
_CHUNK, _LATE_CHUNK = 2, 6
_FP32_BYTES, _OTHER_BYTES = 4, 2


def effort_of(scenario: Scenario, *, sizes: Sequence[int]) -> int:
    """Return the estimated effort of a case in units.

    Args:
        scenario: The case. Its model only matters by `sizes`.
        sizes: Elements of each param.
    """
    run, after = scenario.run, scenario.reload
    ranks = scenario.world.size
    if after is None:
        return _CASE + _WORLD_RANK * ranks + ranks * run.steps * _step_of_rank(scenario, sizes)
    # A case with a reload runs in two worlds, and repeats lost steps.
    others = after.world_size or ranks
    rank_steps = ranks * (after.step + after.async_steps) + others * (run.steps - after.step)
    rank_steps += others * (after.lost_steps + bool(after.lost_micro_batches))
    reloading = _RELOAD + _RELOAD_PARAM * (ranks + others) * len(sizes)
    of_worlds = _CASE + _WORLD_RANK * (ranks + others)
    return of_worlds + reloading + rank_steps * _step_of_rank(scenario, sizes)


def steps_within(
    scenario: Scenario, *, sizes: Sequence[int], most: int, effort_max: int = EFFORT_MAX
) -> int:
    """Return the number of steps that fit into an effort limit, but at least two.

    Args:
        scenario: The case. Its number of steps and checkpoint step do not matter.
        sizes: Elements of each param.
        most: Maximum of the result.
        effort_max: Effort limit in units.
    """
    # At least two, because many faults need two steps to show.
    least = replace(scenario, run=replace(scenario.run, steps=1))
    if least.reload is not None:
        least = replace(least, reload=replace(least.reload, step=1, async_steps=0))
    # Divide the effort left after a step by the effort of a further step on all ranks.
    left = effort_max - effort_of(least, sizes=sizes)
    return min(most, max(2, 1 + left // (least.world.size * _step_of_rank(least, sizes))))


def chunk_within(scenario: Scenario, *, sizes: Sequence[int]) -> int | None:
    """Return a chunk size in elements that gives few calls per bucket; None without chunks.

    Args:
        scenario: The case. Its own chunk size is the minimum.
        sizes: Elements of each param.
    """
    elems = scenario.system.gather_chunk_elems
    if elems is None:
        return None
    # A chunk contains an equally long stretch of every shard.
    stretch = -(-_shard_elems(scenario, sizes) // CHUNKS_MAX)
    # If a stretch of one element suffices, any chunk size does.
    return max(elems, stretch * _shards(scenario)) if stretch > 1 else elems


def _step_of_rank(scenario: Scenario, sizes: Sequence[int]) -> int:
    params, micro_batches = len(sizes), scenario.run.micro_batches
    buckets = _buckets(scenario, sizes)
    chunks = _further_chunks(scenario, sizes)
    units = _PARAM * params + _BUCKET * buckets + _CHUNK * chunks
    units += micro_batches * (_MICRO_BATCH + _PARAM_MICRO_BATCH * params)
    if scenario.world.races:
        units += micro_batches * (_RACES + _RACES_PARAM * params)
    if scenario.world.timing != "eager":
        units += _LATE + _LATE_BUCKET * buckets + _LATE_CHUNK * chunks
    return units


def _buckets(scenario: Scenario, sizes: Sequence[int]) -> int:
    elems = scenario.system.bucket_elems
    # Each bucket has a param, so there are no more buckets than params.
    return 1 if elems is None else min(len(sizes), 1 + sum(sizes) // elems)


def _further_chunks(scenario: Scenario, sizes: Sequence[int]) -> int:
    """Return the gathers per step beyond one per bucket; see [Note: gathers in chunks]."""
    system = scenario.system
    if system.gather_chunk_elems is None:
        return 0
    shards = _shards(scenario)
    stretch = max(1, system.gather_chunk_elems // shards)
    return _buckets(scenario, sizes) * (-(-_shard_elems(scenario, sizes) // stretch) - 1)


def _shards(scenario: Scenario) -> int:
    parts = scenario.topology.tp * scenario.topology.pp
    return max(1, scenario.world.size // parts // scenario.system.redundancy)


def _shard_elems(scenario: Scenario, sizes: Sequence[int]) -> int:
    """Return the shard size with padding, as if all buckets were equal."""
    system = scenario.system
    # As in the layout, shards are multiples of both alignments, in elements.
    elem_bytes = _FP32_BYTES if scenario.model.dtype == "fp32" else _OTHER_BYTES
    aligned = system.align_bytes // math.gcd(system.align_bytes, elem_bytes)
    unit = math.lcm(system.align_elems, aligned)
    shared_by = _buckets(scenario, sizes) * _shards(scenario) * unit
    return max(1, -(-sum(sizes) // shared_by)) * unit
