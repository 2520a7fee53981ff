"""Rules and mistakes that fit all that ranks show of a step in which something differs.

A right system whose rule is declared wrongly differs from the reference as a wrong one does. So the
step is taken again: first by rules that differ in one thing, then, if none of these fits, in two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from zero_sim.findings.compare import same_bits
from zero_sim.judge.explaining import Seen
from zero_sim.judge.rules_tried import RulesTried, What
from zero_sim.reference import StepAgain


class Alternatives(Protocol):
    """Ways in which a step could have been taken."""

    @property
    def assumed(self) -> str:
        """The rule that the reference followed, as a target declares it."""
        ...

    def singles(self) -> Mapping[str, StepAgain]:
        """Return the step by those that differ in one thing, by rule."""
        ...

    def pairs(self) -> Mapping[str, StepAgain]:
        """Return those that differ in two."""
        ...


class Trial:
    """Tries alternatives on one step, and keeps those that fit.

    Args:
        what: What they compute.
        alternatives: The alternatives.
        expected: The step as it was expected.
    """

    def __init__(self, what: What, alternatives: Alternatives, *, expected: StepAgain) -> None:
        self._what: What = what
        self._alternatives = alternatives
        self._expected = expected
        self._agreed: list[Seen] = []
        """Places that agree, as long as all do."""
        self._tried = 0
        self.fitting: dict[str, StepAgain] | None = None
        """Alternatives that fit, by rule; None as long as nothing differs."""
        self.shows_state = False
        """True if optimizer state was observed, which shows a gradient's factor."""

    def agree(self, seen: Seen) -> None:
        """Note a place that agrees."""
        if self.fitting is None:
            self._agreed.append(seen)
        else:
            self._keep(seen, self._wanted(seen))

    def differ(self, seen: Seen, got: Mapping[str, Tensor]) -> None:
        """Note a place that differs.

        Args:
            seen: The place.
            got: Tensors of the rank there.
        """
        if self.fitting is not None:
            self._keep(seen, got)
            return
        for some in (self._alternatives.singles, self._alternatives.pairs):
            self.fitting = {**some()}
            self._tried += len(self.fitting)
            self._keep(seen, got)
            for earlier in self._agreed:
                self._keep(earlier, self._wanted(earlier))
            if self.fitting:
                break
        self._agreed.clear()

    def _wanted(self, seen: Seen) -> Mapping[str, Tensor]:
        return seen.pick(self._expected)

    def _keep(self, seen: Seen, got: Mapping[str, Tensor]) -> None:
        """Keep the alternatives that give what a rank has in a place."""
        assert self.fitting is not None
        self.shows_state |= len(got) > 1
        self.fitting = {
            rule: by for rule, by in self.fitting.items() if _same(seen.pick(by.at(seen.rank)), got)
        }

    def outcome(self) -> RulesTried | None:
        """Return what came of it; None if nothing differs."""
        if self.fitting is None:
            return None
        return RulesTried(
            assumed=self._alternatives.assumed,
            tried=self._tried,
            fitting=tuple(self.fitting),
            what=self._what,
        )


def _same(wanted: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> bool:
    return wanted.keys() == got.keys() and all(
        value.dtype == got[name].dtype
        and value.numel() == got[name].numel()
        and same_bits(value.reshape(-1), got[name].reshape(-1))
        for name, value in wanted.items()
    )
