"""Explanation of one step's differences, by repeating it with other rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from zero_sim.findings.compare import same_bits
from zero_sim.findings.ratio import Ratio
from zero_sim.findings.recognition import Known
from zero_sim.judge.explaining import Observation
from zero_sim.judge.factors import FactorCauses
from zero_sim.judge.judged_group import JudgedGroup
from zero_sim.judge.reported_grads import sum_as_reported
from zero_sim.judge.rules_tried import RulesTried
from zero_sim.reference import Reference, ReferenceStep, StepAgain
from zero_sim.rules.alternatives import LOCAL, SumRules, UpdateRules, norm_steps, partial_sums
from zero_sim.rules.mistakes import Mistakes
from zero_sim.rules.trial import Trial
from zero_sim.scenario.spec import OptimizerName, Scenario

SEES_FACTORS: tuple[OptimizerName, ...] = ("sgd", "asgd")
"""Optimizers whose updates are proportional to the gradient."""


class Explainer:
    """Explains one step's differences, as `zero_sim.judge.explaining.Explainer` requires.

    Args:
        expected: The reference's step.
        reference: The reference, which may be some steps ahead.
        group: The judged group, with its targets and observations.
        agreed: Places without a difference so far.
    """

    def __init__(
        self,
        expected: ReferenceStep,
        *,
        reference: Reference,
        group: JudgedGroup,
        agreed: Sequence[Observation],
    ) -> None:
        again = reference.again(expected)
        assert again is not None, "expected a step whose start was kept"
        self._again, self._group = again, group
        self._sums = sums = SumRules.of(again)
        self._gradients = self._mistakes = None
        if sums is not None:
            self._gradients = Trial("gradient", sums, expected=again.by())
        updates = UpdateRules(again=again, sums=sums)
        self._updates = Trial("update", updates, expected=again.by())
        # Faults need all earlier steps, because the optimizer runs again from its start.
        if again.start.history is not None:
            mistakes = Mistakes(again=again, sums={} if sums is None else partial_sums(again))
            self._mistakes = Trial("mistake", mistakes, expected=again.by())
        # Alternatives must also fit all places before the first difference.
        for observation in agreed:
            self._agree(observation)

    def look(self, observation: Observation, got: Mapping[str, Tensor], *, agrees: bool) -> None:
        """Record another place; arguments as in the protocol."""
        if agrees:
            self._agree(observation)
        elif observation.what == "gradient":
            if self._gradients is not None:
                self._gradients.differ(observation, got)
        # Gradients come first: if they differ, updates differ because of them.
        elif self._gradients is None or self._gradients.fitting is None:
            self._updates.differ(observation, got)
            if self._mistakes is not None:
                self._mistakes.differ(observation, got)

    def _agree(self, observation: Observation) -> None:
        if observation.what == "gradient" and self._gradients is not None:
            self._gradients.agree(observation)
        # If a gradient agrees, only a rule for a later stage can differ.
        self._updates.agree(observation)
        if observation.what == "update" and self._mistakes is not None:
            self._mistakes.agree(observation)

    def known_grads(self, name: str, *, rank: int, start: int) -> Iterator[Known]:
        """Yield incomplete gradients. If several have equal bits, yield the most likely."""
        again = self._again
        if self._sums is None or name not in again.by().active:
            return
        partials = [(rank, what, terms) for what, terms in partial_sums(again).items()]
        # A rank may also have another rank's gradient.
        for other, world_rank in enumerate(self._group.world_ranks):
            if other != rank:
                partials.append((other, f"rank {world_rank} alone, not reduced", LOCAL))
        # Values yielded so far.
        distinct: list[Tensor] = []
        for observer, what, terms in partials:
            by = again.by(terms=terms, rank=observer)
            if not by.holds(name):
                continue
            values = sum_as_reported(by, name, numerics=self._group.numerics)
            if not any(same_bits(values, each) for each in distinct):
                distinct.append(values)
                yield Known(what=f"the gradient of {what}", values=values, start=start)

    def explain_norm(self, norm: Tensor) -> str:
        """Return the rules that give a norm, and advice to declare the first; empty if none."""
        again = self._again
        # A skipped step has no norm to compare.
        if again.taken.skipped:
            return ""
        # Another sum changes the norm as well.
        steps = norm_steps(again) | ({} if self._sums is None else self._sums.singles())
        fitting = [rule for rule, by in steps.items() if same_bits(by.step.norm, norm)]
        if not fitting:
            return ""
        advice = why_blind(self._group.scenario, shows_factor=True) or (
            f"If this is intended, declare Numerics({fitting[0].replace(' = ', '=')})"
        )
        return f"these are the bits of {' or '.join(fitting)}.\n{advice}"

    def tried(self) -> RulesTried | None:
        """Return the result from trying rules; None if no gradient or update differs."""
        if self._gradients is not None and self._gradients.fitting is not None:
            return self._outcome(self._gradients)
        rules = self._outcome(self._updates)
        mistakes = None if self._mistakes is None else self._mistakes.outcome()
        # If a fault fits, report it first, with the rules beside it.
        if mistakes is not None and mistakes.fitting:
            return replace(mistakes, also=rules)
        return rules

    def _outcome(self, trial: Trial) -> RulesTried | None:
        tried = trial.outcome()
        if tried is None:
            return None
        # Clip forms differ by a few ulp, not by a factor.
        is_factor = tried.what == "update" and not tried.assumed.startswith("clip")
        shows_factor = trial.shows_state or not is_factor
        # Name a factor only if all fitting rules share it.
        factors = {self._factor(by) for by in (trial.fitting or {}).values()}
        return replace(
            tried,
            blind=why_blind(self._group.scenario, shows_factor),
            factor=factors.pop() if len(factors) == 1 else "",
        )

    def _factor(self, by: StepAgain) -> str:
        """Return a rule's gradient factor and its cause; empty without a factor."""
        again = self._again
        now, tried = again.rules, by.rules
        # A loss factor is not a division.
        if (tried.scale_loss, tried.scale_second) != (now.scale_loss, now.scale_second):
            return ""
        divisor, expected = _divisor(by), _divisor(again.by())
        causes = FactorCauses.of(
            again.taken.losses,
            divisor=expected,
            replicas=again.scenario.system.redundancy,
            is_mean=expected != 1,
        )
        larger, smaller = max(expected, divisor), min(expected, divisor)
        # Only whole ratios have a known cause.
        if larger % smaller:
            return ""
        number = int(larger // smaller)
        is_multiple = divisor < expected
        return causes.explain(Ratio(number=number, is_multiple=is_multiple, is_rounded=False))


def _divisor(by: StepAgain) -> float:
    return 1 if by.division.how == "none" else by.division.count


def why_blind(scenario: Scenario, shows_factor: bool) -> str:
    """Return the reason why a case does not distinguish rules; empty if it does.

    `shows_factor` is True if a gradient was observed, or state made from it.
    """
    name = scenario.optimizer.name
    if scenario.world.size == 1:
        return "No rule is proposed: a case of one rank does not tell rules apart"
    if not shows_factor and name not in SEES_FACTORS:
        return f"No rule is proposed: params that {name} stepped hardly show a gradient's factor"
    return ""
