"""Coverage of a run: how much its expected steps would have shown."""

from __future__ import annotations

import math
from collections import Counter

from zero_sim.judge.guarantee import Guarantee
from zero_sim.judge.step_digests import owed_by
from zero_sim.judge.step_source import AnyStep
from zero_sim.scenario.spec import Scenario


class Coverage:
    """Sums up the steps that were taken.

    Args:
        scenario: The case, as the reference replays it.
        first_step: The first step that is judged.
    """

    def __init__(self, scenario: Scenario, *, first_step: int) -> None:
        self._scenario = scenario
        self.taken_step = first_step - 1
        """The last step that was taken."""
        self.nonzero_fraction_max = 0.0
        self.same_data = scenario.world.size > 1
        """True if all ranks saw the same data in every step."""
        self.has_stepped = False
        """True if any step was taken, and on finite gradients: others prove nothing."""
        self.owed: Counter[Guarantee] = Counter()
        """Elements of the reduced gradients of all steps, by why they are owed."""

    def note(self, taken: AnyStep) -> None:
        """Note a step."""
        self.taken_step = taken.step
        self.nonzero_fraction_max = max(self.nonzero_fraction_max, taken.nonzero_fraction)
        is_finite = math.isfinite(taken.norm)
        if is_finite:
            self.owed += owed_by(taken, scenario=self._scenario)
        self.has_stepped |= not taken.skipped and is_finite
        self.same_data &= len(set(taken.data_digests.values())) == 1
