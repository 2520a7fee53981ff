"""Records that checks are given: notes of one rank, and what it shows at one point of a step."""

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
from zero_sim.targets import CompletedEngine, OwnedPart, StepResult
from zero_sim.targets.costs import Costs


@dataclass(frozen=True, kw_only=True, slots=True)
class RankNotes:
    """Notes taken before the first step: the module without an engine, costs, and recorders."""

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


_NO_RESULT = StepResult()


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """What one rank shows, and what is expected of it."""

    rank: int
    """Rank in the judged group."""
    step: int
    """Index of the step, from 0."""
    engine: CompletedEngine
    notes: RankNotes
    group: JudgedGroup
    owed: Owed
    parts: Sequence[OwnedPart] = ()
    """Parts of params that the rank owns, after a step; views of live state."""
    losses: Sequence[Tensor] = ()
    """By micro-batch, after a step."""
    params: Mapping[str, Tensor] = field(default_factory=dict)
    """Working params by name, after their gathers."""
    result: StepResult = _NO_RESULT
    """Returned by the engine's step."""

    @property
    def comparison(self) -> Comparing:
        """The comparison with the expected step; another one once steps are no digests any more."""
        return self.owed.comparison
