"""Activation checkpoint bytes: closed form, and check."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from zero_sim.findings.dataflow import Phase
from zero_sim.findings.records import Finding
from zero_sim.scenario.checks import Check
from zero_sim.scenario.spec import Scenario
from zero_sim.scenario.tp_block import activation_elems, is_tp_block, rows_of

if TYPE_CHECKING:
    from zero_sim.cost.memory_recorder import Moment

_ELEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def checkpoint_bytes(scenario: Scenario, *, rank: int) -> int:
    """Return the activation checkpoint bytes between a forward and its backward."""
    kept = scenario.system.checkpoints
    if not is_tp_block(scenario) or kept == "none":
        return 0
    elems = activation_elems(scenario, rows=rows_of(scenario, rank=rank))
    if kept == "split":
        # P_a of ZeRO-R (arXiv 1910.02054, section 6.1): each tensor-parallel rank keeps its part
        # of the checkpoint, rounded up.
        elems = -(-elems // scenario.topology.tp)
    # A block's checkpoint is its input.
    return scenario.model.blocks * elems * _ELEM_BYTES[scenario.model.dtype]


def check_checkpoints(
    moments: Sequence[Moment], *, wanted: int, step: int, rank: int
) -> Iterator[Finding]:
    """Check the activation checkpoint bytes after each forward in a step."""
    for moment in moments:
        if moment.what == "forward" and moment.bytes != wanted:
            yield Finding(
                check=Check.INVARIANT_MEMORY,
                step=step,
                rank=rank,
                phase=Phase.FORWARD,
                message=f"this rank keeps {moment.bytes} bytes of activation checkpoints after "
                f"the forward, expected {wanted} by the closed form",
            )
