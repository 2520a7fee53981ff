"""Inputs of checks: notes on a rank, and its reported state at one point of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from zero_sim.cost.forms import ParamSize
from zero_sim.cost.hook_trace import HookTrace
from zero_sim.cost.memory_recorder import MemoryRecorder
from zero_sim.cost.volume import HeldSize
from zero_sim.judge.comparison import Comparing, Owed
from zero_sim.judge.forward_reads import ForwardReads
from zero_sim.judge.judged_group import JudgedGroup
from zero_sim.targets import EngineAdapter, OwnedPart, StepResult
from zero_sim.targets.costs import Costs


@dataclass(frozen=True, kw_only=True, slots=True)
class RankNotes:
    """Notes from before the first step: the bare module, costs, and recorders."""

    sizes: Sequence[ParamSize]
    """Trained params of the rank."""
    held_sizes: Sequence[HeldSize] = ()
    """All params and buffers of its module, trained or not."""
    costs: Costs
    """Declared by the target; equal for all ranks."""
    own_bytes: Mapping[str, int] | None = None
    """Expected memory by the target's closed form; None if it declares none."""
    hook_trace: HookTrace | None = None
    """None if the costs of the case do not depend on overlap."""
    memory: MemoryRecorder | None = None
    """None if memory within a step is not recorded."""
    reads: ForwardReads | None = None
    """None if reads of forwards are not recorded."""


# For checks outside of a step.
_NO_RESULT = StepResult()


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """State of one rank, and the expectations for it."""

    rank: int
    """Rank in the judged group."""
    step: int
    """Index of the step, from 0."""
    engine: EngineAdapter
    notes: RankNotes
    group: JudgedGroup
    owed: Owed
    # Views, so checks must not keep them.
    parts: Sequence[OwnedPart] = ()
    """Places that the rank owns, with values after a step; views of live state."""
    losses: Sequence[Tensor] = ()
    """Losses by micro-batch, after a step."""
    params: Mapping[str, Tensor] = field(default_factory=dict)
    """Working params by name, once gathered."""
    result: StepResult = _NO_RESULT
    """Returned by the engine's step."""

    @property
    def comparison(self) -> Comparing:
        """The comparison for the expected steps, which may stop being digests during a step."""
        return self.owed.comparison
