"""The reference where the order of addition is not known.

It replays every rank from working params that the system shows it, one step after the other, and
says between which numbers the reduced gradients must lie. What the optimizer makes of a gradient
that lies there is computed part by part; see `reference.following`.
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
    """What one step must be, as far as no order of addition decides it."""

    unmoved: ClassVar[Sequence[str]] = ()

    step: int
    """Optimizer step, from 0."""
    losses: Mapping[tuple[int, int], Tensor]  # each 0D
    """As in `ReferenceStep`."""
    grads: Mapping[str, Tensor]  # each ND, grad dtype
    """One possible sum over ranks, by param, before the division that `post` asks for and still
    scaled; zeros for a param that is frozen in this step."""
    bounds: Mapping[str, Interval]
    """By param, of `grads`."""
    active: frozenset[str]
    """Names of the params that are trained in this step."""
    params_before: Mapping[str, Tensor]  # each ND, working dtype
    """The working params that the step began with; live."""
    norm_min: Tensor  # 0D, fp32
    norm: Tensor  # 0D, fp32
    """The largest norm that the whole master gradient can have, before clipping."""
    zeros_min: int
    zeros: int
    """The most elements of the master gradient that can be zero, before clipping."""
    overflow: Overflow
    """Whether a reduced gradient is infinite or NaN: in every order, in none, or in some."""
    skipped: bool
    """Whether nothing is updated, because no order gives finite gradients."""
    nonzero_fraction: float
    """Share of the elements of `grads` that are zero in no order; 0 where there are none."""
    data_digests: Mapping[int, bytes]
    """By rank: hash of the bytes of its batches."""
    nonfinite: NonFinite | None
    """First NaN or infinity among the local gradients; None if there is none."""
    update: Update

    @property
    def order_free(self) -> Mapping[str, Tensor]:  # each ND, bool
        """By param: True for elements of `grads` with the same bits in every order of addition."""
        return {name: bound.certified for name, bound in self.bounds.items()}

    @property
    def divisor(self) -> float:
        """Divisor for `grads`: 1 but for `post`."""
        return self.update.divisor

    @property
    def loss_scale(self) -> float | None:
        """Factor of the losses in this step; None without loss scaling."""
        return self.update.scale


class BoundedReference:
    """Runs a scenario step by step beside a system whose order of addition it is not told.

    To be used by `replay_step`, then `adopt`, in turns.

    Args:
        scenario: The case, without experts, params in fp8 or a reload.
        workload: Its workload. Forward must not change the module: one module plays all ranks.
        rules: Of these `scale_loss`, `scale_second`, `nonfinite`, and how a gradient is clipped by
            its norm; not a form that takes the root.

    Raises:
        ModelError: The module has no param to train, or not one that is to be frozen.
    """

    def __init__(
        self, scenario: Scenario, *, workload: Workload, rules: Rules | None = None
    ) -> None:
        self._scenario = scenario
        self._rules = rules or Rules()
        own = self._rules
        scaled = Rules(scale_loss=own.scale_loss, scale_second=own.scale_second)
        self._ranks = Ranks(scenario, workload=workload, rules=scaled)
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
        """For every rank, the names of the params that it holds."""
        return self._ranks.held

    def start_from(self, params: Mapping[str, Tensor]) -> None:
        """Begin with other values than the workload's; to be called before `set_addresses`.

        Args:
            params: The values by name, in any dtype; not changed.
        """
        self._starts = {
            name: params.get(name, start).to(start, copy=True)
            for name, start in self._starts.items()
        }

    def set_addresses(self, addresses: Sequence[Addresses]) -> None:
        """Lay every param in memory as each rank has it; to be called before the first step.

        Args:
            addresses: For every rank, the address of each param; see [Note: addresses].
        """
        self._ranks.set_addresses(addresses)
        self.adopt(self._starts)

    def replay_step(self) -> BoundedStep:
        """Replay all ranks from the current params and bound what they reduce to."""
        scenario, step = self._scenario, self._next_step
        scale = None if self._loss_scale is None else self._loss_scale.scale
        adding = Adding(order="linear", block_count=scenario.system.redundancy)
        with isolated():
            local = self._ranks.replay(step, scale=scale)
            grads = local.reduce(adding, orders={})
            bounds = self._bound(local, grads=grads)
            overflow = _overflow([bounds[name] for name in local.active])
            nonfinite = None
            if overflow != "never":
                nonfinite = self._ranks.find_nonfinite(step, scale=scale)
        norms, zeros = _measure_bounds(
            bounds, active=local.active, division=local.division, scale=scale
        )
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
        """Go on from working params that the system shows.

        Args:
            params: By name, of the shapes and dtypes that the reference has.
        """
        self._ranks.write(params, scales={})

    def follow(self, name: str, *, start: int, stop: int) -> Follower:
        """Return a follower of a part of a param, at the initial values.

        Args:
            name: The param.
            start: First of its flattened elements.
            stop: One past the last one.
        """
        whole = self._starts[name]
        master = whole.reshape(-1)[start:stop]
        counters: frozenset[str] = frozenset()
        if self._rules.own is not None:
            from zero_sim.reference.cuts import probe

            # A rule may treat matrices otherwise than vectors.
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
        """Why the bits of the target's rule are not known; empty if they are."""
        if self._rules.own is None:
            return ""
        # Here and above, because hardly any case needs it.
        from zero_sim.reference.cuts import why_unknown

        return why_unknown(self._scenario.optimizer, rules=self._rules, params=self._starts)

    def _bound(self, local: Contributions, *, grads: Mapping[str, Tensor]) -> dict[str, Interval]:
        """Bound every param's sum over ranks and rounds, both of which only add."""
        division, system, size = local.division, self._scenario.system, self._scenario.world.size
        # Two numbers are added in one way only; and rounds, one after the other.
        one_order = max(size // system.redundancy, system.redundancy) <= 2
        bounds: dict[str, Interval] = {}
        for name, total in grads.items():
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
    """Return the least and the largest norm, and number of zeros, of the master gradient."""
    divisors = [] if scale is None else [scale]
    if division.how == "post":
        divisors.append(division.count)
    squares_min = squares_max = 0.0
    terms = zeros_min = zeros_max = 0
    for name in active:
        bound = bounds[name]
        low, high = divide_ends(bound.low, bound.high, divisors=divisors)
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
    """Whether some sum overflows in every order; in none; or in some only."""
    if any(bool(bound.nonfinite.any()) for bound in bounds):
        return "certain"
    return "possible" if any(bool(bound.open.any()) for bound in bounds) else "never"
