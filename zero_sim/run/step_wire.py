"""The wire between the process that computes the reference's steps and those that hear of them.

It is the store that real ranks tell each other facts by. Nobody depends on it: who hears nothing in
time, or that nothing more is told, computes by itself.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zero_sim.backends import RankGone, RealRank

TELLER = 0
"""The rank that computes for all."""
_BEGIN_SECONDS = 1.0
"""How long a step may not even be begun: less than others are waited for once a rank is lost."""
_LOOK_SECONDS = 0.001
"""How often it is looked whether it is: it is by all ranks at about the same time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreWire:
    """Steps told through the store of real ranks."""

    real_rank: RealRank
    stall_seconds: float
    """How long a step may take that was begun: then it is the harness that computes, no system."""

    def begin(self, step: int) -> None:
        """As `StepWire` says."""
        self.real_rank.tell({}, about=f"owing {step}")

    def tell(self, step: int, owed: Sequence[Mapping[str, Any]] | None) -> None:
        """As `StepWire` says."""
        self.real_rank.tell(owed, about=f"owed {step}")

    def hear(self, step: int) -> Sequence[Mapping[str, Any]] | None:
        """As `StepWire` says."""
        # Not by a wait of the store, which complains on stderr when its time is over.
        begin_by = time.monotonic() + _BEGIN_SECONDS
        while not self.real_rank.has_told(TELLER, about=f"owing {step}"):
            if time.monotonic() > begin_by:
                return None
            time.sleep(_LOOK_SECONDS)
        try:
            return self.real_rank.hear(TELLER, about=f"owed {step}", seconds=self.stall_seconds)
        except (RankGone, TimeoutError):
            return None

    def close(self, steps: int) -> None:
        """Let nobody wait for steps that are not told any more.

        Args:
            steps: How many the case has.
        """
        for step in range(steps):
            # Who hears the first of them goes on alone, and asks for no other.
            if self.real_rank.withdraw([f"owing {step}", f"owed {step}"]):
                return
