"""Optimizer state, sharded over ranks: the top layer of ZeRO.

Each rank keeps fp32 masters and moments for its own fragments only; at stage 0 it owns all. An
elementwise optimizer cannot distinguish a fragment from a param, so fragments can be stepped
separately, with the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from zero_sim.errors import UsageError
from zero_sim.zero.collectives import all_reduce_sum
from zero_sim.zero.data_parallel import DistributedDataParallel
from zero_sim.zero.division import divide_
from zero_sim.zero.masters import Master, OwnedFragment, build_masters
from zero_sim.zero.norm import clip_by_norm_, clip_by_value_, measure_grads, root_of_squares
from zero_sim.zero.refusals import Attached, check_groups, check_optimizer, check_state

OptimFactory = Callable[[ParamsT], Optimizer]
"""Builds a rank's optimizer from its fp32 masters, or from param groups of masters."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepResult:
    """The result of a step; equal on all ranks."""

    norm: Tensor  # 0D fp32
    """Gradient norm over all params that are not frozen, after division and unscaling, before
    clipping. Replicas count once. With a model-parallel group it covers all model parts."""
    zeros: int
    """Number of zero elements in that gradient."""
    skipped: bool
    """True if a gradient overflowed under loss scaling, so nothing was stepped."""
    loss_scale: float | None
    """Loss scale in this step; None without a loss scaler."""


class LossScale(Protocol):
    """A loss scale that adapts to overflows."""

    scale: float
    """Factor for the next loss, and divisor for its gradient."""
    growth_interval: int
    good_steps: int

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale. Call backward on the result."""
        ...

    def update(self, *, found_inf: bool) -> None:
        """Adapt the scale after a step, depending on overflow."""


class AllAtOnce:
    """A stepper that converts all gradients to fp32 at once.

    Args:
        optimizer: Holds the masters to step.
    """

    def __init__(self, optimizer: DistributedOptimizer) -> None:
        self._optimizer = optimizer
        self._grads: list[Tensor] = []

    def copy(self, reduced: Tensor) -> Tensor:
        """Return an fp32 copy of a reduced gradient, 1D."""
        return reduced.to(self._optimizer.state_device, torch.float32, copy=True)

    def measure(self, trained: list[Master]) -> tuple[Tensor, int, bool]:
        """Return norm (0D fp32), zeros and overflow over all params, equal on all ranks."""
        self._grads = [self._optimizer._upcast_grad(master) for master in trained]
        return self._optimizer._measure(trained, self._grads)

    def step(self, trained: list[Master], *, norm: Tensor) -> None:
        """Clip gradients, step masters and write them to the working params."""
        self._optimizer._clip(self._grads, norm=norm)
        self._optimizer._step_masters(trained, self._grads)

    def release(self) -> None:
        """Free the gradients."""
        self._grads.clear()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepSeams:
    """Replaceable parts of a step; by default the textbook's.

    Example:
        DistributedOptimizer(ddp, optim_factory=make, seams=StepSeams(loss_scaler=LossScaler()))
    """

    stepper: Callable[[DistributedOptimizer], AllAtOnce] = AllAtOnce
    """Converts gradients to fp32 and steps masters with them."""
    loss_scaler: LossScale | None = None
    """This rank's loss scaler. The caller scales each loss with it."""
    state_device: torch.device | None = None
    """Device for masters, optimizer state and the step, such as the CPU. Reduced gradients are
    copied there, and new params back. None for the params' device."""
    model_parallel_group: dist.ProcessGroup | None = None
    """This rank's model-parallel group, for tensor or pipeline parallelism. The norm covers all
    model parts, and an overflow in any part skips the step in all."""
    is_counted: Callable[[str], bool] = lambda name: True
    """Returns True if norm and zeros on this rank include the param with that name. If several
    model parts hold a param, only one should count it. All are clipped alike."""


class DistributedOptimizer:
    """An elementwise `torch.optim` optimizer over this rank's part of the params.

    A step follows `ddp.finish_grad_sync()`: reduced gradient -> fp32 -> unscale, divide -> measure
    over all ranks -> clip -> step the masters -> cast into the working params -> gather from the
    owners. A param whose `requires_grad` is False at the step is skipped throughout, and its state
    does not change.

    Args:
        ddp: The module and its buffers.
        optim_factory: Called once, with a list of this rank's fp32 masters, each 1D. With
            `group_of`, the list contains `{"params": [...], "group_index": i}` for each group
            instead, even if "params" is empty; the factory adds group i's hyper-parameters.
        group_of: Returns the param group's index for a param name.
        clip_norm: Upper bound for the gradient norm over all params; None for no clipping.
        clip_value: Upper bound for each gradient element's magnitude; None for no clipping.
        elementwise: True to accept an optimizer of unknown class. The caller guarantees that it is
            elementwise.
        seams: Alternative parts.

    Raises:
        UsageError: If the optimizer is not elementwise, is fused, or does not step the given
            masters; if a bound is not positive, or both are given; if a group index is negative.
    """

    inner: Optimizer
    """The rank's optimizer. If the rank owns nothing, its groups are empty."""
    state_device: torch.device
    master_shards: Mapping[tuple[int, int], Tensor]  # 1D fp32 each
    """This rank's masters by (buffer, bucket) index, each as long as a shard, zero-padded."""
    masters: tuple[Master, ...]
    """A master for each owned fragment, in buffer order. Checkpoints save and overwrite them."""
    base_lrs: list[object]
    """Each group's learning rate before any factor."""

    def __init__(
        self,
        ddp: DistributedDataParallel,
        *,
        optim_factory: OptimFactory,
        group_of: Callable[[str], int] | None = None,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        elementwise: bool = False,
        seams: StepSeams | None = None,
    ) -> None:
        _check_bounds(clip_norm=clip_norm, clip_value=clip_value)
        self.ddp = ddp
        self.seams = seams or StepSeams()
        self._clip_norm = clip_norm
        self._clip_value = clip_value
        self.state_device = self.seams.state_device or self._device
        self.master_shards, self.masters = build_masters(ddp, device=self.state_device)
        self.inner = self._build_inner(optim_factory, group_of=group_of, declared=elementwise)
        self.base_lrs = [group.get("lr") for group in self.inner.param_groups]
        self.stepper = self.seams.stepper(self)
        # Attached optimizers gather whole params, so they need the buffers and their collectives.
        if isinstance(self.inner, Attached):
            self.inner.attach(self)
        self._scale_of_step = 1.0
        # The first step creates the state, so it can only be checked afterwards.
        self._unchecked = list(self.masters)

    @property
    def loss_scaler(self) -> LossScale | None:
        """This rank's loss scaler, or None."""
        return self.seams.loss_scaler

    @torch.no_grad()
    def step(self) -> StepResult:
        """Update the working params of all ranks from the reduced gradients.

        The reduced gradients stay readable until `zero_grad`. With a loss scaler, an overflow on
        any rank skips the step on all ranks; only the scale changes. With overlapped gathers the
        params are complete only after `ddp.finish_param_gather()`.

        Raises:
            UsageError: If `ddp.finish_grad_sync()` was not called for this step, or the optimizer
                keeps state that sharding would change.
        """
        if not self.ddp.grads_reduced:
            raise UsageError(
                "expected gradients summed over ranks, got this rank's own. "
                "Call ddp.finish_grad_sync() after the last backward and before step()."
            )
        trained = [master for master in self.masters if master.param.requires_grad]
        # This step's scale, because the stepper may convert gradients again after update().
        self._scale_of_step = 1.0 if self.loss_scaler is None else self.loss_scaler.scale
        norm, zeros, overflowed = self.stepper.measure(trained)
        loss_scale = None if self.loss_scaler is None else self._scale_of_step
        skipped = self.loss_scaler is not None and overflowed
        if self.loss_scaler is not None:
            self.loss_scaler.update(found_inf=overflowed)
        # All ranks agree on the overflow, so either all gather or none.
        if not skipped:
            self.stepper.step(trained, norm=norm)
            # Before this rank waits for others, or the fp32 copies of all ranks would pile up.
            self.stepper.release()
            # On every rank, because a rank that owns nothing takes part in the gather too.
            self.ddp.start_param_gather()
        self.stepper.release()
        return StepResult(norm=norm, zeros=zeros, skipped=skipped, loss_scale=loss_scale)

    def set_lr_factor(self, factor: float) -> None:
        """Set each group's learning rate to `factor` times its initial value.

        Raises:
            UsageError: If a learning rate is not a Python number.
        """
        for group, base_lr in zip(self.inner.param_groups, self.base_lrs, strict=True):
            if not isinstance(base_lr, (int, float)):
                raise UsageError(
                    f"expected learning rates that are Python numbers, got {base_lr!r}. "
                    f"Use a float, such as lr=1e-3."
                )
            group["lr"] = base_lr * factor

    def zero_grad(self) -> None:
        """Zero the gradient buffers for the next step."""
        self.ddp.zero_grad_buffer()

    def fragments(self) -> Iterator[OwnedFragment]:
        """Yield all owned fragments, in buffer order; whole params at stage 0.

        Params without elements have no fragment.
        """
        for master in self.masters:
            state = self.inner.state.get(master.leaf, {})
            yield OwnedFragment(
                param=master.fragment.param,
                buffer=master.buffer_index,
                bucket=master.fragment.bucket,
                shard=master.fragment.shard,
                in_param=master.fragment.in_param,
                in_buffer=master.fragment.in_buffer,
                grad=master.buffer.get_grad_shard(master.param),
                master=master.leaf.detach(),
                state={key: value for key, value in state.items() if isinstance(value, Tensor)},
            )

    def settings(self) -> dict[str, dict[str, object]]:
        """Return group settings by name, for params with an owned fragment; `lr` without factor."""
        # By id, because == of tensors compares elements.
        names = {id(master.leaf): master.fragment.param for master in self.masters}
        settings: dict[str, dict[str, object]] = {}
        for group, base_lr in zip(self.inner.param_groups, self.base_lrs, strict=True):
            own = {key: value for key, value in group.items() if key != "params"} | {"lr": base_lr}
            settings |= {names[id(leaf)]: own for leaf in group["params"]}
        return settings

    def _build_inner(
        self, optim_factory: OptimFactory, *, group_of: Callable[[str], int] | None, declared: bool
    ) -> Optimizer:
        # Owned masters by group, in buffer order.
        leaves: list[list[Tensor]] = [[] for _ in range(_count_groups(self.ddp, group_of=group_of))]
        for master in self.masters:
            leaves[0 if group_of is None else group_of(master.fragment.param)].append(master.leaf)
        # torch.optim refuses an empty list, but not an empty group. A rank that owns nothing calls
        # the factory too, so that an unsuitable optimizer raises on all ranks and none hangs.
        idle = group_of is None and not self.masters
        if idle:
            nothing = torch.zeros(0, device=self.state_device)
            leaves[0].append(nn.Parameter(nothing, requires_grad=False))
        inner = optim_factory(
            list(leaves[0])
            if group_of is None
            else [{"params": list(own), "group_index": i} for i, own in enumerate(leaves)]
        )
        check_optimizer(inner, declared=declared)
        check_groups(inner, handed=leaves)
        if idle:
            inner.param_groups[0]["params"] = []
            inner.state.clear()
        return inner

    @property
    def _device(self) -> torch.device:
        return self.ddp.buffers[0].device

    def _upcast_grad(self, master: Master) -> Tensor:
        reduced = master.buffer.get_grad_shard(master.param)
        # Always a copy, because the buffer must keep the reduced values, but optimizers may write
        # to the gradient (foreach SGD with nesterov does).
        grad = self.stepper.copy(reduced)
        if self.loss_scaler is not None:
            scale = torch.full((), self._scale_of_step, dtype=grad.dtype, device=grad.device)
            # Exact unless it underflows, because the scale of LossScaler is a power of two.
            grad.div_(scale)
        # `pre` and `premul` were applied before the sum, in the gradient's dtype.
        if self.ddp.config.divide == "post":
            divide_(grad, divisor=self.ddp.divisor.to(grad.device))
        return grad

    def _measure(self, trained: list[Master], grads: list[Tensor]) -> tuple[Tensor, int, bool]:
        """Return norm (0D fp32), zeros and overflow over all params, equal on all ranks."""
        return self._agree_on(self._measure_own(trained, grads))

    def _measure_own(self, trained: list[Master], grads: list[Tensor]) -> Tensor:
        """Measure this rank's counted gradients (see `measure_grads`), and overflows in all."""
        counted: list[Tensor] = []
        others: list[Tensor] = []
        for master, grad in zip(trained, grads, strict=True):
            (counted if self._counts(master) else others).append(grad)
        measured = measure_grads(counted, device=self._device)
        if self.loss_scaler is not None:
            # Uncounted replicas should overflow alike. If they ever differ, ranks must still agree
            # to step or to skip.
            measured[2] += measure_grads(others, device=self._device)[2]
        return measured

    def _agree_on(self, measured: Tensor) -> tuple[Tensor, int, bool]:
        """Sum the measurements over ranks, and return norm, zeros and overflow."""
        # [3], fp64: squares, zeros and overflows in one message.
        all_reduce_sum(measured, group=self.ddp.group)
        # Two sums in this order give every rank in every part the same total.
        if self.seams.model_parallel_group is not None:
            all_reduce_sum(measured, group=self.seams.model_parallel_group)
        _, zeros, overflow_count = measured.tolist()
        return root_of_squares(measured[0]), int(zeros), overflow_count > 0

    def _counts(self, master: Master) -> bool:
        """Return True if this rank counts a fragment; only the first replica counts."""
        name = master.fragment.param
        if not self.seams.is_counted(name):
            return False
        return self.ddp.holders.is_first_replica(master.buffer.plan.key.kind)

    def _clip(self, grads: list[Tensor], *, norm: Tensor) -> None:
        if self._clip_norm is not None:
            clip_by_norm_(grads, norm=norm.to(self.state_device), max_norm=self._clip_norm)
        if self._clip_value is not None:
            clip_by_value_(grads, max_value=self._clip_value)

    def _step_masters(self, trained: list[Master], grads: list[Tensor]) -> None:
        for master, grad in zip(trained, grads, strict=True):
            master.leaf.grad = grad
        self.inner.step()
        self._check_new_state()
        self._write_back(trained)

    def _write_back(self, trained: list[Master]) -> None:
        """Write masters to the working params; other ranks receive them with the next gather."""
        # Even without owned fragments, because prepare() may contain a collective.
        self.ddp.cast.prepare(lambda: ((each.param, each.leaf.detach()) for each in trained))
        for master in trained:
            master.buffer.write_param_shard(master.param, master.leaf)
            # The fp32 gradient is only needed inside a step.
            master.leaf.grad = None

    def _check_new_state(self) -> None:
        # A master has state only after its first step, so frozen masters stay unchecked.
        stepless = []
        for master in self._unchecked:
            if not master.param.requires_grad:
                stepless.append(master)
                continue
            for key, state in self.inner.state.get(master.leaf, {}).items():
                check_state(state, key=key, master=master.leaf, param=master.fragment.param)
        self._unchecked = stepless


def _count_groups(ddp: DistributedDataParallel, *, group_of: Callable[[str], int] | None) -> int:
    """Return the number of param groups, from all params, so that all ranks agree."""
    # Without `group_of`, all params form a single group.
    if group_of is None:
        return 1
    indices = {name: group_of(name) for name in ddp.params}
    for name, index in indices.items():
        if isinstance(index, bool) or not isinstance(index, int) or index < 0:
            raise UsageError(
                f"expected group_of to return the index of a param group, from 0, "
                f"got {index!r} for {name!r}."
            )
    return 1 + max(indices.values())


def _check_bounds(*, clip_norm: float | None, clip_value: float | None) -> None:
    for name, bound in (("clip_norm", clip_norm), ("clip_value", clip_value)):
        # Not `bound <= 0`, because NaN would pass.
        if bound is not None and not bound > 0:
            raise UsageError(f"expected {name} to be positive, or None, got {bound}.")
    if clip_norm is not None and clip_value is not None:
        raise UsageError(
            f"expected one way of clipping, got clip_norm={clip_norm} and "
            f"clip_value={clip_value}. Remove one of them."
        )
