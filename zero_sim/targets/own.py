"""The project's own system, the three layers of `zero_sim.zero`, as a target."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from zero_sim.scenario.spec import OptimizerSpec, Scenario
from zero_sim.targets.protocol import OwnedPart, Place
from zero_sim.zero import (
    DistributedDataParallel,
    DistributedOptimizer,
    OwnedFragment,
    ZeroConfig,
)


def build_optim_factory(spec: OptimizerSpec) -> Callable[[ParamsT], Optimizer]:
    """What makes the scenario's optimizer from the masters that a rank owns."""

    def factory(params: ParamsT) -> Optimizer:
        if spec.name == "sgd":
            return torch.optim.SGD(
                params,
                lr=spec.lr,
                momentum=spec.momentum,
                weight_decay=spec.weight_decay,
                foreach=spec.foreach,
            )
        cls = torch.optim.AdamW if spec.name == "adamw" else torch.optim.Adam
        return cls(
            params,
            lr=spec.lr,
            betas=spec.betas,
            eps=spec.eps,
            weight_decay=spec.weight_decay,
            foreach=spec.foreach,
        )

    return factory


class ZeroSimEngine:
    """One rank of the project's own system."""

    def __init__(self, module: nn.Module, *, scenario: Scenario, group: ProcessGroup) -> None:
        system = scenario.system
        config = ZeroConfig(
            stage=system.stage,
            divide=system.divide,
            grad_dtype=system.grad_dtype,
            bucket_elems=system.bucket_elems,
            align_elems=system.align_elems,
        )
        self.module = module
        self._ddp = DistributedDataParallel(module, config=config, group=group)
        self._optimizer = DistributedOptimizer(
            self._ddp, optim_factory=build_optim_factory(scenario.optimizer)
        )
        self._stage = system.stage
        self._places: dict[str, Place] = {}

    def zero_grad(self) -> None:
        """Forget the gradients of the step before."""
        self._optimizer.zero_grad()

    def backward(self, loss: Tensor, *, last_micro: bool) -> None:
        """Run backward; hooks move the gradients into the buffers."""
        loss.backward()
        if last_micro:
            self._ddp.finish_grad_sync()

    def step(self) -> None:
        """Update the params on every rank."""
        self._optimizer.step()

    def params(self) -> Mapping[str, Tensor]:
        """Full working params on this rank."""
        return {name: param.detach() for name, param in self._ddp.params.items()}

    def parts(self) -> Iterator[OwnedPart]:
        """What this rank owns, in buffer order."""
        for owned in self._optimizer.fragments():
            yield OwnedPart(self._place_of(owned), owned.grad, owned.master, owned.state)

    def _place_of(self, owned: OwnedFragment) -> Place:
        place = self._places.get(owned.param)
        if place is None:
            bucket = self._ddp.buffers[owned.buffer].plan.buckets[owned.bucket]
            shard = bucket.shard_span(owned.shard)
            place = self._places[owned.param] = Place(
                param=owned.param,
                start=owned.in_param.start,
                stop=owned.in_param.stop,
                flat_start=owned.in_buffer.start,
                bucket=owned.bucket,
                shard=owned.shard,
                shard_start=shard.start,
                shard_stop=shard.stop,
                reduced_by="reduce_scatter" if self._stage == 1 else "all_reduce",
                call_elems=bucket.span.numel,
                call_offset=owned.in_buffer.start - bucket.span.start,
            )
        return place

    def stray_gradients(self, *, padding_only: bool) -> str:
        """Where gradient buffers, or only their padding, are not zero."""
        for index, buffer in enumerate(self._ddp.buffers):
            if not padding_only:
                if buffer.grad_data.any():
                    first = int(buffer.grad_data.nonzero()[0])
                    return f"element {first} of gradient buffer {index}"
                continue
            for bucket in buffer.plan.buckets:
                padding = buffer.grad_data[bucket.padding.start : bucket.padding.stop]
                if padding.numel() and padding.any():
                    first = bucket.padding.start + int(padding.nonzero()[0])
                    return f"element {first} of gradient buffer {index}, in bucket {bucket.index}"
        return ""


class ZeroSimTarget:
    """The project's own system, stages 0 and 1."""

    name = "zero_sim"

    def build(self, module: nn.Module, *, scenario: Scenario, group: ProcessGroup) -> ZeroSimEngine:
        """Wrap the module for training on this rank."""
        return ZeroSimEngine(module, scenario=scenario, group=group)
