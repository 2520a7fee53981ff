"""DeepSpeed's engine under an optimizer of torch: ZeRO 0, 1, 2 and 3 on fp32 params.

[Note: what DeepSpeed computes]
With `prescale_gradients` off, stage 1 sums what each rank accumulated over its micro-batches, and
stages 2 and 3 sum after every micro-batch and accumulate the sums. Gradients are divided by the
number of ranks before the sum. Losses are not divided by the number of micro-batches, which
`backward(scale_wrt_gas=False)` asks for. `gradient_clipping` is 1.0 where a config does not name
it, so ours does.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from zero_sim.scenario.kinds import WHOLE_PARAM_OPTIMIZERS
from zero_sim.scenario.spec import Scenario
from zero_sim.targets.declared import OPTIMIZER_SETTINGS, Capabilities, Numerics
from zero_sim.targets.protocol import OwnedPart, Place, StepResult
from zero_sim.targets.rank_local import Library, RankLocal
from zero_sim.targets.torch.ddp import flat_state, plain_optimizer
from zero_sim.targets.torch.optim import OPTIMIZERS, LearningRates

RANK_LOCAL = RankLocal(
    names=(
        "deepspeed:dist",
        "deepspeed.comm.comm:cdb",
        "deepspeed.comm.mori:_init_attempted",
        "deepspeed.runtime.zero.parameter_offload:"
        "DeepSpeedZeRoOffload._register_deepspeed_module(count)",
        "deepspeed.runtime.zero.parameter_offload:FWD_MODULE_STACK",
        "deepspeed.runtime.zero.partition_parameters:Init.param_id",
        "deepspeed.runtime.zero.utils:ZERO_SUPPORTED_OPTIMIZERS",
        "deepspeed.utils.groups:_WORLD_GROUP",
    )
)
"""As `zero-sim doctor --target` finds it for 0.19.8."""


def config_of(scenario: Scenario, *, stage: int) -> dict[str, Any]:
    """The config that a case asks for."""
    zero: dict[str, Any] = {"stage": stage}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": scenario.run.micro_batches,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero,
    }


class DeepSpeedEngine:
    """One rank of DeepSpeed's engine.

    Args:
        module: The model.
        scenario: The case; `optimizer` and `system` are read.
        stage: ZeRO stage.
    """

    def __init__(self, module: nn.Module, *, scenario: Scenario, stage: int) -> None:
        deepspeed = import_deepspeed()
        self._stage, self._rank = stage, torch.distributed.get_rank()
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._sizes = {name: param.numel() for name, param in trained.items()}
        self._client = plain_optimizer(scenario.optimizer, trained)
        self._engine, self._optimizer, *_ = deepspeed.initialize(
            model=module,
            optimizer=self._client,
            config=config_of(scenario, stage=stage),
            dist_init_required=False,
        )
        self.module: nn.Module = self._engine
        self._params = trained
        self._rates = LearningRates(self._client)
        self._reduced: dict[str, Tensor] = {}

    def zero_grad(self) -> None:
        """Nothing: the engine forgets gradients when it has stepped."""

    def backward(self, loss: Tensor, *, last_micro: bool, rows: int) -> None:
        """Run backward; the engine counts micro-batches by calls of its `step`."""
        self._engine.backward(loss, scale_wrt_gas=False)
        if not last_micro:
            self._engine.step()

    def step(self, *, lr_factor: float) -> StepResult:
        """Update the params."""
        self._reduced = {name: self._grad(param).clone() for name, param in self._params.items()}
        self._rates.scale(lr_factor)
        self._engine.step()
        return StepResult()

    def _grad(self, param: nn.Parameter) -> Tensor:
        """What this rank has of a reduced gradient, before the step."""
        if self._stage == 0:
            return param.grad.reshape(-1) if param.grad is not None else torch.zeros(param.numel())
        if self._stage == 3:
            fragment = utils().safe_get_local_grad(param).reshape(-1)
            return fragment[: self._own_elems(param)]
        mapping: Any = getattr(param, "_hp_mapping", None)
        if mapping is None:
            return torch.zeros(0)
        return mapping.get_lp_grad_fragment(param._index_in_param_group).reshape(-1)  # pyrefly: ignore

    def params(self) -> Mapping[str, Tensor]:
        """Full working params; of stage 3 gathered."""
        if self._stage < 3:
            return {name: param.detach() for name, param in self._params.items()}
        with import_deepspeed().zero.GatheredParameters(list(self._params.values())):
            return {name: param.detach().clone() for name, param in self._params.items()}

    def parts(self) -> Iterator[OwnedPart]:
        """What this rank has of masters and state."""
        for name, param in self._params.items():
            grad = self._reduced.get(name)
            if self._stage == 0:
                state = flat_state(self._client.state.get(param, {}))
                place, master = Place(param=name, start=0, stop=param.numel()), param.detach()
            elif self._stage == 3:
                place, master, state = self._shard(name, param)
            elif getattr(param, "_hp_mapping", None) is not None:
                place, master, state = self._fragment(name, param._hp_mapping)  # pyrefly: ignore
            else:
                continue
            yield OwnedPart(place=place, grad=grad, master=master.reshape(-1), state=state)

    def _fragment(self, name: str, mapping: Any) -> tuple[Place, Tensor, dict[str, Tensor]]:
        """Of stages 1 and 2: what this rank's partition of a group's flat buffer has of a param."""
        part, own = mapping.lp_fragment_address, mapping.hp_fragment_address
        flat = self._optimizer.single_partition_of_fp32_groups[mapping.param_group_index]
        place = Place(param=name, start=part.start, stop=part.start + part.numel)
        return place, mapping.hp_fragment.detach(), self._state_in(flat, own.start, own.numel)

    def _shard(self, name: str, param: Any) -> tuple[Place, Tensor, dict[str, Tensor]]:
        """Of stage 3: this rank's even part of a flattened param, the last ones padded."""
        own, start = self._own_elems(param), param.ds_tensor.ds_numel * self._rank
        start = min(start, param.ds_numel)
        optimizer = self._optimizer
        group, offset, _ = optimizer.grad_position[optimizer.get_param_id(param)]
        flat = optimizer.fp32_partitioned_groups_flat[group]
        place = Place(param=name, start=start, stop=start + own)
        return place, flat.detach()[offset : offset + own], self._state_in(flat, offset, own)

    def _own_elems(self, param: Any) -> int:
        part = param.ds_tensor.ds_numel
        return max(0, min(part, param.ds_numel - part * self._rank))

    def _state_in(self, flat: Tensor, start: int, count: int) -> dict[str, Tensor]:
        return {
            key: value if not value.dim() else value[start : start + count]
            for key, value in flat_state(self._client.state.get(flat, {})).items()
        }


def import_deepspeed() -> Any:
    """The library, for the CPU and without what it would compile."""
    # It calls names of torch that newer versions of torch deprecate, in every step.
    warnings.filterwarnings("ignore", ".*torch.distributed.* is deprecated", FutureWarning)
    import deepspeed  # pyrefly: ignore

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # Its shared-memory reduction would be compiled for half a minute, and is not used here.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def utils() -> Any:
    """Functions of the library that give a rank's part of something."""
    import deepspeed.utils  # pyrefly: ignore

    return deepspeed.utils


class DeepSpeedZero:
    """One stage of DeepSpeed's ZeRO.

    Args:
        stage: 1 to 3.
    """

    library = Library(
        package="deepspeed",
        extra="deepspeed",
        environment=(("DS_ACCELERATOR", "cpu"), ("DS_BUILD_OPS", "0"), ("LOCAL_RANK", "0")),
    )
    rank_local = RANK_LOCAL

    def __init__(self, stage: int) -> None:
        self.name = f"deepspeed-zero-{stage}"
        self._stage = stage
        self.capabilities = Capabilities(
            stages=(stage,),  # pyrefly: ignore
            # It steps flat partitions, where muon and lamb look at whole params; of torch's Adagrad
            # it makes another one, from the defaults alone.
            optimizers=tuple(
                name for name in OPTIMIZERS if name not in ("adagrad", *WHOLE_PARAM_OPTIMIZERS)
            ),
            # A param group of which no param has an element cannot be built.
            empty_params=False,
            # The broadcast of what ranks begin with views params as bytes: no scalar can be.
            scalar_params=False,
            follows=(*OPTIMIZER_SETTINGS, "run.micro_batches"),
        )
        self.numerics = Numerics(
            divide="pre",
            divide_by="ranks",
            sync="last" if stage < 2 else "every",
            grad_dtype="param",
            grads_told="after-division",
        )

    def build(
        self, module: nn.Module, *, scenario: Scenario, group: ProcessGroup
    ) -> DeepSpeedEngine:
        """Wrap the module for training on this rank."""
        return DeepSpeedEngine(module, scenario=scenario, stage=self._stage)


ZERO_1, ZERO_2, ZERO_3 = (DeepSpeedZero(stage) for stage in (1, 2, 3))
DEEPSPEED = (ZERO_1, ZERO_2, ZERO_3)
