"""One rank of DeepSpeed's engine, and what it tells of masters, state and gradients."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zero_sim.scenario.spec import OptimizerSpec
from zero_sim.targets.protocol import OwnedPart, Place, StepResult
from zero_sim.targets.torch.ddp import flat_state, plain_optimizer
from zero_sim.targets.torch.optim import LearningRates


class DeepSpeedEngine:
    """One rank of DeepSpeed's engine.

    Args:
        module: The model.
        spec: The optimizer.
        config: Of DeepSpeed.
    """

    def __init__(self, module: nn.Module, *, spec: OptimizerSpec, config: dict[str, Any]) -> None:
        deepspeed = import_deepspeed()
        self._stage = config["zero_optimization"]["stage"]
        self._rank = torch.distributed.get_rank()
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._client = plain_optimizer(spec, trained)
        self._engine, self._optimizer, *_ = deepspeed.initialize(
            model=module,
            optimizer=self._client,
            config=config,
            dist_init_required=False,
        )
        self.module: nn.Module = self._engine
        self._params = trained
        self._rates = LearningRates(self._client)
        self._clips = spec.clip_norm is not None
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
        norm = self._engine.get_global_grad_norm() if self._clips else None
        return StepResult(norm=None if norm is None else torch.as_tensor(norm).float())

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

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # Its shared-memory reduction would be compiled for half a minute, and is not used here.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def utils() -> Any:
    """Functions of the library that give a rank's part of something."""
    import deepspeed.utils  # pyrefly: ignore

    return deepspeed.utils
