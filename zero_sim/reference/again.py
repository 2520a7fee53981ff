"""One step of the reference, taken again: by other rules, or from some of the terms of its sums.

The ranks are replayed once more. What each of them computed in each micro-batch is kept, so another
rule costs one sum and one update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from zero_sim.reference.division import DivideBy, Division, count_contributions
from zero_sim.reference.norms import Holdings
from zero_sim.reference.ranks import Adding, Contributions, Orders, Ranks
from zero_sim.reference.replay import RankReplay, isolated
from zero_sim.reference.rules import Rules, dtype_named
from zero_sim.reference.steps import ReferenceStep
from zero_sim.scenario.spec import Scenario


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """The terms of a sum of gradients that a faulty system adds; all of them by default."""

    micros: frozenset[int] | None = None
    """Micro-batches; None for all."""
    rank: int | None = None
    """The only rank whose gradients are added; None for all."""
    is_divided: bool = True
    """True if the sum is divided as the sum of all terms would be."""


@dataclass(frozen=True, kw_only=True)
class Again:
    """A step, ready to be taken again."""

    scenario: Scenario
    taken: ReferenceStep
    """The step as it was taken."""
    rules: Rules
    """The rules by which it was."""
    ranks: Ranks
    replays: Sequence[RankReplay]
    """By rank, with the gradients of every micro-batch."""
    holdings: Holdings
    """By rank, the parts of params that it owns; empty if not reported."""
    adding: Adding
    orders: Orders
    finish: Callable[[StepAgain], ReferenceStep]
    """Computes all that follows from the sums."""

    def by(self, rules: Rules | None = None, terms: Terms | None = None) -> StepAgain:
        """Return the step by other rules, or from other terms.

        Args:
            rules: The rules; None for those by which it was taken.
            terms: The terms of its sums; None for all.
        """
        return StepAgain(again=self, rules=rules or self.rules, terms=terms or Terms())

    def count(self, by: DivideBy) -> float:
        """Return the number of contributions to a sum.

        Args:
            by: Unit in which they are counted.
        """
        return count_contributions(
            by,
            rank_count=len(self.replays),
            micro_batches=sum(len(replay.losses) for replay in self.replays),
            rows=sum(replay.rows for replay in self.replays),
        )

    @cached_property
    def unused(self) -> Sequence[str]:
        """Names of the params that no rank used, whatever rule holds for these."""
        used = frozenset[str]().union(*(replay.reached for replay in self.replays))
        return [name for name in self.ranks.trained(self.taken.step) if name not in used]


@dataclass(frozen=True, kw_only=True)
class StepAgain:
    """The step by some rules, from some terms. Each part is computed when it is first read."""

    again: Again
    rules: Rules
    terms: Terms
    _sums: dict[str, Tensor] = field(default_factory=dict)

    @cached_property
    def division(self) -> Division:
        """The division of its sums."""
        if not self.terms.is_divided:
            return Division(how="none", count=1)
        return self.again.ranks.contributions([], self.again.replays, self.rules).division

    @cached_property
    def step(self) -> ReferenceStep:
        """All that follows from the sums; its tensors are not live."""
        return self.again.finish(self)

    @property
    def differs_in_clip_alone(self) -> bool:
        """True if the gradients before clipping are those of the step as it was taken."""
        return self.terms == Terms() and self.rules == replace(
            self.again.rules, clip=self.rules.clip
        )

    def sum(self, name: str) -> Tensor:
        """Return the sum of a param's gradients.

        Args:
            name: The param, one that `holds`.
        """
        if name not in self._sums:
            with isolated():
                self._sums[name] = self._summed(name)
        return self._sums[name]

    def holds(self, name: str) -> bool:
        """Return True if a rank whose gradients are added has a param.

        Args:
            name: The param.
        """
        return any(name in replay.rounds[0] for replay in self._replays)

    @cached_property
    def active(self) -> Sequence[str]:
        """Names of the params that have a gradient, in order."""
        ranks, replays, step = self.again.ranks, self.again.replays, self.again.taken.step
        return [name for name in ranks.active(step, replays, self.rules) if self.holds(name)]

    def contributions(self) -> Contributions:
        """Return all that is known of the sums but the terms."""
        local = self.again.ranks.contributions(self.active, self.again.replays, self.rules)
        names = [name for name in local.names if self.holds(name)]
        return replace(local, names=names, division=self.division)

    @property
    def _replays(self) -> Sequence[RankReplay]:
        replays, rank = self.again.replays, self.terms.rank
        return replays if rank is None else [replays[rank]]

    def _summed(self, name: str) -> Tensor:
        again, ranks = self.again, self.again.ranks
        if name not in self.active:
            return torch.zeros_like(again.taken.grads[name])
        replays = [self._accumulated(replay, name) for replay in self._replays]
        local = replace(ranks.contributions([name], replays, self.rules), division=self.division)
        if self.terms.rank is not None:
            return local.reduce_param(name, Adding(order="linear"), spans=None)
        return local.reduce_param(name, again.adding, spans=again.orders.get(name))

    def _accumulated(self, replay: RankReplay, name: str) -> RankReplay:
        """What a rank brings to the sums of one param, by the rules and from the terms."""
        sync, accumulate, reduce = self.again.ranks.how(self.rules)
        dtype = dtype_named(accumulate if sync == "last" else reduce)
        sums = 1 if sync == "last" else self.again.scenario.run.micro_batches
        if name not in replay.rounds[0]:
            # Another rank's expert, which as many sums as on other ranks leave out.
            return replace(replay, rounds=({},) * sums)
        rounds: list[Tensor | None] = [None] * sums
        for micro, grads in enumerate(replay.micro_grads):
            grad = grads.get(name)
            if grad is not None and (self.terms.micros is None or micro in self.terms.micros):
                term = grad if dtype is None else grad.to(dtype)
                held = rounds[micro % sums]
                rounds[micro % sums] = term if held is None else held + term
        own = next((grads[name].dtype for grads in replay.micro_grads if name in grads), None)
        like = replay.rounds[0][name]
        zero = torch.zeros_like(like, dtype=dtype or own or like.dtype)
        held = [zero if each is None else each for each in rounds]
        return replace(replay, rounds=tuple({name: each} for each in held))
