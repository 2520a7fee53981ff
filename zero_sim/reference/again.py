"""Steps repeated with other rules, or with fewer terms in their sums.

The ranks are replayed once. Their gradients are kept per micro-batch, so each further rule costs
one sum and one update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from zero_sim.reference.division import DivideBy, Division, count_contributions
from zero_sim.reference.norms import Holdings
from zero_sim.reference.ranks import Adding, Contributions, Ranks
from zero_sim.reference.replay import RankReplay, isolated
from zero_sim.reference.rules import Rules
from zero_sim.reference.steps import ReferenceStep, StepStart
from zero_sim.scenario.spec import Scenario


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """Terms that a faulty system adds; all by default."""

    micros: frozenset[int] | None = None
    """Micro-batches; None for all."""
    is_local: bool = False
    """True if only the observer contributes terms."""
    is_divided: bool = True
    """True to divide the sum as if it had all terms."""


@dataclass(frozen=True, kw_only=True)
class Again:
    """A step, ready to be repeated."""

    scenario: Scenario
    taken: ReferenceStep
    """The original step."""
    start: StepStart
    """State before the step."""
    rules: Rules
    """Rules of the original step."""
    ranks: Ranks
    replays: Sequence[RankReplay]
    """Replays by rank, with gradients by micro-batch."""
    replay: Callable[[Rules], Sequence[RankReplay]]
    """Replays the ranks under other rules, which may scale the losses differently."""
    holdings: Holdings
    """Owned parts, by rank; empty if not reported."""
    finish: Callable[[StepAgain], ReferenceStep]
    """Computes the update from the sums."""
    _known: dict[object, StepAgain] = field(default_factory=dict)
    _scaled: dict[object, Sequence[RankReplay]] = field(default_factory=dict)
    """Replays by `Rules.scale_loss` and `scale_second`, except those of `rules`."""

    def by(
        self, rules: Rules | None = None, terms: Terms | None = None, *, rank: int = 0
    ) -> StepAgain:
        """Return the step under other rules, or with other terms.

        Args:
            rules: The rules; None for the original step's rules.
            terms: Terms of the sums; None for all.
            rank: The observer, if the terms are local.
        """
        terms = terms or Terms()
        # The observer matters for local terms only. Otherwise all observers share a result.
        by = StepAgain(
            again=self,
            rules=rules or self.rules,
            terms=terms,
            rank=rank if terms.is_local else 0,
            finish=self.finish,
        )
        # Keyed by value, so that equal hypotheses share their sums.
        return self._known.setdefault((by.rules, by.terms, by.rank), by)

    def count(self, by: DivideBy) -> float:
        """Count the contributions to a sum."""
        return count_contributions(
            by,
            rank_count=len(self.replays),
            micro_batches=sum(len(replay.losses) for replay in self.replays),
            rows=sum(replay.rows for replay in self.replays),
        )

    def replays_by(self, rules: Rules) -> Sequence[RankReplay]:
        """Return the replays by rank, repeated if `rules` scale losses differently."""
        # A loss's factor is inside its rounded gradients, so only a replay can change it.
        factors = rules.scale_loss, rules.scale_second
        if factors == (self.rules.scale_loss, self.rules.scale_second):
            return self.replays
        if factors not in self._scaled:
            main, second = factors
            # Other rules do not affect micro-batch gradients, which are kept unaccumulated.
            scaled = replace(self.rules, scale_loss=main, scale_second=second)
            self._scaled[factors] = self.replay(scaled)
        return self._scaled[factors]

    @cached_property
    def unused(self) -> Sequence[str]:
        """Params that no rank used, under any rule for unused params."""
        used = frozenset[str]().union(*(replay.reached for replay in self.replays))
        return [name for name in self.ranks.trained(self.taken.step) if name not in used]


@dataclass(frozen=True, kw_only=True)
class StepAgain:
    """The step under given rules and with given terms. Each part is computed on first access."""

    again: Again
    rules: Rules
    terms: Terms
    rank: int
    """The observer, if the terms are local."""
    finish: Callable[[StepAgain], ReferenceStep]
    """Computes the update from the sums, with any fault after these."""
    _sums: dict[str, Tensor] = field(default_factory=dict)

    def at(self, rank: int) -> StepAgain:
        """Return the step as a rank takes it."""
        return self.again.by(self.rules, self.terms, rank=rank) if self.terms.is_local else self

    @cached_property
    def division(self) -> Division:
        """Division of this step's sums."""
        if not self.terms.is_divided:
            # A fault that omits the division altogether.
            return Division(how="none", count=1)
        # Divided by the count of all terms, because a fault drops terms, not the divisor.
        return self.again.ranks.contributions([], self.again.replays, self.rules).division

    @cached_property
    def step(self) -> ReferenceStep:
        """The whole step; its tensors are not live."""
        return self.finish(self)

    @property
    def differs_only_in_clip(self) -> bool:
        """True if gradients before clipping equal those of the original step."""
        clipped = replace(self.again.rules, clip=self.rules.clip)
        return self.terms == Terms() and self.rules == clipped

    @cached_property
    def active(self) -> Sequence[str]:
        """Params with a gradient, in order."""
        ranks, replays, step = self.again.ranks, self.again.replays, self.again.taken.step
        return [name for name in ranks.active(step, replays, self.rules) if self.holds(name)]

    def holds(self, name: str) -> bool:
        """Return True if any rank with terms has a param."""
        return any(name in replay.rounds[0] for replay in self._replays.values())

    def sum(self, name: str) -> Tensor:
        """Add a param's gradients; `holds` must be True for it."""
        if name not in self._sums:
            with isolated():
                self._sums[name] = self._summed(name)
        return self._sums[name]

    def contributions(self) -> Contributions:
        """Return the contributions under these rules, without their terms."""
        local = self.again.ranks.contributions(self.active, self.again.replays, self.rules)
        names = [name for name in local.names if self.holds(name)]
        return replace(local, names=names, division=self.division)

    @property
    def _replays(self) -> Mapping[int, RankReplay]:
        replays = dict(enumerate(self.again.replays))
        return {self.rank: replays[self.rank]} if self.terms.is_local else replays

    def _summed(self, name: str) -> Tensor:
        ranks, start = self.again.ranks, self.again.start
        # Not stepped, so the original's shape and dtype serve.
        if name not in self.active:
            return torch.zeros_like(self.again.taken.grads[name])
        replays = [self._accumulated(rank, name) for rank in self._replays]
        local = ranks.contributions([name], replays, self.rules)
        local = replace(local, division=self.division)
        # A single rank's terms: no call adds them, so no order applies.
        if self.terms.is_local:
            return local.reduce_param(name, Adding(order="linear"), spans=None)
        return local.reduce_param(name, start.adding, spans=start.orders.get(name))

    def _accumulated(self, rank: int, name: str) -> RankReplay:
        """Return a rank's replay with one param's gradients, accumulated from the chosen terms."""
        replay, micros = self.again.replays_by(self.rules)[rank], self.terms.micros
        # Per micro-batch, at most this param's gradient.
        held = [
            {name: grads[name]}
            if name in grads and (micros is None or micro in micros)
            else dict[str, Tensor]()
            for micro, grads in enumerate(replay.micro_grads)
        ]
        # Another rank's expert is in none of the sums.
        names = [name] if name in replay.rounds[0] else []
        rounds = self.again.ranks.accumulate(rank, held, names, self.rules)
        return replace(replay, rounds=tuple(rounds))
