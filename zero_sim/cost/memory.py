"""Memory between two steps: closed forms of our ZeRO against what a rank holds.

Only what grows with the model counts; scalars and the module's own tensors do not. An arena has the
length of the most whole gradients in memory at a time.
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
PLACE_BYTES = 512
"""What is in an arena begins at a multiple of it."""


def bytes_held(
    sizes: Sequence[ParamSize],
    *,
    scenario: Scenario,
    rank: int,
    stored: int,
) -> dict[str, int]:
    """Return the bytes that one rank has to hold, under the names that a `CostedEngine` uses.

    Args:
        sizes: The params that the rank trains, in registration order.
        scenario: The case as its dp-cp group sees it.
        rank: Rank in that group.
        stored: Numbers that the optimizer keeps of the elements that the rank owns.
    """
    system = scenario.system
    forms = bucket_forms(sizes, scenario=scenario, rank=rank)
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
        held["sums"] = 0
    if system.stage >= 2:
        held["gradients"] = 0
    if system.stage == 3:
        held["params"] = sum(form.shard_elems * form.param_bytes for form in forms)
    if not system.stage:
        held["params"] = 0
    return held


def keeps_grads(scenario: Scenario) -> bool:
    """Whether whole gradients are accumulated until the last micro-batch."""
    return scenario.system.sync == "last" and scenario.run.micro_batches > 1


def arena_bytes(sizes: Sequence[ParamSize], *, scenario: Scenario, rank: int) -> int:
    """Return the length of the arena of one rank; 0 without one.

    Args:
        sizes: The params that the rank trains, in registration order.
        scenario: The case as its dp-cp group sees it.
        rank: Rank in that group.
    """
    if not scenario.system.arena:
        return 0
    # Buckets of experts are in a part to themselves, whose numbers can differ from rank to rank.
    kinds: dict[str, list[int]] = {}
    for form in by_registration(sizes, scenario=scenario, rank=rank):
        place = -(-form.elems * form.grad_bytes // PLACE_BYTES) * PLACE_BYTES
        kinds.setdefault(form.kind, []).append(place)
    if keeps_grads(scenario):
        return sum(map(sum, kinds.values()))
    length = 2 if overlaps_grads(scenario.system) else 1
    return sum(
        max(sum(places[i : i + length]) for i in range(len(places))) for places in kinds.values()
    )


def check_memory(
    held: Mapping[str, int], owed: Mapping[str, int], *, step: int, rank: int
) -> Iterator[Finding]:
    """Check that a rank holds what it has to, and no more."""
    for name, expected in owed.items():
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
