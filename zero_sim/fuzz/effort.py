"""The effort of judging a case, estimated in whole numbers before it runs, and what keeps it small.

[Note: units]
A unit is about a tenth of a millisecond of CPU time. The weights are those with which 500 drawn
cases came closest to what they took, rounded: what counts is how cases compare, which no machine
changes much. Of these, nine in ten took between 0.6 and 2.6 times what was estimated.

[Note: gathers in chunks]
Each chunk is a call, and shards that are padded far beyond what they hold are many chunks. Of 135
drawn cases, 45 of them with chunks, the rank correlation of the estimate with the CPU time taken
is 0.84 without these calls and 0.89 with them, and the case that took most beyond its estimate
among the 90 took 19 times as much, and takes 4.3 times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from zero_sim.scenario.spec import Scenario

EFFORT_USUAL, EFFORT_MAX = 600, 2_000
"""Units up to which steps, micro-batches and what watches them are drawn: mostly, and else."""
CHUNKS_MAX = 16
"""Calls with which a bucket is gathered at most, about: what goes wrong in many does in a few."""
_CASE, _WORLD_RANK = 90, 23
_MICRO_BATCH, _PARAM, _BUCKET, _PARAM_MICRO_BATCH = 9, 3, 7, 1
_RACES, _RACES_PARAM = 2, 2
_LATE, _LATE_BUCKET = 7, 11
_RELOAD, _RELOAD_PARAM = 105, 9
_CHUNK, _LATE_CHUNK = 2, 6
_FP32_BYTES, _OTHER_BYTES = 4, 2


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
    rank_steps += others * (after.lost_steps + bool(after.lost_micro_batches))
    reloading = _RELOAD + _RELOAD_PARAM * (ranks + others) * len(sizes)
    of_worlds = _CASE + _WORLD_RANK * (ranks + others)
    return of_worlds + reloading + rank_steps * _step_of_rank(scenario, sizes)


def steps_within(
    scenario: Scenario, *, sizes: Sequence[int], most: int, effort_max: int = EFFORT_MAX
) -> int:
    """How many steps a case can have within an effort: at least two, which many faults need.

    Args:
        scenario: The case, whose own number of steps does not matter, nor when it is saved.
        sizes: Elements of each param.
        most: Never more than these.
        effort_max: Units that the case should take at most.
    """
    least = replace(scenario, run=replace(scenario.run, steps=1))
    if least.reload is not None:
        least = replace(least, reload=replace(least.reload, step=1, async_steps=0))
    left = effort_max - effort_of(least, sizes=sizes)
    return min(most, max(2, 1 + left // (least.world.size * _step_of_rank(least, sizes))))


def chunk_within(scenario: Scenario, *, sizes: Sequence[int]) -> int | None:
    """Elements of a chunk with which a bucket is gathered in few calls, if it is in chunks.

    Args:
        scenario: The case, whose own chunks are large enough, or made so.
        sizes: Elements of each param.
    """
    elems = scenario.system.gather_chunk_elems
    if elems is None:
        return None
    stretch = -(-_shard_elems(scenario, sizes) // CHUNKS_MAX)
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
    return 1 if elems is None else min(len(sizes), 1 + sum(sizes) // elems)


def _further_chunks(scenario: Scenario, sizes: Sequence[int]) -> int:
    """Calls beyond one a bucket with which a step gathers params; see [Note: gathers in chunks]."""
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
    """Elements of a shard of one bucket, padding included, where all buckets are alike."""
    system = scenario.system
    elem_bytes = _FP32_BYTES if scenario.model.dtype == "fp32" else _OTHER_BYTES
    aligned = system.align_bytes // math.gcd(system.align_bytes, elem_bytes)
    unit = math.lcm(system.align_elems, aligned)
    shared_by = _buckets(scenario, sizes) * _shards(scenario) * unit
    return max(1, -(-sum(sizes) // shared_by)) * unit
