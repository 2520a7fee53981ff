"""Memory between two steps: closed form of ZeRO, and check of reported bytes.

Only memory that grows with the model counts, so scalars and the module's own tensors do not. An
arena has room for the most unsharded gradients that are in memory at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from zero_sim.cost.forms import ParamSize, bucket_forms, by_registration
from zero_sim.findings.dataflow import Phase
from zero_sim.findings.records import Finding
from zero_sim.scenario.checks import Check
from zero_sim.scenario.derived import overlaps_grads
from zero_sim.scenario.spec import Scenario

_FP32_BYTES = 4
# Not imported from `zero_sim.layout`: a closed form must not use the layout under test.
PLACE_BYTES = 512
"""Buffer alignment in an arena, in bytes."""


def bytes_held(
    sizes: Sequence[ParamSize],
    *,
    scenario: Scenario,
    rank: int,
    stored: int,
) -> dict[str, int]:
    """Return the expected bytes on a rank, by the names that a `CostedEngine` reports.

    Args:
        sizes: The rank's trained params, in registration order.
        scenario: The dp-cp group's case.
        rank: Group rank.
        stored: Count of optimizer state numbers for the rank's own elements.
    """
    system = scenario.system
    forms = bucket_forms(sizes, scenario=scenario, rank=rank)
    # A shard with only padding has no master.
    own = [form for form in forms if form.owns_elems]
    held = {
        "gradients": sum(form.elems * form.grad_bytes for form in forms),
        "sums": sum(form.shard_elems * form.grad_bytes for form in forms),
        "params": sum(form.elems * form.param_bytes for form in forms),
        "masters": sum(form.shard_elems for form in own) * _FP32_BYTES,
        "state": stored * _FP32_BYTES,
        "arena": arena_bytes(sizes, scenario=scenario, rank=rank),
        "other": 0,
    }
    if system.stage < 2 and system.sync == "last":
        # With sync = "last", stages 0 and 1 reduce once and in place, so they need no separate
        # sums.
        held["sums"] = 0
    if system.stage >= 2:
        # Stages 2 and 3 drop unsharded gradients within the step.
        held["gradients"] = 0
    if system.stage == 3:
        held["params"] = sum(form.shard_elems * form.param_bytes for form in forms)
    if not system.stage:
        # Stage 0 steps the module's own params, which do not count here.
        held["params"] = 0
    return held


def keeps_grads(scenario: Scenario) -> bool:
    """Return True if unsharded gradients accumulate until the last micro-batch."""
    return scenario.system.sync == "last" and scenario.run.micro_batches > 1


def arena_bytes(sizes: Sequence[ParamSize], *, scenario: Scenario, rank: int) -> int:
    """Return the bytes of a rank's arena; 0 without an arena. Arguments as for `bytes_held`."""
    if not scenario.system.arena:
        return 0
    # Experts have their own part of the arena, because their number may differ between ranks.
    kinds: dict[str, list[int]] = {}
    for form in by_registration(sizes, scenario=scenario, rank=rank):
        place = -(-form.elems * form.grad_bytes // PLACE_BYTES) * PLACE_BYTES
        kinds.setdefault(form.kind, []).append(place)
    if keeps_grads(scenario):
        # All buckets stay until the last micro-batch, so each needs its own space.
        return sum(map(sum, kinds.values()))
    # While a bucket fills, with overlap, its predecessor may be in flight.
    length = 2 if overlaps_grads(scenario.system) else 1
    return sum(
        max(sum(places[i : i + length]) for i in range(len(places))) for places in kinds.values()
    )


def check_memory(
    held: Mapping[str, int], wanted: Mapping[str, int], *, step: int, rank: int
) -> Iterator[Finding]:
    """Yield a finding for each kind of memory that differs from the closed form."""
    for name, expected in wanted.items():
        # A kind that the engine does not report counts as 0 bytes.
        got = held.get(name, 0)
        if got != expected:
            yield Finding(
                check=Check.INVARIANT_MEMORY,
                step=step,
                rank=rank,
                phase=Phase.GATHER,
                message=f"this rank holds {got} bytes of {name} after the step, expected "
                f"{expected} by the closed form of its stage",
            )
