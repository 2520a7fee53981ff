"""The reference where the order of addition is not known.

It replays every rank from working params that the system shows it, one step after the other, and
says between which numbers the reduced gradients must lie. What the optimizer makes of a gradient
that lies there is computed part by part; see `reference.following`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from zero_sim.reference.adding import add_replicas
from zero_sim.reference.bounding import Interval, bound_sum, divide_ends, known_sum
from zero_sim.reference.division import Division
from zero_sim.reference.following import Follower, Update
from zero_sim.reference.gradient import root_of_bounds
from zero_sim.reference.oracle import Reference, ReferenceStep
from zero_sim.reference.replay import RankReplay, isolated
from zero_sim.reference.stepping import lr_factor

Overflow = Literal["never", "certain", "possible"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundedStep(ReferenceStep):
    """What one step must be, as far as no order of addition decides it.

    Of what a `ReferenceStep` has, `grads` are one possible sum, `params` are those that the step
    began with, and there are no `masters` and no `state`; `norm` and `zeros` are the largest
    possible ones.
    """

    bounds: Mapping[str, Interval]
    """By param, of `grads`."""
    norm_min: Tensor  # 0D, fp32
    zeros_min: int
    active: frozenset[str]
    """Names of the params that are trained in this step."""
    overflow: Overflow
    """Whether a reduced gradient is infinite or NaN: in every order, in none, or in some."""
    update: Update


class BoundedReference(Reference):
    """Runs a scenario step by step beside a system whose order of addition it is not told.

    To be used by `replay_step`, then `adopt`, in turns; `step` is for where the order is known.
    """

    def replay_step(self) -> BoundedStep:
        """Replay all ranks from the current params and bound what they reduce to."""
        scenario, step = self._scenario, self._next_step
        scale = None if self._loss_scale is None else self._loss_scale.scale
        active = self._freeze(step)
        with isolated():
            replays = [
                self._replay(step=step, rank=rank, scale=scale)
                for rank in range(scenario.world.size)
            ]
            division = self._division(replays)
            add = partial(add_replicas, replica_count=scenario.system.redundancy, order="linear")
            grads = self._reduce(replays, active=active, division=division, orders={}, add=add)
            bounds = self._bound(replays, division=division, grads=grads)
            overflow = _overflow([bounds[name] for name in active])
            nonfinite = None
            if overflow != "never":
                nonfinite = self._find_nonfinite(step, scale=scale)
        norms, zeros = self._measure_bounds(bounds, active=active, division=division, scale=scale)
        if self._loss_scale is not None:
            self._loss_scale.update(finite=overflow != "certain")
        self._next_step += 1
        factor = lr_factor(scenario.optimizer, step=step)
        signed = sum(int(bounds[name].signed.sum()) for name in active)
        return BoundedStep(
            step=step,
            losses={
                (rank, micro): loss
                for rank, replay in enumerate(replays)
                for micro, loss in enumerate(replay.losses)
            },
            grads=grads,
            divisor=division.count if division.how == "post" else 1,
            masters={},
            params={name: param.detach() for name, param in self._replayers[0].params.items()},
            scales={},
            state={},
            order_free={name: bound.certified for name, bound in bounds.items()},
            norm=norms[1],
            norm_certified=True,
            zeros=zeros[1],
            skipped=self._loss_scale is not None and overflow == "certain",
            loss_scale=scale,
            lr_factor=factor,
            nonzero_fraction=signed / max(1, self._elems),
            data_digests={rank: replay.data_digest for rank, replay in enumerate(replays)},
            nonfinite=nonfinite,
            bounds=bounds,
            norm_min=norms[0],
            zeros_min=zeros[0],
            active=frozenset(active),
            overflow=overflow,
            update=Update(division=division, scale=scale, lr_factor=factor),
        )

    def adopt(self, params: Mapping[str, Tensor]) -> None:
        """Go on from working params that the system shows.

        Args:
            params: By name, of the shapes and dtypes that the reference has.
        """
        with torch.no_grad():
            for replayer in self._replayers:
                for name, param in replayer.params.items():
                    param.copy_(params[name])

    def follow(self, name: str, *, start: int, stop: int) -> Follower:
        """Return a follower of a part of a param, at the initial values.

        Args:
            name: The param.
            start: First of its flattened elements.
            stop: One past the last one.
        """
        master = self._stepper.masters[name].reshape(-1)[start:stop]
        return Follower(self._scenario.optimizer, name=name, master=master)

    def _bound(
        self,
        replays: Sequence[RankReplay],
        *,
        division: Division,
        grads: Mapping[str, Tensor],
    ) -> dict[str, Interval]:
        """Bound every param's sum over ranks and rounds, both of which only add."""
        system, size = self._scenario.system, self._scenario.world.size
        # Two numbers are added in one way only; and rounds, one after the other.
        one_order = max(size // system.redundancy, system.redundancy) <= 2
        bounds: dict[str, Interval] = {}
        for name, total in grads.items():
            terms = [
                division.before(grads[name]) if division.is_before else grads[name]
                for replay in replays
                for grads in replay.rounds
                if name in grads
            ]
            bounds[name] = known_sum(total, terms) if one_order else bound_sum(terms)
        return bounds

    def _measure_bounds(
        self,
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
