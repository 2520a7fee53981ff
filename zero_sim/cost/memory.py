"""Memory between two steps: closed form of ZeRO, and the check of a rank's reported bytes.

Only memory that grows with the model counts: scalars and the module's own tensors do not. An arena
is as long as the largest set of whole gradients in memory at once.
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
"""Alignment in bytes of buffers in an arena."""


def bytes_held(
    sizes: Sequence[ParamSize],
    *,
    scenario: Scenario,
    rank: int,
    stored: int,
) -> dict[str, int]:
    """Return the expected bytes of one rank, under the names that a `CostedEngine` reports.

    Args:
        sizes: Trained params of the rank, in registration order.
        scenario: The case as its dp-cp group sees it.
        rank: Rank in the dp-cp group.
        stored: Numbers of optimizer state for the elements that the rank owns.
    """
    system = scenario.system
    forms = bucket_forms(sizes, scenario=scenario, rank=rank)
    own = [form for form in forms if form.owns_elems]
    # A shard of padding only has no master.
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
        # Stages 0 and 1 with sync = "last" reduce once, in place, so they need no separate sums.
        held["sums"] = 0
    if system.stage >= 2:
        # Stages 2 and 3 drop whole gradients within the step.
        held["gradients"] = 0
    if system.stage == 3:
        held["params"] = sum(form.shard_elems * form.param_bytes for form in forms)
    if not system.stage:
        # Stage 0 steps the module's own params, which do not count.
        held["params"] = 0
    return held


def keeps_grads(scenario: Scenario) -> bool:
    """Return True if whole gradients accumulate until the last micro-batch."""
    return scenario.system.sync == "last" and scenario.run.micro_batches > 1


def arena_bytes(sizes: Sequence[ParamSize], *, scenario: Scenario, rank: int) -> int:
    """Return the length in bytes of a rank's arena; 0 without one.

    Args:
        sizes: Trained params of the rank, in registration order.
        scenario: The case as its dp-cp group sees it.
        rank: Rank in the dp-cp group.
    """
    if not scenario.system.arena:
        return 0
    # Experts get their own part of the arena, because their number can differ between ranks.
    kinds: dict[str, list[int]] = {}
    for form in by_registration(sizes, scenario=scenario, rank=rank):
        place = -(-form.elems * form.grad_bytes // PLACE_BYTES) * PLACE_BYTES
        kinds.setdefault(form.kind, []).append(place)
    if keeps_grads(scenario):
        # Nothing leaves before the last micro-batch, so everything needs space of its own.
        return sum(map(sum, kinds.values()))
    length = 2 if overlaps_grads(scenario.system) else 1
    # Otherwise one bucket fills, and with overlap its predecessor is still in flight.
    return sum(
        max(sum(places[i : i + length]) for i in range(len(places))) for places in kinds.values()
    )


def check_memory(
    held: Mapping[str, int], owed: Mapping[str, int], *, step: int, rank: int
) -> Iterator[Finding]:
    """Yield a finding for each kind of memory that differs from the closed form."""
    for name, expected in owed.items():
        # Kinds that the engine does not report count as 0 bytes.
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
