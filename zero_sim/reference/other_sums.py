"""Alternative sums: what other known rules would have made of the gradients of a step.

One rule is changed at a time, or two that are about different things; all from what ranks computed
in each micro-batch, so that nothing is replayed for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from zero_sim.reference.adding import SumSpan
from zero_sim.reference.division import DIVIDE_RULES, DivideBy, Division, count_contributions
from zero_sim.reference.ranks import Adding, Contributions, Orders, Ranks
from zero_sim.reference.replay import RankReplay
from zero_sim.reference.rules import Rules, dtype_named
from zero_sim.scenario.spec import Scenario

Change = Mapping[str, Any]
"""Fields of a target's declaration, by name, and what they would be."""

_COUNTS: tuple[DivideBy, ...] = ("ranks", "micro-batches", "tokens")
_ROUNDS: tuple[Change, ...] = (
    {"sync": "last"},
    {"sync": "every"},
    {"sync": "every", "divide_each": "round"},
    {"sync": "every-in-block"},
)
_DTYPES: tuple[Change, ...] = (
    {"grad_dtype": "param"},
    {"grad_dtype": "fp32"},
    {"accumulate_dtype": "fp32", "reduce_dtype": "param"},
    {"accumulate_dtype": "param", "reduce_dtype": "fp32"},
    {"reduce_dtype": "bf16"},
    {"reduce_dtype": "fp16"},
)


@dataclass(frozen=True, kw_only=True, slots=True)
class OtherSum:
    """A reduced gradient by another rule."""

    total: Tensor  # ND, dtype of the sum
    division: Division
    """What is yet to be done to it."""


@dataclass(frozen=True, kw_only=True)
class OtherSums:
    """One step's gradients, and the rules by which they could have been summed."""

    scenario: Scenario
    ranks: Ranks
    local: Contributions
    """With the gradients of every micro-batch."""
    adding: Adding
    orders: Orders
    followed: Rules
    """The rules that were assumed."""

    @property
    def assumed(self) -> str:
        """The rules that the reference followed."""
        return said_of(self._assumed)

    @cached_property
    def _assumed(self) -> dict[str, object]:
        rules, system = self.followed, self.scenario.system
        said: dict[str, object] = {
            "divide": rules.divide or system.divide,
            "divide_by": rules.divide_by or system.divide_by,
            "sync": rules.sync or system.sync,
            "grad_dtype": system.grad_dtype,
        }
        for name in ("predivide_by", "accumulate_dtype", "reduce_dtype"):
            if getattr(rules, name) is not None:
                said[name] = getattr(rules, name)
        if rules.divide_each != "step":
            said["divide_each"] = rules.divide_each
        return said

    def singles(self) -> list[str]:
        """Rules that differ from those assumed in one thing."""
        return [said_of(_joined(change)) for change in self._changes.values() if len(change) == 1]

    def pairs(self) -> list[str]:
        """Those that differ in two."""
        return [said_of(_joined(change)) for change in self._changes.values() if len(change) > 1]

    @cached_property
    def _changes(self) -> dict[str, tuple[Change, ...]]:
        """By what they say: changes of one thing, or of two."""
        things = [[each for each in thing if self._differs(each)] for thing in self._things()]
        found: list[tuple[Change, ...]] = [(one,) for thing in things for one in thing]
        for first, second in combinations(things, 2):
            found += [(one, other) for one in first for other in second]
        return {said_of(_joined(changes)): changes for changes in found}

    def _things(self) -> Iterator[tuple[Change, ...]]:
        yield tuple({"divide": rule} for rule in DIVIDE_RULES)
        yield tuple({"divide_by": count} for count in _COUNTS)
        if self.scenario.run.micro_batches > 1:
            yield _ROUNDS if self.scenario.system.redundancy > 1 else _ROUNDS[:-1]
        yield _DTYPES

    def _differs(self, change: Change) -> bool:
        return any(self._assumed.get(name) != value for name, value in change.items())

    def sum(self, rule: str, name: str) -> OtherSum:
        """The gradient of a param by other rules.

        Args:
            rule: One of `singles` or `pairs`.
            name: The param, one that is trained in the step.
        """
        rules = self.rules_of(rule)
        replays = [self._rounds(replay, name, rules) for replay in self.local.replays]
        local = self.ranks.contributions([name], replays, rules)
        return _summed(local, name, self.adding, spans=self.orders.get(name))

    def rules_of(self, rule: str) -> Rules:
        """The rules of the reference that are declared so."""
        change = _joined(self._changes[rule])
        rules = self.followed
        if "grad_dtype" in change:
            dtype = change["grad_dtype"]
            rules = replace(rules, accumulate_dtype=dtype, reduce_dtype=dtype)
        if "sync" in change:
            rules = replace(rules, divide_each="step")
        plain = {name: value for name, value in change.items() if name != "grad_dtype"}
        count: Any = plain.get("divide_by")
        if count is not None:
            plain["divide_by"] = self._count(count)
        if "divide" in plain:
            plain["predivide_by"] = None
        return replace(rules, **plain)

    def divisor_of(self, rule: str) -> float | None:
        """What the mean is divided by in all, by a rule; None if the rule is of something else.

        Args:
            rule: One of `singles` or `pairs`, or any other.
        """
        if rule not in self._changes:
            return None
        rules = self.rules_of(rule)
        division = self.ranks.contributions(self.local.active, self.local.replays, rules).division
        return 1 if division.how == "none" else division.count

    def part_of_sum(
        self,
        name: str,
        *,
        micros: Collection[int] | None = None,
        rank: int | None = None,
        is_divided: bool = True,
    ) -> OtherSum | None:
        """The gradient of a param by a system that leaves out some of what is to be added.

        Args:
            name: The param, one that is trained in the step.
            micros: The micro-batches that it adds; None for all.
            rank: The one rank that it adds; None for all.
            is_divided: Whether it is divided as the sum of all would be.

        Returns:
            None if that rank does not hold the param.
        """
        replays = [each for each in self.local.replays if name in each.rounds[0]]
        if rank is not None:
            replays = [each for each in replays if each is self.local.replays[rank]]
        if not replays:
            return None
        rounds = [self._rounds(each, name, self.followed, micros=micros) for each in replays]
        division = self.local.division if is_divided else Division(how="none", count=1)
        local = self.ranks.contributions([name], rounds, self.followed)
        local = replace(local, division=division)
        adding, spans = self.adding, self.orders.get(name)
        if rank is not None:
            adding, spans = Adding(order="linear"), None
        return _summed(local, name, adding, spans=spans)

    def _count(self, by: DivideBy) -> float:
        return count_contributions(
            by,
            rank_count=len(self.local.replays),
            micro_batches=sum(len(replay.losses) for replay in self.local.replays),
            rows=sum(replay.rows for replay in self.local.replays),
        )

    def _rounds(
        self,
        replay: RankReplay,
        name: str,
        rules: Rules,
        *,
        micros: Collection[int] | None = None,
    ) -> RankReplay:
        """What a rank would have brought of one param, from all micro-batches or some."""
        sync, accumulate, reduce = self.ranks.how(rules)
        dtype = dtype_named(accumulate if sync == "last" else reduce)
        sums = 1 if sync == "last" else self.scenario.run.micro_batches
        if name not in replay.rounds[0]:
            # Another rank's expert, which as many sums as on other ranks leave out.
            return replace(replay, rounds=({},) * sums)
        zero = torch.zeros_like(replay.rounds[0][name], dtype=self._own(replay, name, dtype))
        rounds: list[Tensor | None] = [None] * sums
        for micro, grads in enumerate(replay.micro_grads):
            grad = grads.get(name)
            if grad is not None and (micros is None or micro in micros):
                term = grad if dtype is None else grad.to(dtype)
                held = rounds[micro % sums]
                rounds[micro % sums] = term if held is None else held + term
        held = [zero if each is None else each for each in rounds]
        return replace(replay, rounds=tuple({name: each} for each in held))

    def _own(self, replay: RankReplay, name: str, dtype: torch.dtype | None) -> torch.dtype:
        own = next((grads[name].dtype for grads in replay.micro_grads if name in grads), None)
        return dtype or own or replay.rounds[0][name].dtype


def _summed(
    local: Contributions, name: str, adding: Adding, *, spans: Sequence[SumSpan] | None
) -> OtherSum:
    division = local.division
    total = local.reduce_param(name, adding, spans=spans)
    if division.each_round:
        division = replace(division, how="none", first=None)
    return OtherSum(total=total, division=division)


def said_of(change: Change) -> str:
    """Fields and what they are, as a target declares them: `divide = 'pre', sync = 'every'`."""
    return ", ".join(f"{name} = {value!r}" for name, value in change.items())


def _joined(changes: Sequence[Change]) -> dict[str, Any]:
    return {name: value for change in changes for name, value in change.items()}
