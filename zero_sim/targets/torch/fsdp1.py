"""torch's FullyShardedDataParallel (FSDP1) under a plain optimizer of torch.

[Note: what FSDP1 computes]
All params of the module lie in one flat param, each behind padding to 16 bytes, cut evenly over the
ranks. Each rank divides its gradient by a power of two near the root of the number of ranks, a
reduce-scatter sums, and the sum is divided by the rest. With `NO_SHARD`, which one rank gets in any
case, an all-reduce takes the place of the reduce-scatter, and clipping is torch's own.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from zero_sim.scenario.kinds import WHOLE_PARAM_OPTIMIZERS
from zero_sim.scenario.spec import Scenario
from zero_sim.targets.declared import OPTIMIZER_SETTINGS, Capabilities, Numerics
from zero_sim.targets.protocol import OwnedPart, Place, StepResult
from zero_sim.targets.torch.ddp import flat_state, plain_optimizer
from zero_sim.targets.torch.optim import OPTIMIZERS, LearningRates

if TYPE_CHECKING:
    from torch.distributed.fsdp import FullyShardedDataParallel

_STRATEGIES = {0: "NO_SHARD", 2: "SHARD_GRAD_OP", 3: "FULL_SHARD"}


class FSDP1Engine:
    """One rank of FullyShardedDataParallel, around every child with params and what is left.

    Args:
        module: The model; its params become parts of flat ones.
        scenario: The case; `optimizer` and `system.stage` are read.
        group: The data-parallel group.
    """

    def __init__(self, module: nn.Module, *, scenario: Scenario, group: ProcessGroup) -> None:
        from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

        self._fsdp_type = FullyShardedDataParallel
        chosen: dict[str, Any] = {
            "process_group": group,
            "sharding_strategy": ShardingStrategy[_STRATEGIES[scenario.system.stage]],
            "use_orig_params": True,
            "device_id": next((p.device for p in module.parameters()), torch.device("cpu")),
        }
        self._shapes = {name: p.shape for name, p in module.named_parameters() if p.requires_grad}
        with warnings.catch_warnings():
            # That NO_SHARD is to become DDP, and is what one rank gets.
            warnings.simplefilter("ignore")
            for name, child in module.named_children():
                # What is no more than a container has no forward to gather before.
                is_called = not isinstance(child, nn.ModuleList | nn.ModuleDict)
                if is_called and any(param.requires_grad for param in child.parameters()):
                    setattr(module, name, FullyShardedDataParallel(child, **chosen))
            self._fsdp: FullyShardedDataParallel = FullyShardedDataParallel(module, **chosen)
        self.module: nn.Module = self._fsdp
        self._params = {name: param for name, param in self._named() if name in self._shapes}
        self._optimizer = plain_optimizer(scenario.optimizer, self._params)
        self._rates = LearningRates(self._optimizer)
        self._unsynced = ExitStack()
        self._clip_norm = scenario.optimizer.clip_norm
        self._reduced: dict[str, Tensor] = {}

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, param in self._fsdp.named_parameters():
            yield name.replace("_fsdp_wrapped_module.", ""), param

    def zero_grad(self) -> None:
        """Forget the gradients of the step before."""
        self._optimizer.zero_grad()

    def start_micro_batch(self, *, last: bool) -> None:
        """Keep gradients whole and local, but for the last micro-batch."""
        if not last:
            self._unsynced.enter_context(self._fsdp.no_sync())

    def backward(self, loss: Tensor, *, last_micro: bool, rows: int) -> None:
        """Run backward, under which gradients are reduced."""
        with self._unsynced:
            loss.backward()

    def step(self, *, lr_factor: float) -> StepResult:
        """Clip, if that is asked for, and update the shards."""
        grads = {name: param.grad for name, param in self._params.items()}
        self._reduced = {name: grad for name, grad in grads.items() if grad is not None}
        norm = None
        if self._clip_norm is not None:
            self._reduced = {name: grad.clone() for name, grad in self._reduced.items()}
            norm = self._fsdp.clip_grad_norm_(self._clip_norm)
        self._rates.scale(lr_factor)
        self._optimizer.step()
        return StepResult(norm=norm)

    def params(self) -> Mapping[str, Tensor]:
        """Full working params, gathered."""
        with self._fsdp_type.summon_full_params(self._fsdp, writeback=False):
            return {
                name: param.detach().clone()
                for name, param in self._named()
                if name in self._shapes
            }

    def parts(self) -> Iterator[OwnedPart]:
        """What this rank's even parts of flat params have of every param."""
        held = {}
        for unit in self._fsdp_type.fsdp_modules(self._fsdp):
            flat: Any = unit._handle.flat_param if unit._handle is not None else None
            if flat is not None:
                held |= dict(zip(map(id, flat._params), flat._shard_param_infos, strict=True))
        for name, param in self._params.items():
            info = held[id(param)]
            if not info.in_shard:
                continue
            start, stop = info.intra_param_start_idx, info.intra_param_end_idx + 1
            local = param.detach().reshape(-1)
            grad = self._reduced.get(name)
            yield OwnedPart(
                place=Place(param=name, start=start, stop=stop),
                grad=torch.zeros_like(local) if grad is None else grad.detach().reshape(-1),
                master=local,
                state=flat_state(self._optimizer.state.get(param, {})),
            )


def predivide_factor(ranks: int) -> float:
    """The power of two by which FSDP1 divides before the sum, so that neither half overflows."""
    factor = 1
    while ranks % factor == 0 and ranks / factor > factor:
        factor *= 2
    return float(factor)


class TorchFSDP1:
    """FullyShardedDataParallel on fp32 params; the stage is its sharding strategy."""

    name = "torch-fsdp1"
    capabilities = Capabilities(
        stages=(0, 2, 3),
        scalar_params=False,
        # Flat params are cut anywhere, where muon and lamb look at whole params.
        optimizers=tuple(name for name in OPTIMIZERS if name not in WHOLE_PARAM_OPTIMIZERS),
        follows=(*OPTIMIZER_SETTINGS, "run.micro_batches", "optimizer.clip_norm"),
    )

    def numerics(self, scenario: Scenario) -> Numerics:
        """By which rules it computes a case."""
        ranks, is_whole = scenario.world.size, scenario.system.stage == 0
        return Numerics(
            divide="post-rounded",
            divide_by="ranks",
            predivide_by=predivide_factor(ranks),
            sync="last",
            grad_dtype="param",
            grads_told="after-division",
            norm="of-params" if is_whole or ranks == 1 else "of-own-params",
            clip="fp32-reciprocal",
        )

    def build(self, module: nn.Module, *, scenario: Scenario, group: ProcessGroup) -> FSDP1Engine:
        """Shard the module for training on this rank."""
        return FSDP1Engine(module, scenario=scenario, group=group)
