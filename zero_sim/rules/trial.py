"""Trial of alternatives: rules and faults under which a step gives the observed bits.

A correct system with a wrong declaration differs from the reference like a faulty system. So the
step is repeated under rules with one change, and if none fits, with two changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from zero_sim.findings.compare import same_bits
from zero_sim.judge.explaining import Observation
from zero_sim.judge.rules_tried import RulesTried, What
from zero_sim.reference import StepAgain


class Alternatives(Protocol):
    """Alternative ways to take a step."""

    @property
    def assumed(self) -> str:
        """The reference's rule, as a target declares it."""
        ...

    def singles(self) -> Mapping[str, StepAgain]:
        """Return the step with one change, by rule."""
        ...

    def pairs(self) -> Mapping[str, StepAgain]:
        """Return the step with two changes, by rule."""
        ...


class Trial:
    """Tries alternatives on one step, and keeps all that fit.

    Args:
        what: Result kind: gradients, updates or faults.
        alternatives: Alternatives to try.
        expected: The expected step.
    """

    def __init__(self, what: What, alternatives: Alternatives, *, expected: StepAgain) -> None:
        self._what: What = what
        self._alternatives = alternatives
        self._expected = expected
        self._agreed: list[Observation] = []
        """Places that agreed before the first difference."""
        self._tried = 0
        self.fitting: dict[str, StepAgain] | None = None
        """Fitting alternatives, by rule; None before the first difference."""
        self.shows_state = False
        """True if optimizer state was observed, which shows a gradient's factor."""

    def agree(self, observation: Observation) -> None:
        """Record a place without a difference."""
        # Nothing has differed yet.
        if self.fitting is None:
            self._agreed.append(observation)
        else:
            self._keep(observation, self._wanted(observation))

    def differ(self, observation: Observation, got: Mapping[str, Tensor]) -> None:
        """Record a difference at a place, where a rank has `got`."""
        # Later places can only exclude alternatives.
        if self.fitting is not None:
            self._keep(observation, got)
            return
        # Two changes only if no single change fits.
        for some in (self._alternatives.singles, self._alternatives.pairs):
            self.fitting = {**some()}
            self._tried += len(self.fitting)
            self._keep(observation, got)
            # An alternative must not change these places.
            for earlier in self._agreed:
                self._keep(earlier, self._wanted(earlier))
            if self.fitting:
                break
        self._agreed.clear()

    def _wanted(self, observation: Observation) -> Mapping[str, Tensor]:
        return observation.pick(self._expected)

    def _keep(self, observation: Observation, got: Mapping[str, Tensor]) -> None:
        """Keep the alternatives that give a rank's tensors at a place."""
        assert self.fitting is not None
        # Several tensors include optimizer state as well as the param.
        self.shows_state |= len(got) > 1
        self.fitting = {
            rule: by
            for rule, by in self.fitting.items()
            if _same(observation.pick(by.at(observation.rank)), got)
        }

    def outcome(self) -> RulesTried | None:
        """Return the result; None if nothing differs."""
        if self.fitting is None:
            return None
        return RulesTried(
            assumed=self._alternatives.assumed,
            tried=self._tried,
            fitting=tuple(self.fitting),
            what=self._what,
        )


def _same(wanted: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> bool:
    # Shards may be flat, so shapes are not compared.
    return wanted.keys() == got.keys() and all(
        value.dtype == got[name].dtype
        and value.numel() == got[name].numel()
        and same_bits(value.reshape(-1), got[name].reshape(-1))
        for name, value in wanted.items()
    )
