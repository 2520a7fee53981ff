"""One rank of fairscale's OSS under torch's DDP, or under its own ShardedDDP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from zero_sim.scenario.spec import CheckpointForm, Scenario
from zero_sim.targets.fairscale.saved import load_consolidated, save_consolidated
from zero_sim.targets.protocol import OwnedPart
from zero_sim.targets.torch.ddp import DDPEngine
from zero_sim.targets.torch.optim import LearningRates, class_of, param_groups, settings_of


def sharded_optimizer(engine: Any, group: ProcessGroup) -> Any:
    """An OSS over what an engine trains."""
    from fairscale.optim.oss import OSS  # pyrefly: ignore

    spec = engine._spec
    groups = param_groups(spec, engine._params)
    return OSS(groups, optim=class_of(spec), group=group, **settings_of(spec))


class OSSEngine(DDPEngine):
    """One rank of DDP and OSS."""

    def _build_optimizer(self, group: ProcessGroup) -> Optimizer:
        self._sharded = sharded_optimizer(self, group)
        return self._sharded

    def _clip(self) -> Tensor | None:
        """Clip by norm as OSS does; the norm before, where one was taken."""
        if self._spec.clip_norm is None:
            return None
        return self._sharded.clip_grad_norm(self._spec.clip_norm)

    def parts(self) -> Iterator[OwnedPart]:
        """The params that this rank updates, whole."""
        local = self._sharded.optim
        mine = {id(param) for group in local.param_groups for param in group["params"]}
        names = [name for name, param in self._params.items() if id(param) in mine]
        yield from self._parts_of(names, state=local.state)

    def save(self, path: Path, *, form: CheckpointForm) -> None:
        """Save a checkpoint, as a whole."""
        save_consolidated(path, params=self._params, optimizer=self._sharded)

    def load(self, path: Path, *, weights_only: bool = False) -> None:
        """Go on from a checkpoint, of any number of ranks."""
        load_consolidated(
            path, params=self._params, optimizer=self._sharded, weights_only=weights_only
        )


class ShardedDDPEngine(OSSEngine):
    """One rank of ShardedDDP and OSS.

    Args:
        module: The model.
        scenario: The case; `optimizer` is read.
        group: The data-parallel group.
        buffer_elems: `reduce_buffer_size`; None for the library's.
        by_optimizer: Whether gradients are forgotten by `optimizer.zero_grad()`.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        scenario: Scenario,
        group: ProcessGroup,
        buffer_elems: int | None,
        by_optimizer: bool,
    ) -> None:
        from fairscale.nn.data_parallel import ShardedDataParallel  # pyrefly: ignore

        self._spec, self._by_optimizer = scenario.optimizer, by_optimizer
        self._params = {
            name: param for name, param in module.named_parameters() if param.requires_grad
        }
        self._optimizer = self._build_optimizer(group)
        chosen = {} if buffer_elems is None else {"reduce_buffer_size": buffer_elems}
        self._ddp = ShardedDataParallel(module, self._sharded, process_group=group, **chosen)
        self.module = self._ddp
        self._rates = LearningRates(self._optimizer)
        self._unsynced = ExitStack()
        self._reduced: dict[str, Tensor] = {}

    def zero_grad(self) -> None:
        """Forget the gradients of the step before."""
        # Which sets them to zero, as views of buffers that are reduced; torch's way is None.
        if self._by_optimizer:
            self._optimizer.zero_grad()
        else:
            self._ddp.zero_grad()
