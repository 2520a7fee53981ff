"""Record of what one rank shows at one point of a step, which checks are given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from zero_sim.judge.comparison import Comparing, Owed
from zero_sim.judge.judged_group import JudgedGroup
from zero_sim.judge.rank_notes import RankNotes
from zero_sim.targets import CompletedEngine, OwnedPart, StepResult

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
