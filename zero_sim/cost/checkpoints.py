"""Activation checkpoints in closed form: what a rank keeps of blocks, against what it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from zero_sim.findings.phase import Phase
from zero_sim.findings.records import Finding
from zero_sim.scenario.checks import Check
from zero_sim.scenario.spec import Scenario
from zero_sim.scenario.tp_block import activation_elems, is_tp_block, rows_of

_ELEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def checkpoint_bytes(scenario: Scenario, *, rank: int) -> int:
    """Return the bytes of checkpoints that a rank keeps between a forward and its backward.

    Args:
        scenario: The case as its dp-cp group sees it.
        rank: Rank in that group.
    """
    kept = scenario.system.checkpoints
    if not is_tp_block(scenario) or kept == "none":
        return 0
    elems = activation_elems(scenario, rows=rows_of(scenario, rank=rank))
    if kept == "split":
        elems = -(-elems // scenario.topology.tp)
    return scenario.model.blocks * elems * _ELEM_BYTES[scenario.model.dtype]


@dataclass(slots=True, eq=False)
class CheckpointWatch:
    """Looks at what a rank keeps when a forward is over, in one step."""

    owed: int
    """Bytes."""
    rank: int
    look: Callable[[], int]
    """Tells the bytes that are kept now."""
    found: list[Finding] = field(default_factory=list)
    """The first one; nothing is looked at behind it."""

    def between(self, step: int) -> None:
        """Look between a forward and its backward.

        Args:
            step: Of which.
        """
        held = self.look()
        if held != self.owed and not self.found:
            self.found.append(
                Finding(
                    check=Check.INVARIANT_MEMORY,
                    step=step,
                    rank=self.rank,
                    phase=Phase.FORWARD,
                    message=f"this rank keeps {held} bytes of activation checkpoints behind the "
                    f"forward, expected {self.owed} by the closed form",
                )
            )
