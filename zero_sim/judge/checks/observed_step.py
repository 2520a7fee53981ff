"""Inputs of checks: notes on a rank, and its reported state during a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from zero_sim.cost.forms import ParamSize
from zero_sim.cost.hook_trace import HookTrace
from zero_sim.cost.memory_recorder import MemoryRecorder
from zero_sim.cost.volume import HeldSize
from zero_sim.judge.comparison import Comparing, ExpectedSteps
from zero_sim.judge.forward_reads import ForwardReads
from zero_sim.judge.judged_group import JudgedGroup
from zero_sim.targets import EngineAdapter, OwnedPart, StepResult
from zero_sim.targets.costs import Costs


@dataclass(frozen=True, kw_only=True, slots=True)
class RankNotes:
    """Notes on a rank from before its first step."""

    sizes: Sequence[ParamSize]
    """Sizes of trained params."""
    held_sizes: Sequence[HeldSize] = ()
    """Sizes of all params and buffers in the bare module, trained or not."""
    costs: Costs
    """Declared by the target, equal for all ranks."""
    own_bytes: Mapping[str, int] | None = None
    """Memory by the target's own closed form; None without one."""
    hook_trace: HookTrace | None = None
    """None if the case's costs do not depend on overlap."""
    memory: MemoryRecorder | None = None
    """None if memory within a step is not recorded."""
    reads: ForwardReads | None = None
    """None if reads by forwards are not recorded."""


# For checks outside of a step.
_NO_RESULT = StepResult()


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservedStep:
    """A rank's state at one point of a step, and its expected values."""

    rank: int
    """Group rank."""
    step: int
    engine: EngineAdapter
    notes: RankNotes
    group: JudgedGroup
    expected_steps: ExpectedSteps
    # Views, so checks must not keep them.
    parts: Sequence[OwnedPart] = ()
    losses: Sequence[Tensor] = ()
    """Losses by micro-batch, after a step."""
    params: Mapping[str, Tensor] = field(default_factory=dict)
    """Working params by name, once gathered."""
    result: StepResult = _NO_RESULT
    """Returned by the engine's step."""

    @property
    def comparison(self) -> Comparing:
        """The current comparison. It changes if the judge falls back to local steps."""
        return self.expected_steps.comparison
