"""Per-param ZeRO as articles print it, with typical mistakes, and corrected.

Both stages are short, and correct in the usual tries: with sizes that the ranks divide, and with
modules in the middle of a model. Run them in this folder:

    zero-sim run stage-1-fails.toml --target printed_zero:STAGE_1
    zero-sim run stage-1-mended.toml --target printed_zero:STAGE_1_MENDED
    zero-sim run stage-3-fails.toml --target printed_zero:STAGE_3
    zero-sim run stage-3-mended.toml --target printed_zero:STAGE_3_MENDED

[Note: a slice for a padded shard]
Stage 1 pads each param to a multiple of the ranks, cuts it into even shards, and takes the same
slice of the gradient for the shard of a rank. The gradient has no padding, so on the last ranks the
slice is shorter than the shard, and torch refuses it. It fails for each param that the ranks do not
divide. To correct it, pad the gradient as well.

[Note: freed before backward needs it]
Stage 3 gathers a module's params in hooks before its forward and its backward, and frees them
after each. But a full backward hook runs once the gradients of a module's *inputs* exist. If no
input needs a gradient, as in the first module of a model, it runs before the module's own backward,
which then finds its params freed. To correct it, wait for the gradients of the params themselves,
in hooks on these, and gather in a hook on the module's output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from zero_sim.scenario.spec import Scenario
from zero_sim.targets import ADAMW_SETTINGS, Capabilities, Engine, Numerics, settings_of


@dataclass(kw_only=True, slots=True)
class _Sharded:
    """One param, padded and cut into even shards."""

    param: nn.Parameter
    group: ProcessGroup
    shape: torch.Size = field(init=False)
    shard: nn.Parameter = field(init=False)  # 1D

    def __post_init__(self) -> None:
        self.shape = self.param.shape
        self.shard = nn.Parameter(self.own(self.padded(self.param)).clone())

    @property
    def numel(self) -> int:
        return self.shape.numel()

    def padded(self, tensor: Tensor) -> Tensor:
        flat = tensor.detach().reshape(-1)
        return nn.functional.pad(flat, (0, -flat.numel() % self.group.size()))

    def own(self, flat: Tensor) -> Tensor:
        """Return this rank's slice of a flat tensor, in shards of the padded param's length."""
        length = -(-self.numel // self.group.size())
        return flat[self.group.rank() * length : (self.group.rank() + 1) * length]

    def gathered(self) -> Tensor:
        whole = self.shard.new_empty(self.shard.numel() * self.group.size())
        parts = list(whole.chunk(self.group.size())) if whole.numel() else []
        if parts:
            dist.all_gather(parts, self.shard.detach(), group=self.group)
        return whole[: self.numel].view(self.shape)


class PrintedStage1:
    """Stage 1: gradients are summed on all ranks, each steps its shards, and params are gathered.

    Args:
        module: The model.
        scenario: The case, of which `optimizer` is read.
        group: The data-parallel group.
        mended: True to pad gradients like params.
    """

    def __init__(
        self, module: nn.Module, *, scenario: Scenario, group: ProcessGroup, mended: bool
    ) -> None:
        self.module, self._group, self._mended = module, group, mended
        self._sharded = {
            name: _Sharded(param=param, group=group) for name, param in module.named_parameters()
        }
        shards = [sharded.shard for sharded in self._sharded.values()]
        self._optimizer = torch.optim.AdamW(shards, **settings_of(scenario.optimizer))

    def zero_grad(self) -> None:
        """Forget the gradients of the step before."""
        self.module.zero_grad()

    def backward(self, loss: Tensor, *, last_micro: bool, rows: int) -> None:
        """Run backward."""
        loss.backward()

    @torch.no_grad()
    def step(self, *, lr_factor: float) -> None:
        """Sum, step, gather."""
        for sharded in self._sharded.values():
            grad = sharded.param.grad
            assert grad is not None
            dist.all_reduce(grad, group=self._group)
            grad /= grad.new_full((), self._group.size())  # A tensor: CUDA inverts a number.
            # See [Note: a slice for a padded shard].
            flat = sharded.padded(grad) if self._mended else grad.reshape(-1)
            sharded.shard.grad = sharded.own(flat)
        self._optimizer.step()
        for sharded in self._sharded.values():
            sharded.param.copy_(sharded.gathered())

    def params(self) -> Mapping[str, Tensor]:
        """Return all params, which are whole on every rank."""
        return {name: sharded.param.detach() for name, sharded in self._sharded.items()}


class PrintedStage3:
    """Stage 3: params are whole only around the forward and the backward of their module.

    Args:
        module: The model.
        scenario: The case, of which `optimizer` is read.
        group: The data-parallel group.
        mended: True to free a module's params only after their own gradients exist.
    """

    def __init__(
        self, module: nn.Module, *, scenario: Scenario, group: ProcessGroup, mended: bool
    ) -> None:
        self.module, self._group = module, group
        self._sharded: dict[str, _Sharded] = {}
        for name, part in module.named_modules():
            own = [
                self._shard(f"{name}.{key}".lstrip("."), param)
                for key, param in part.named_parameters(recurse=False)
            ]
            if own:
                self._hook(part, own, mended=mended)
        shards = [sharded.shard for sharded in self._sharded.values()]
        self._optimizer = torch.optim.AdamW(shards, **settings_of(scenario.optimizer))

    def zero_grad(self) -> None:
        """Forget the gradients of the step before."""
        self._optimizer.zero_grad()

    def backward(self, loss: Tensor, *, last_micro: bool, rows: int) -> None:
        """Run backward, whose hooks gather, reduce and free."""
        loss.backward()

    def step(self, *, lr_factor: float) -> None:
        """Step the shards; the next forward gathers them."""
        self._optimizer.step()

    def params(self) -> Mapping[str, Tensor]:
        """Return all params, gathered."""
        return {name: sharded.gathered() for name, sharded in self._sharded.items()}

    def _shard(self, name: str, param: nn.Parameter) -> _Sharded:
        sharded = self._sharded[name] = _Sharded(param=param, group=self._group)
        self._free(sharded)
        return sharded

    def _hook(self, part: nn.Module, own: list[_Sharded], *, mended: bool) -> None:
        def gather(*_: object) -> None:
            for sharded in own:
                sharded.param.data = sharded.gathered()

        def free(part: nn.Module, inputs: object, output: Tensor) -> None:
            for sharded in own:
                self._free(sharded)
            if mended and output.requires_grad:
                output.register_hook(gather)

        def reduce_and_free(*_: object) -> None:
            for sharded in own:
                self._reduce(sharded)

        part.register_forward_pre_hook(gather)
        part.register_forward_hook(free)
        if not mended:
            # See [Note: freed before backward needs it].
            part.register_full_backward_pre_hook(gather)
            part.register_full_backward_hook(reduce_and_free)
            return
        for sharded in own:
            reduce = partial(self._reduce, sharded)
            sharded.param.register_post_accumulate_grad_hook(lambda _, reduce=reduce: reduce())

    def _reduce(self, sharded: _Sharded) -> None:
        grad = sharded.param.grad
        if grad is not None:
            whole = sharded.padded(grad)
            dist.all_reduce(whole, group=self._group)
            sharded.shard.grad = sharded.own(whole) / whole.new_full((), self._group.size())
            sharded.param.grad = None
        self._free(sharded)

    def _free(self, sharded: _Sharded) -> None:
        sharded.param.data = sharded.param.data.new_empty(0)


@dataclass(kw_only=True, slots=True, eq=False)
class Printed:
    """One of the two stages, as printed or corrected."""

    name: str
    stage: Literal[1, 3]
    mended: bool
    numerics: ClassVar = Numerics(
        divide="post",
        divide_by="ranks",
        sync="last",
        grad_dtype="param",
        reported_grads="before-division",
    )

    @property
    def capabilities(self) -> Capabilities:
        """Return the supported settings: fp32, AdamW, one micro-batch, params of modules."""
        return Capabilities(
            models=("mlp", "params"),
            scalar_params=self.stage == 1,
            empty_params=self.stage == 1,
            stages=(self.stage,),
            follows=ADAMW_SETTINGS,
        )

    def build(self, module: nn.Module, *, scenario: Scenario, group: ProcessGroup) -> Engine:
        """Wrap the module for training on this rank."""
        kind = PrintedStage1 if self.stage == 1 else PrintedStage3
        return kind(module, scenario=scenario, group=group, mended=self.mended)


STAGE_1 = Printed(name="printed-zero1", stage=1, mended=False)
STAGE_1_MENDED = Printed(name="printed-zero1-mended", stage=1, mended=True)
STAGE_3 = Printed(name="printed-zero3", stage=3, mended=False)
STAGE_3_MENDED = Printed(name="printed-zero3-mended", stage=3, mended=True)
