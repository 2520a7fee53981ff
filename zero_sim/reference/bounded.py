"""The reference for an unknown summation order.

In each step it replays all ranks from the reported working params, and returns an interval for each
reduced gradient. `reference.following` then computes the update from the system's own gradient,
part by part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from zero_sim.reference.bounding import Interval, bound_sum, divide_ends, known_sum
from zero_sim.reference.division import Division
from zero_sim.reference.following import Follower, Update
from zero_sim.reference.gradient import root_of_bounds
from zero_sim.reference.placement import Addresses
from zero_sim.reference.ranks import Adding, Contributions, Ranks
from zero_sim.reference.replay import NonFinite, isolated
from zero_sim.reference.rules import Rules
from zero_sim.reference.scaling import LossScale
from zero_sim.reference.stepping import lr_factor
from zero_sim.scenario.spec import Scenario
from zero_sim.workloads import Workload

Overflow = Literal["never", "certain", "possible"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundedStep:
    """Expected results of a step, as far as they do not depend on the summation order."""

    unmoved: ClassVar[Sequence[str]] = ()

    step: int
    """Optimizer step, from 0."""
    losses: Mapping[tuple[int, int], Tensor]  # each 0D
    """Unscaled loss by (rank, micro-batch)."""
    grads: Mapping[str, Tensor]  # each ND, grad dtype
    """One possible sum over ranks by param, still scaled and before any `post` division. Zeros for
    params that are frozen in this step."""
    bounds: Mapping[str, Interval]
    """Intervals of `grads`, by param."""
    active: frozenset[str]
    """Params that are trained in this step."""
    params_before: Mapping[str, Tensor]  # each ND, working dtype
    """Working params before the step; live."""
    norm_min: Tensor  # 0D, fp32
    norm: Tensor  # 0D, fp32
    """Largest possible norm of the whole master gradient, before clipping."""
    zeros_min: int
    zeros: int
    """Most zeros that the master gradient can have before clipping."""
    overflow: Overflow
    """Summation orders that give an infinite or NaN gradient: none, all or some."""
    skipped: bool
    """True if no update happens, because no order gives finite gradients."""
    nonzero_fraction: float
    """Share of the elements in `grads` that no order makes zero; 0 without elements."""
    data_digests: Mapping[int, bytes]
    """Hash of each rank's batches."""
    nonfinite: NonFinite | None
    """First NaN or infinity in the local gradients; None if all are finite."""
    update: Update

    @property
    def order_free(self) -> Mapping[str, Tensor]:  # each ND, bool
        """True for `grads` elements with the same bits in every summation order, by param."""
        return {name: bound.certified for name, bound in self.bounds.items()}

    @property
    def divisor(self) -> float:
        """Divisor for `grads`: 1 except for `post`."""
        return self.update.divisor

    @property
    def loss_scale(self) -> float | None:
        """Loss scale of this step; None without loss scaling."""
        return self.update.scale


class BoundedReference:
    """Runs a scenario step by step alongside a system with an unknown summation order.

    Call `replay_step` and `adopt` alternately.

    Args:
        scenario: The case, without experts, params in fp8 or a reload.
        workload: The case's workload. Forward must not change the module, because one module plays
            all ranks.
        rules: Only `scale_loss`, `scale_second`, `nonfinite`, `own` and the clipping by norm are
            used. The clip form must not take the root.

    Raises:
        ModelError: The module has no trainable param, or lacks a param to freeze.
    """

    def __init__(
        self, scenario: Scenario, *, workload: Workload, rules: Rules | None = None
    ) -> None:
        self._scenario = scenario
        self._rules = rules or Rules()
        own = self._rules
        # Only loss factors, because sums and their division are bounded, not computed by a rule.
        scaled = Rules(scale_loss=own.scale_loss, scale_second=own.scale_second)
        self._ranks = Ranks(scenario, workload=workload, rules=scaled)
        # fp32 copies: the masters with which followers begin.
        self._starts = {
            name: weight.to(torch.float32, copy=True)
            for name, weight in self._ranks.weights().items()
        }
        self._elems = sum(start.numel() for start in self._starts.values())
        spec = scenario.optimizer.loss_scale
        self._loss_scale = None if spec is None else LossScale(spec)
        self._next_step = 0

    @property
    def held(self) -> Sequence[frozenset[str]]:
        """Param names of each rank."""
        return self._ranks.held

    def start_from(self, params: Mapping[str, Tensor]) -> None:
        """Start from other values than the workload's. Call before `set_addresses`."""
        self._starts = {
            name: params.get(name, start).to(start, copy=True)
            for name, start in self._starts.items()
        }

    def set_addresses(self, addresses: Sequence[Addresses]) -> None:
        """Place every param in memory as on its rank; see [Note: addresses].

        Call it before the first step.
        """
        self._ranks.set_addresses(addresses)
        self.adopt(self._starts)

    def replay_step(self) -> BoundedStep:
        """Replay all ranks from the current params, and bound their reduced gradients."""
        scenario, step = self._scenario, self._next_step
        scale = None if self._loss_scale is None else self._loss_scale.scale
        # Linear is a possible order, and two ranks have no other order.
        adding = Adding(order="linear", block_count=scenario.system.redundancy)
        with isolated():
            local = self._ranks.replay(step, scale=scale)
            grads = local.reduce(adding, orders={})
            bounds = self._bound(local, grads=grads)
            overflow = _overflow([bounds[name] for name in local.active])
            nonfinite = None
            # Find the culprit now, before `adopt` changes the params: the search replays this step.
            if overflow != "never":
                nonfinite = self._ranks.find_nonfinite(step, scale=scale)
        norms, zeros = _measure_bounds(
            bounds, active=local.active, division=local.division, scale=scale
        )
        # Without loss scaling, a step is skipped only if a rule says so.
        skips = self._loss_scale is not None or self._rules.nonfinite == "skipped"
        if self._loss_scale is not None:
            self._loss_scale.update(finite=overflow != "certain")
        self._next_step += 1
        factor = lr_factor(scenario.optimizer, step=step)
        signed = sum(int(bounds[name].signed.sum()) for name in local.active)
        return BoundedStep(
            step=step,
            losses=local.losses,
            grads=grads,
            bounds=bounds,
            active=frozenset(local.active),
            params_before=self._ranks.params(),
            norm_min=norms[0],
            norm=norms[1],
            zeros_min=zeros[0],
            zeros=zeros[1],
            overflow=overflow,
            skipped=skips and overflow == "certain",
            nonzero_fraction=signed / max(1, self._elems),
            data_digests=local.data_digests,
            nonfinite=nonfinite,
            update=Update(division=local.division, scale=scale, lr_factor=factor),
        )

    def adopt(self, params: Mapping[str, Tensor]) -> None:
        """Continue from the system's working params, in the reference's shapes and dtypes."""
        self._ranks.write(params, scales={})

    def follow(self, name: str, *, start: int, stop: int) -> Follower:
        """Return a follower for elements of a flattened param, at their initial values."""
        whole = self._starts[name]
        master = whole.reshape(-1)[start:stop]
        counters: frozenset[str] = frozenset()
        if self._rules.own is not None:
            from zero_sim.reference.cuts import probe

            # Keep the number of dimensions: a rule may treat matrices and vectors differently.
            master = master.reshape((1,) * (whole.dim() - 1) + (-1,))
            spec, starts = self._scenario.optimizer, self._starts
            counters = probe(spec, rules=self._rules, params=starts).counters
        return Follower(
            self._scenario.optimizer,
            name=name,
            master=master,
            rules=self._rules,
            on_host=self._scenario.system.offload_state,
            counters=counters,
        )

    @property
    def cut_dependence(self) -> str:
        """Reason why the target rule's bits are unknown; empty if known."""
        if self._rules.own is None:
            return ""
        # Imported here and above, because hardly any case needs it.
        from zero_sim.reference.cuts import why_unknown

        return why_unknown(self._scenario.optimizer, rules=self._rules, params=self._starts)

    def _bound(self, local: Contributions, *, grads: Mapping[str, Tensor]) -> dict[str, Interval]:
        """Bound each param's sum over ranks and rounds."""
        division, system, size = local.division, self._scenario.system, self._scenario.world.size
        # Two terms have a single order, and rounds are added in sequence.
        one_order = max(size // system.redundancy, system.redundancy) <= 2
        bounds: dict[str, Interval] = {}
        # Terms are contributions to the sum. A division after the sum comes later.
        for name, total in grads.items():
            # A term per rank and round.
            terms = [
                division.before(grads[name]) if division.is_before else grads[name]
                for replay in local.replays
                for grads in replay.rounds
                if name in grads
            ]
            bounds[name] = known_sum(total, terms) if one_order else bound_sum(terms)
        return bounds


def _measure_bounds(
    bounds: Mapping[str, Interval],
    *,
    active: Sequence[str],
    division: Division,
    scale: float | None,
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    """Return the master gradient's least and greatest norm and number of zeros."""
    # Unscale first, then divide, as in `Update.apply`.
    divisors = [] if scale is None else [scale]
    if division.how == "post":
        divisors.append(division.count)
    squares_min = squares_max = 0.0
    terms = zeros_min = zeros_max = 0
    for name in active:
        bound = bounds[name]
        low, high = divide_ends(bound.low, bound.high, divisors=divisors)
        # Greatest and least magnitude in each interval; the least is 0 if it contains 0.
        largest = torch.maximum(low.abs(), high.abs())
        has_zero = (low <= 0) & (high >= 0)
        least = torch.minimum(low.abs(), high.abs()).masked_fill_(has_zero, 0)
        squares_min += float(least.square().sum())
        squares_max += float(largest.square().sum())
        zeros_min += int((largest == 0).sum())
        zeros_max += int(has_zero.sum())
        terms += low.numel()
    norms = root_of_bounds(squares_min, squares_max, terms=terms)
    return norms, (zeros_min, zeros_max)


def _overflow(bounds: Sequence[Interval]) -> Overflow:
    """Classify overflow: in every order, in some, or in none."""
    if any(bool(bound.nonfinite.any()) for bound in bounds):
        return "certain"
    return "possible" if any(bool(bound.open.any()) for bound in bounds) else "never"
