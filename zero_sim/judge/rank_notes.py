"""Notes of one rank, taken before its first step: its module and what watches its engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zero_sim.cost.forms import ParamSize
from zero_sim.cost.hook_trace import HookTrace
from zero_sim.cost.memory_recorder import MemoryRecorder
from zero_sim.cost.volume import HeldSize
from zero_sim.judge.forward_reads import ForwardReads
from zero_sim.targets.costs import Costs


@dataclass(frozen=True, kw_only=True, slots=True)
class RankNotes:
    """A module as it was before an engine had it, declared costs, and recorders."""

    sizes: Sequence[ParamSize]
    """The params that the rank trains."""
    held_sizes: Sequence[HeldSize] = ()
    """All that its module has, trained or not."""
    costs: Costs
    """Declared by the target; the same for all ranks."""
    own_bytes: Mapping[str, int] | None = None
    """Expected memory by a form of the target's own; None if it declares none."""
    hook_trace: HookTrace | None = None
    """None if nothing overlaps that costs depend on."""
    memory: MemoryRecorder | None = None
    """None if memory within a step is not observed."""
    reads: ForwardReads | None = None
    """None if the params that forwards read are not recorded."""
