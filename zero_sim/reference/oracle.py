"""The reference: what one device computes for a whole data-parallel run, rank by rank.

It knows no buckets, shards, buffers or collectives. Where an order of addition depends on a layout
(`ring`), the caller names it element by element.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zero_sim.errors import ModelError, UsageError
from zero_sim.reference.adding import RingSpan, add_ranks
from zero_sim.reference.placement import Addresses, place_params
from zero_sim.reference.replay import NonFinite, RankReplay, Replayer, isolated
from zero_sim.reference.stepping import Stepper, divide_local, master_gradient
from zero_sim.scenario.spec import Scenario
from zero_sim.workloads import Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceStep:
    """All that one step produced; valid until the next step, since tensors may be live state."""

    step: int
    """Optimizer step, from 0."""
    losses: Mapping[tuple[int, int], Tensor]  # each 0D
    """Loss by (rank, micro-batch)."""
    grads: Mapping[str, Tensor]  # each ND, grad dtype
    """Sum over ranks, by param, before the division that `post` asks for."""
    masters: Mapping[str, Tensor]  # each ND, fp32
    params: Mapping[str, Tensor]  # each ND, working dtype
    """The working params: the masters, cast."""
    state: Mapping[str, Mapping[str, Tensor]]
    """torch's optimizer state by param and key, `step` included."""
    nonzero_fraction: float
    """Share of the elements of `grads` that are not zero; 0 where there are none."""
    data_digests: Mapping[int, bytes]
    """By rank: hash of the bytes of its batches."""
    nonfinite: NonFinite | None
    """First NaN or infinity among the local gradients; None if there is none."""


class Reference:
    """Runs a scenario on one device; the oracle that every system is compared with."""

    def __init__(self, scenario: Scenario, *, workload: Workload) -> None:
        """Build the module and one fp32 master per trained param.

        Args:
            scenario: The case. Layout settings and `optimizer.foreach` have no meaning here.
            workload: Its workload. Forward must not change the module: one module plays all ranks.

        Raises:
            ModelError: The module has no param to train.
        """
        self._scenario = scenario
        self._workload = workload
        first = self._build_replayer()
        if not first.params:
            raise ModelError(
                "Expected a model with at least one param that requires a gradient, but got none "
                f"from model.name={scenario.model.name!r}. Try giving `model.shapes` a shape."
            )
        self._stepper = Stepper(scenario.optimizer, params=first.params)
        self._replayers = [first]
        self._replayer_of_rank = [first] * scenario.world.size
        self._next_step = 0

    def place(self, addresses: Sequence[Addresses]) -> None:
        """Lay every param where each rank has it, modulo 64 bytes; before the first step.

        Args:
            addresses: For every rank, the address of each param; see [Note: addresses].
        """
        placed: dict[tuple[tuple[str, int], ...], Replayer] = {}
        for rank, wanted in enumerate(addresses):
            key = tuple(sorted(wanted.items()))
            if key not in placed:
                replayer = self._build_replayer() if placed else self._replayers[0]
                place_params(replayer.params, wanted)
                placed[key] = replayer
            self._replayer_of_rank[rank] = placed[key]
        self._replayers = list(placed.values())

    def _build_replayer(self) -> Replayer:
        module = self._workload.build()
        params = {name: param for name, param in module.named_parameters() if param.requires_grad}
        return Replayer(
            scenario=self._scenario, workload=self._workload, module=module, params=params
        )

    def step(self, orders: Mapping[str, Sequence[RingSpan]] | None = None) -> ReferenceStep:
        """Run the next optimizer step of all ranks.

        Args:
            orders: For `world.order = "ring"`: by param, spans that tile its flattened elements,
                each with its ring chunk. Not read otherwise.

        Raises:
            UsageError: The order is `ring` and the spans of a param are missing or do not tile it.
        """
        step, world_size = self._next_step, self._scenario.world.size
        with isolated():
            replays = [self._replay(step=step, rank=rank) for rank in range(world_size)]
            grads = self._reduce(replays, orders=orders or {})
            nonzero_fraction, finite = _survey(grads)
            # Before the optimizer moves the weights: the search replays this step.
            nonfinite = None if finite else self._find_nonfinite(step)
            self._update(grads)
        self._next_step += 1
        return ReferenceStep(
            step=step,
            losses={
                (rank, micro): loss
                for rank, replay in enumerate(replays)
                for micro, loss in enumerate(replay.losses)
            },
            grads=grads,
            masters=self._stepper.masters,
            params={name: param.detach() for name, param in self._replayers[0].params.items()},
            state=self._stepper.state(),
            nonzero_fraction=nonzero_fraction,
            data_digests={rank: replay.data_digest for rank, replay in enumerate(replays)},
            nonfinite=nonfinite,
        )

    def _replay(self, *, step: int, rank: int) -> RankReplay:
        in_fp32 = self._scenario.system.grad_dtype == "fp32"
        return self._replayer_of_rank[rank].replay_rank(
            step=step, rank=rank, grad_dtype=torch.float32 if in_fp32 else None
        )

    def _find_nonfinite(self, step: int) -> NonFinite | None:
        """Name the first rank's gradient that is not finite."""
        for rank, replayer in enumerate(self._replayer_of_rank):
            found = replayer.find_nonfinite(step=step, rank=rank)
            if found is not None:
                return found
        return None

    def _reduce(
        self, replays: Sequence[RankReplay], *, orders: Mapping[str, Sequence[RingSpan]]
    ) -> dict[str, Tensor]:
        """Add the ranks' gradients, divided first where the scenario says `pre`."""
        divide, order = self._scenario.system.divide, self._scenario.world.order
        reduced: dict[str, Tensor] = {}
        for name in self._stepper.masters:
            local = [
                divide_local(replay.grads[name], divide=divide, world_size=len(replays))
                for replay in replays
            ]
            try:
                reduced[name] = add_ranks(local, order=order, spans=orders.get(name))
            except UsageError as error:
                raise UsageError(f"param {name!r}: {error}") from error
        return reduced

    def _update(self, grads: Mapping[str, Tensor]) -> None:
        """Step the masters and cast them back into the working params."""
        divide, world_size = self._scenario.system.divide, self._scenario.world.size
        self._stepper.step(
            {
                name: master_gradient(grad, divide=divide, world_size=world_size)
                for name, grad in grads.items()
            }
        )
        with torch.no_grad():
            for replayer in self._replayers:
                for name, param in replayer.params.items():
                    param.copy_(self._stepper.masters[name])


def _survey(grads: Mapping[str, Tensor]) -> tuple[float, bool]:
    """Return the share of nonzero elements and whether all elements are finite.

    A sum is finite only if all its terms are, so this one look clears all local gradients.
    """
    flat = torch.cat([grad.reshape(-1) for grad in grads.values()])
    fraction = int(flat.count_nonzero()) / max(1, flat.numel())
    return fraction, bool(flat.isfinite().all())
