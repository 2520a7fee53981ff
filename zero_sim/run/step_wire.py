"""Steps that one process takes for all, sent as digests through the store of real ranks.

Nobody depends on them: a process that receives nothing in time, or that nothing more is sent, takes
its own steps.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from typing import Any

from zero_sim.backends.real import RankGone, RealRank
from zero_sim.judge.judged_group import JudgedGroup
from zero_sim.judge.step_digests import StepDigests, digests_of
from zero_sim.reference import ReferenceStep

TELLER = 0
"""The rank that takes steps for all."""
_BEGIN_SECONDS = 1.0
"""How long a step may not even be begun: less than others are waited for once a rank is lost."""
_LOOK_SECONDS = 0.001
"""How often it is looked whether it is: it is by all ranks at about the same time."""


class WiredSteps:
    """Steps in the store; see `SharedSteps`.

    Args:
        real_rank: This process.
        stall_seconds: How long a step may take that was begun: then it is the harness that
            computes, no system.
    """

    def __init__(self, real_rank: RealRank, *, stall_seconds: float) -> None:
        self._real_rank = real_rank
        self._stall_seconds = stall_seconds
        self.are_digests = real_rank.rank != TELLER
        self._tells = not self.are_digests
        """False once the others take their own steps."""

    def find(self, step: int, *, placed: Hashable = None) -> Sequence[StepDigests] | None:
        """Return a step that was sent; None also if nothing came, for whatever reason."""
        if not self.are_digests:
            return None
        # Not by a wait of the store, which complains on stderr when its time is over.
        begin_by = time.monotonic() + _BEGIN_SECONDS
        while not self._real_rank.has_told(TELLER, about=f"owing {step}"):
            if time.monotonic() > begin_by:
                return None
            time.sleep(_LOOK_SECONDS)
        try:
            sent = self._real_rank.hear(TELLER, about=f"owed {step}", seconds=self._stall_seconds)
        except (RankGone, TimeoutError):
            return None
        return None if sent is None else [StepDigests(**each) for each in sent]

    def begin(self, step: int) -> None:
        """Send that a step is being taken."""
        if self._tells:
            self._real_rank.tell({}, about=f"owing {step}")

    def keep(
        self,
        taken: Sequence[ReferenceStep],
        *,
        groups: Sequence[JudgedGroup],
        placed: Hashable = None,
    ) -> None:
        """Send a step, or that the others have to take it, if digests do not cover it."""
        if not self._tells:
            return
        digests = [digests_of(each, group=group) for each, group in zip(taken, groups, strict=True)]
        sent = [each.as_dict() for each in digests if each is not None]
        if len(sent) == len(groups):
            self._send(taken[0].step, sent)
        else:
            self.stop(taken[0].step)

    def stop(self, step: int) -> None:
        """Let the others take their own steps, from this one on."""
        if self._tells:
            self.begin(step)
            self._send(step, None)
            self._tells = False

    def _send(self, step: int, steps: Sequence[dict[str, Any]] | None) -> None:
        self._real_rank.tell(steps, about=f"owed {step}")

    def close(self, steps: int) -> None:
        """Let nobody wait for steps that are not sent any more.

        Args:
            steps: How many the case has.
        """
        for step in range(steps):
            # Who hears the first of them goes on alone, and asks for no other.
            if self._real_rank.withdraw([f"owing {step}", f"owed {step}"]):
                return
