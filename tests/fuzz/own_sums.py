"""Engines that sum gradients over send and recv, in an order unknown to the judge."""

import torch
import torch.distributed as dist

from zero_sim.targets import (
    Capabilities,
    Numerics,
    WholeParamEngine,
    plain_optimizer,
)


class _Ring(WholeParamEngine):
    """Adds around a ring that begins on rank 1, then sends the sum around."""

    skipped_rank = None

    def reduce(self):
        for param in self.named.values():
            if param.requires_grad:
                grad = torch.zeros_like(param) if param.grad is None else param.grad
                param.grad = self._ring(grad.contiguous()) / self.group.size()

    def _ring(self, grad):
        rank, size = self.group.rank(), self.group.size()
        place = (rank - 1) % size
        before, after = (rank - 1) % size, (rank + 1) % size
        total = torch.empty_like(grad)
        if place == 0:
            total = grad.clone()
        else:
            dist.recv(total, group_src=before, group=self.group)
            if rank != self.skipped_rank:
                total += grad
        if place < size - 1:
            dist.send(total, group_dst=after, group=self.group)
            dist.recv(total, group_src=before, group=self.group)
        if size > 1 and place != size - 2:
            dist.send(total, group_dst=after, group=self.group)
        return total


class _Skipping(_Ring):
    skipped_rank = 0


class RingTarget:
    """ZeRO-0 with this engine."""

    name = "ring"
    capabilities = Capabilities(stages=(0,), orders=("unknown",), follows=("run.micro_batches",))
    numerics = Numerics(reported_grads="after-division")
    engine = _Ring

    def build(self, module, *, scenario, group):
        optimizer = plain_optimizer(scenario.optimizer, dict(module.named_parameters()))
        return self.engine(module, optimizer, group=group)


class SkippingTarget(RingTarget):
    """The same target with a ring that omits rank 0."""

    name = "skipping"
    engine = _Skipping


RING = RingTarget()
SKIPPING = SkippingTarget()
