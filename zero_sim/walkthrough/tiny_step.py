"""ZeRO-1 with the 260-parameter transformer on 2 ranks: a step, recorded while it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero_sim.scenario.spec import DataSpec, DtypeName, ModelSpec, OptimizerSpec, Scenario
from zero_sim.sim import CollectiveRecord, World
from zero_sim.sim.call import Call
from zero_sim.targets.own import ZeroSimTarget
from zero_sim.targets.protocol import OwnedPart
from zero_sim.workloads import build_workload
from zero_sim.workloads.protocol import Batch, Workload
from zero_sim.workloads.transformer import W_Q_GRADS, Transformer260

RANKS = 2

LossOf = Callable[[Workload, nn.Module, Batch, int], Tensor]
"""Computes a rank's loss from the workload, the module, the rank's batch and the rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStep:
    """A rank's values in the step."""

    batch: Batch
    activations: Mapping[str, Tensor]
    """Activations by `Transformer260`'s names, without the batch dimension."""
    loss: Tensor  # 0D
    grads: Tensor  # 1D (260,)
    """This rank's own gradients, the reduce-scatter's input."""
    before: Tensor  # 1D (260,)
    """Working params before the step, in flat order, like the next two fields."""
    half: Tensor  # 1D (260,)
    """Working params when the all-gather is called: the owned half is new, the other half old."""
    after: Tensor  # 1D (260,)
    """Working params after the step."""
    parts: Mapping[str, OwnedPart]
    """The rank's masters, reduced gradients and moments, by param."""
    calls: Sequence[CollectiveRecord]


def scenario_of(dtype: DtypeName) -> Scenario:
    """Return the walkthrough's case: stage 1 with one sequence per rank."""
    return Scenario(
        schema=1,
        name="walkthrough",
        model=ModelSpec(name="transformer-260", dtype=dtype),
        optimizer=OptimizerSpec(name="adam", lr=1e-3),
        data=DataSpec(rows=1),
    )


def loss_of_batch(workload: Workload, module: nn.Module, batch: Batch, rank: int) -> Tensor:
    """Return the mean cross-entropy over the rank's tokens."""
    return workload.loss(module, batch)


def loss_of_given_grads(workload: Workload, module: nn.Module, batch: Batch, rank: int) -> Tensor:
    """Run forward, and return a loss whose gradient is as given for `W_q`, and zero for others."""
    # Forward only records activations; the loss does not depend on it.
    module(batch.inputs)
    # The derivative of sum(param * grads) by param is grads.
    param = module.get_parameter("W_q")  # [4, 4]
    return (param * torch.tensor(W_Q_GRADS[rank]).to(param.dtype)).sum()


def run_step(scenario: Scenario, *, loss_of: LossOf = loss_of_batch) -> Sequence[RankStep]:
    """Run the step on both simulated ranks.

    Args:
        scenario: A case from `scenario_of`.
        loss_of: Computes the loss.
    """
    workload = build_workload(scenario)
    calls: list[list[CollectiveRecord]] = [[] for _ in range(RANKS)]
    modules: dict[int, nn.Module] = {}
    grads: dict[int, Tensor] = {}
    halves: dict[int, Tensor] = {}

    def called(record: CollectiveRecord, call: Call) -> None:
        calls[record.rank].append(record)
        # Copies, because later calls change the buffers.
        if record.kind == "reduce_scatter":
            grads[record.rank] = call.inputs[0].detach().clone()
        if record.kind == "all_gather":
            halves[record.rank] = _flat(modules[record.rank])

    with World(RANKS) as world:

        def program(rank: int) -> RankStep:
            group = dist.group.WORLD
            assert isinstance(group, dist.ProcessGroup)
            # Keep it for `called`, which gets no module.
            module = modules[rank] = workload.build()
            activations = _record_activations(module)
            engine = ZeroSimTarget().build(module, scenario=scenario, group=group)
            engine.zero_grad()
            before = _flat(module)
            # Only now, so that calls during construction are not recorded.
            world.log.watch = called
            batch = workload.batch(step=0, rank=rank, micro=0)
            loss = loss_of(workload, engine.module, batch, rank)
            engine.backward(loss, last_micro=True, rows=1)
            engine.step(lr_factor=1.0)
            return RankStep(
                batch=batch,
                activations=activations,
                loss=loss.detach(),
                grads=grads[rank],
                before=before,
                half=halves[rank],
                after=_flat(module),
                parts={part.place.param: _kept(part) for part in engine.parts()},
                calls=calls[rank],
            )

        runs = world.run(program)
        world.log.watch = None
    return runs


def owned(runs: Sequence[RankStep], value_of: Callable[[OwnedPart], Tensor | None]) -> Tensor:
    """Concatenate all owners' parts to a flat tensor, shape (260,).

    Args:
        runs: All ranks.
        value_of: Selects a tensor from a part, such as its master.
    """
    # Ranks and their parts are in flat buffer order.
    found = [value_of(part) for run in runs for part in run.parts.values()]
    return torch.cat([values for values in found if values is not None])


def _record_activations(module: nn.Module) -> dict[str, Tensor]:
    activations: dict[str, Tensor] = {}

    def note(name: str, activation: Tensor) -> Tensor:
        # [1, tokens, ...] to [tokens, ...], because a rank has one sequence.
        activations[name] = activation.detach().clone().squeeze(0)
        return activation

    assert isinstance(module, Transformer260)
    module.note = note
    return activations


def _flat(module: nn.Module) -> Tensor:
    """Return a copy of the working params in flat order."""
    return torch.cat([param.detach().flatten() for param in module.parameters()])


def _kept(part: OwnedPart) -> OwnedPart:
    """Return a copy of a part, because its memory ends with the world."""
    return OwnedPart(
        place=part.place,
        grad=None if part.grad is None else part.grad.clone(),
        master=part.master.clone(),
        state={name: value.clone() for name, value in part.state.items()},
    )
