"""torch's ZeroRedundancyOptimizer under DistributedDataParallel: whole params dealt to ranks."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from zero_sim.scenario.spec import Scenario
from zero_sim.targets.declared import Capabilities
from zero_sim.targets.protocol import OwnedPart
from zero_sim.targets.torch.ddp import DDP_FOLLOWS, DDPEngine, TorchDDP
from zero_sim.targets.torch.optim import OPTIMIZERS, class_of, param_groups, settings_of


class ZeroRedundancyEngine(DDPEngine):
    """One rank of DDP and torch's ZeroRedundancyOptimizer, which deals whole params to ranks."""

    def _build_optimizer(self, group: ProcessGroup) -> Optimizer:
        # Import where it is needed: it takes a tenth of a second.
        from torch.distributed.optim import ZeroRedundancyOptimizer

        self._sharded = ZeroRedundancyOptimizer(
            param_groups(self._spec, self._params),
            class_of(self._spec),
            process_group=group,
            **settings_of(self._spec),
        )
        return self._sharded

    def parts(self) -> Iterator[OwnedPart]:
        """The params that this rank updates, whole."""
        local = self._sharded.optim
        mine = {id(param) for group in local.param_groups for param in group["params"]}
        names = [name for name, param in self._params.items() if id(param) in mine]
        yield from self._parts_of(names, state=local.state)


class TorchZeroRedundancy:
    """DDP and ZeroRedundancyOptimizer on fp32 params: stage 1, whole params a rank."""

    name = "torch-zero-redundancy"
    capabilities = Capabilities(stages=(1,), optimizers=OPTIMIZERS, follows=DDP_FOLLOWS)
    numerics = TorchDDP.numerics

    def build(
        self, module: nn.Module, *, scenario: Scenario, group: ProcessGroup
    ) -> ZeroRedundancyEngine:
        """Wrap the module for training on this rank."""
        return ZeroRedundancyEngine(module, scenario=scenario, group=group)
