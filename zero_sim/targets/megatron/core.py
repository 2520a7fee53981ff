"""Megatron-Core's DistributedDataParallel with its plain or distributed optimizer.

Gradients accumulate in flat buffers in backward order. With the distributed optimizer, each param
is padded to 64 elements.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from zero_sim.scenario.spec import OptimizerSpec, Scenario
from zero_sim.targets.declared import Capabilities
from zero_sim.targets.numerics import Numerics
from zero_sim.targets.protocol import OwnedPart, Place, StepResult
from zero_sim.targets.rank_local import Library, RankLocal
from zero_sim.targets.torch.optim import flat_state


class MegatronEngine:
    """Megatron-Core's DDP and optimizer on a rank."""

    def __init__(self, module: nn.Module, *, scenario: Scenario) -> None:
        warnings.filterwarnings("ignore", module=r"(torch|megatron)\..*")
        from megatron.core import parallel_state  # pyrefly: ignore
        from megatron.core.distributed import (  # pyrefly: ignore
            DistributedDataParallel,
            DistributedDataParallelConfig,
        )
        from megatron.core.optimizer import (  # pyrefly: ignore
            OptimizerConfig,
            get_megatron_optimizer,
        )
        from megatron.core.transformer import TransformerConfig  # pyrefly: ignore

        logging.getLogger("megatron").setLevel(logging.ERROR)
        parallel_state.initialize_model_parallel()
        system, self._sharded = scenario.system, scenario.system.stage == 1
        self._lr = scenario.optimizer.lr
        self._params = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._ddp = DistributedDataParallel(
            # Required, although it does not describe the module.
            TransformerConfig(num_layers=1, hidden_size=1, num_attention_heads=1),
            DistributedDataParallelConfig(
                use_distributed_optimizer=self._sharded,
                overlap_grad_reduce=bool(system.overlap_grads),
                bucket_size=system.bucket_elems,
            ),
            module,
        )
        self.module: nn.Module = self._ddp
        config = OptimizerConfig(
            use_distributed_optimizer=self._sharded, **_settings(scenario.optimizer)
        )
        self._optimizer = get_megatron_optimizer(config, [self._ddp])
        (self._inner,) = self._optimizer.chained_optimizers
        self._unsynced = ExitStack()

    def zero_grad(self) -> None:
        """Reset the gradients."""
        self._ddp.zero_grad_buffer()
        self._optimizer.zero_grad()

    def start_micro_batch(self, *, last: bool) -> None:
        """Keep gradients local, except in the last micro-batch."""
        if not last:
            self._unsynced.enter_context(self._ddp.no_sync())

    def backward(self, loss: Tensor, *, last_micro: bool, rows: int) -> None:
        """Run backward; after the last micro-batch, finish the reductions."""
        with self._unsynced:
            loss.backward()
        # Waits for reductions in flight with `overlap_grad_reduce`, else starts them.
        if last_micro:
            self._ddp.finish_grad_sync()

    def step(self, *, lr_factor: float) -> StepResult:
        """Update the params."""
        for group in self._optimizer.param_groups:
            group["lr"] = self._lr * lr_factor
        self._optimizer.step()
        return StepResult()

    def params(self) -> Mapping[str, Tensor]:
        """Return whole working params."""
        return {name: param.detach() for name, param in self._params.items()}

    def parts(self) -> Iterator[OwnedPart]:
        """Yield the parts that this rank steps: all params, or its shard of each bucket."""
        steps = dict(self._stepped())
        for name, param in self._params.items():
            if id(param) not in steps:
                continue
            start, stop, master = steps[id(param)]
            # `main_grad` is a view of the gradient buffer in the param's shape.
            yield OwnedPart(
                place=Place(param=name, start=start, stop=stop),
                grad=param.main_grad.detach().reshape(-1)[start:stop],  # pyrefly: ignore
                master=master.detach().reshape(-1),
                state=flat_state(self._inner.optimizer.state.get(master, {})),
            )

    def _stepped(self) -> Iterator[tuple[int, tuple[int, int, Tensor]]]:
        """Yield each param's id, the range that this rank steps, and the master."""
        if not self._sharded:
            yield from ((id(param), (0, param.numel(), param)) for param in self._params.values())
            return
        groups = zip(self._inner.model_fp32_groups, self._inner.shard_fp32_groups, strict=True)
        for params, shards in groups:
            for param, shard in zip(params, shards, strict=True):
                # No public method returns the range.
                own = self._inner._get_model_param_range_map(param)["param"]
                yield id(param), (own.start, own.end, shard)


def _settings(spec: OptimizerSpec) -> dict[str, Any]:
    return {
        "optimizer": "adam",
        "lr": spec.lr,
        "weight_decay": spec.weight_decay,
        "adam_beta1": spec.betas[0],
        "adam_beta2": spec.betas[1],
        "adam_eps": spec.eps,
        "clip_grad": 0.0,
    }


class MegatronCore:
    """Megatron-Core's DDP on fp32 params, with DistributedOptimizer at stage 1."""

    name = "megatron-core"
    library = Library(package="megatron.core", extra="megatron", judged="megatron-core==0.16.1")
    # All of the module's globals, because 35 of them differ by rank, as `zero-sim doctor --target`
    # shows. The library calls `torch.cuda` on every machine.
    rank_local = RankLocal(names=("megatron.core.parallel_state:*",), cuda_is_cpu=True)
    capabilities = Capabilities(
        stages=(0, 1),
        optimizers=("adamw",),
        follows=(
            "optimizer.betas",
            "optimizer.eps",
            "optimizer.weight_decay",
            "optimizer.warmup_steps",
            "run.micro_batches",
            "model.tied",
            "system.bucket_elems",
            "system.overlap_grads",
        ),
    )
    numerics = Numerics(
        # The accumulated gradient is multiplied by 1 / ranks and then summed, at stage 0 by an
        # all-reduce, at stage 1 by a reduce-scatter of each bucket.
        divide="premul-fp32",
        divide_by="ranks",
        sync="last",
        grad_dtype="param",
        reported_grads="before-division",
    )

    def build(
        self, module: nn.Module, *, scenario: Scenario, group: ProcessGroup
    ) -> MegatronEngine:
        """Wrap the module for training on this rank."""
        return MegatronEngine(module, scenario=scenario)


TARGETS = (MegatronCore(),)
