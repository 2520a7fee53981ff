"""Gradients of a module, accumulated locally and summed over ranks: the middle layer of ZeRO.

The life of a gradient: autograd writes `param.grad`; a hook adds it to `param.main_grad`, a view
of the flat buffer, and drops it; after the last micro-batch `finish_grad_sync` sums the buffers
over ranks; the optimizer reads its part; `zero_grad_buffer` starts the next step.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero_sim.errors import ModelError, UsageError
from zero_sim.layout import BufferPlan, LayoutPolicy, ParamSpec, plan_buffers
from zero_sim.zero.buffer import Buffer, ParamMemory
from zero_sim.zero.collectives import broadcast_from_first, size_and_rank
from zero_sim.zero.config import ZeroConfig
from zero_sim.zero.division import build_divisor
from zero_sim.zero.model import DTYPE_NAMES, find_trainable_params


class DistributedDataParallel:
    """A module whose trainable params and gradients live in flat buffers.

    Frozen params stay as they are and cost nothing. A trainable param that takes no part in a step
    has a gradient of zero, on every rank, and is stepped with it.

    Args:
        module: What is trained; its params are re-pointed into buffers.
        config: Stage, numerics and layout.
        group: The ranks that train together.

    Raises:
        ModelError: If the module cannot be trained; see `find_trainable_params`.
        LayoutError: If the config asks for a layout that cannot exist.
        UsageError: If `group` is None or does not hold this process.
    """

    module: nn.Module
    params: dict[str, nn.Parameter]
    """Trainable params by name, in registration order; a tied param once."""
    buffers: tuple[Buffer, ...]
    divisor: Tensor  # 0D fp32
    """The world size, as a divisor of gradients."""

    def __init__(self, module: nn.Module, *, config: ZeroConfig, group: dist.ProcessGroup) -> None:
        self.module = module
        self.config = config
        self.group = group
        self.world_size, self.rank = size_and_rank(group)
        self.params = find_trainable_params(module)
        self.buffers = tuple(self._build_buffer(plan) for plan in self._plan())
        if config.broadcast_params:
            # After the params moved into their buffers: before, each would be in memory twice.
            broadcast_from_first(self._replicated_tensors(), group=group)
        self.divisor = build_divisor(self.world_size, device=self.buffers[0].grad_data.device)
        self._grads_reduced = False
        for buffer in self.buffers:
            for param, memory in buffer.memory.items():
                # A gradient from before the wrapping belongs to no step of ours.
                param.grad = None
                param.register_post_accumulate_grad_hook(partial(self._accumulate, memory))

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Run the module's forward."""
        return self.module(*args, **kwargs)

    @property
    def grads_reduced(self) -> bool:
        """Whether the buffers hold sums over ranks rather than this rank's own gradients."""
        return self._grads_reduced

    def finish_grad_sync(self) -> None:
        """Sum the accumulated gradients over the ranks, once a step, after the last backward.

        Every rank must call it, also one whose backward touched no param: the collectives follow
        from the layout alone, never from which gradients arrived.

        Raises:
            UsageError: If the gradients are sums already.
        """
        if self._grads_reduced:
            raise UsageError(
                "Expected gradients of this rank alone but got sums over ranks: "
                "finish_grad_sync() was called twice. Try zero_grad_buffer() between two steps."
            )
        for buffer in self.buffers:
            if self.config.divide == "pre":
                buffer.divide_grads(self.divisor)
            if self.config.stage == 1:
                buffer.reduce_scatter_grads()
            else:
                buffer.all_reduce_grads()
        self._grads_reduced = True

    def zero_grad_buffer(self) -> None:
        """Zero all gradients, so that the next backward starts a new step."""
        for buffer in self.buffers:
            buffer.zero_grads()
        self._grads_reduced = False

    def _replicated_tensors(self) -> list[Tensor]:
        """Everything that must start out equal on all ranks; flat buffers as a whole."""
        in_buffers = set(self.params.values())
        return [
            *(memory for buffer in self.buffers for memory in buffer.working_memory()),
            *(param for param in self.module.parameters() if param not in in_buffers),
            *self.module.buffers(),
        ]

    def _plan(self) -> tuple[BufferPlan, ...]:
        specs = [
            ParamSpec(name=name, shape=tuple(param.shape), dtype=DTYPE_NAMES[param.dtype])
            for name, param in self.params.items()
        ]
        policy = LayoutPolicy(
            shard_count=self.world_size if self.config.stage == 1 else 1,
            align_elems=self.config.align_elems,
            bucket_elems=self.config.bucket_elems,
            param_order=self.config.param_order,
        )
        return plan_buffers(specs, policy=policy)

    def _build_buffer(self, plan: BufferPlan) -> Buffer:
        params = {placed.name: self.params[placed.name] for placed in plan.params}
        param_dtype = next(iter(params.values())).dtype
        return Buffer(
            plan,
            params=params,
            group=self.group,
            stage=self.config.stage,
            grad_dtype=torch.float32 if self.config.grad_dtype == "fp32" else param_dtype,
        )

    def _accumulate(self, memory: ParamMemory, param: Tensor) -> None:
        """Add a fresh gradient to the buffer; runs inside backward, once a param and backward."""
        grad = param.grad
        assert grad is not None
        if self._grads_reduced:
            raise UsageError(
                f"Expected no backward between finish_grad_sync() and zero_grad_buffer() but got a "
                f"gradient of {memory.name!r}, which would be added to a sum over ranks."
            )
        if grad.layout is not torch.strided:
            raise ModelError(
                f"Expected dense gradients but got layout {grad.layout} for {memory.name!r}. "
                f"Try sparse=False in its module."
            )
        # detach: with create_graph=True the gradient has a history that the buffer must not keep.
        memory.main_grad.add_(grad.detach())
        param.grad = None
