"""Step records: state before a step, its results, and state before the next step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor

from zero_sim.reference.following import Update
from zero_sim.reference.gradient import Measure
from zero_sim.reference.quantization import WorkingParams
from zero_sim.reference.ranks import Adding, Contributions, Orders
from zero_sim.reference.replay import NonFinite
from zero_sim.reference.scaling import LossScale
from zero_sim.reference.stepping import Stepper


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerStep:
    """One optimizer step."""

    step: int
    """Index, from 0."""
    grads: Mapping[str, Tensor]  # each ND, fp32
    """Optimizer gradients by stepped param."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerHistory:
    """All earlier optimizer steps."""

    masters: Mapping[str, Tensor]  # each ND, fp32
    """Masters before the first step."""
    steps: Sequence[OptimizerStep] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class StepStart:
    """Copies taken before a step, so that it can be repeated."""

    stepper: Stepper
    """Masters and optimizer state; do not step it."""
    loss_scale: LossScale | None
    working: WorkingParams
    """Working dtypes and fp8 scales."""
    adding: Adding
    orders: Orders
    history: OptimizerHistory | None
    """None if there are too many elements to keep."""

    def params(self) -> dict[str, Tensor]:
        """Cast the masters into working params."""
        masters = self.stepper.masters.items()
        return {name: self.working.cast(name, each, is_stepped=False) for name, each in masters}


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceStep:
    """Results of one step. Read them before the next step, because tensors may be live state."""

    step: int
    """Optimizer step, from 0."""
    # Forward, backward and reduction.
    losses: Mapping[tuple[int, int], Tensor]  # each 0D
    """Unscaled loss by (rank, micro-batch)."""
    grads: Mapping[str, Tensor]  # each ND, grad dtype
    """Sum over ranks by param, still scaled and before any `post` division. Zeros for params that
    are frozen in this step."""
    one_device: Mapping[str, Tensor] | None  # each ND, grad dtype
    """Gradients from a single device that processes the data once, scaled like `grads`. None unless
    the case has `expect.one_device`."""
    # The update.
    update: Update
    """Division for `grads`, with this step's loss and learning-rate factors."""
    stepped: Mapping[str, Tensor]  # each ND, fp32
    """Optimizer gradients by stepped param: divided, unscaled and clipped. Empty if the step was
    skipped."""
    # State after the step.
    masters: Mapping[str, Tensor]  # each ND, fp32
    params: Mapping[str, Tensor]  # each ND, working dtype
    """Masters cast to the working dtype, including params that only some ranks hold."""
    scales: Mapping[str, Tensor]  # each 0D, fp32
    """fp8 scales after the step, by param."""
    state: Mapping[str, Mapping[str, Tensor]]
    """Optimizer state by param and torch key, including `step`."""
    # Guarantees: results that hold in every summation order.
    order_free: Mapping[str, Tensor] | None  # each ND, bool
    """True for `grads` elements with the same bits in every summation order, by param; see
    `reference.certificate`. None if the model does not promise exact sums, or if a gradient is not
    finite."""
    measured: Measure
    """Measure of the whole master gradient before clipping. Its norm must match only if
    certified."""
    clip_certified: bool
    """True if every summation order clips alike. If False, later results are not exact."""
    skipped: bool
    """True if nothing was updated, because a gradient was not finite."""
    nonzero_fraction: float
    """Nonzero share of the elements in `grads`; 0 without elements."""
    data_digests: Mapping[int, bytes]
    """Hash of each rank's batches."""
    nonfinite: NonFinite | None
    """First NaN or infinity in the local gradients; None if all are finite."""
    start: StepStart | None
    """State before the step; None if it has too many elements to keep."""
    cut_dependence: str = ""
    """Reason why the target rule's bits are unknown and the step is not certified; empty if
    known."""
    unmoved: frozenset[str] = frozenset()
    """Params without fp32 masters that kept their values, because rounding removed every update."""

    @property
    def divisor(self) -> float:
        """Divisor for `grads`; 1 if no division follows the sum."""
        return self.update.divisor

    @property
    def loss_scale(self) -> float | None:
        """Loss scale of this step; None without loss scaling."""
        return self.update.scale

    @property
    def norm(self) -> Tensor:  # 0D, fp32
        """Norm of the whole master gradient before clipping."""
        return self.measured.norm

    @property
    def masters_before(self) -> Mapping[str, Tensor]:  # each ND, fp32
        """Masters before the step; empty if not kept."""
        return {} if self.start is None else self.start.stepper.masters

    @property
    def params_before(self) -> Mapping[str, Tensor]:  # each ND, working dtype
        """Working params before the step; empty if not kept."""
        return {} if self.start is None else self.start.params()

    @property
    def lost(self) -> str | None:
        """First param with a non-finite master after the step; None if all are finite."""
        for name, master in self.masters.items():
            # The maximum norm needs no memory, and NaN propagates through it.
            if master.numel() and not isfinite(torch.linalg.vector_norm(master, torch.inf)):
                return name
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingState:
    """State before the next step; live, not copied."""

    next_step: int
    masters: Mapping[str, Tensor]  # each ND, fp32
    params: Mapping[str, Tensor]  # each ND, working dtype
    scales: Mapping[str, Tensor]  # each 0D, fp32
    """fp8 scales, by param."""
    buffers: Mapping[str, Tensor]  # each ND
    """Module buffers that only a checkpoint can restore."""
    state: Mapping[str, Mapping[str, Tensor]]
    """Optimizer state by param and torch key; no keys for a param that was never stepped."""
    settings: Mapping[str, Mapping[str, object]]
    """Optimizer group settings by param, with `lr` before any factor."""
    loss_scale: float | None
    good_steps: int | None
    """Steps without overflow since the loss scale last changed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingStep:
    """A step with reduced gradients, before its update."""

    local: Contributions
    grads: Mapping[str, Tensor]  # each ND, grad dtype
    """See `ReferenceStep`."""
    start: StepStart | None
    """See `ReferenceStep`."""
    flat: Tensor  # 1D, fp32
    """Master gradient before clipping, over the params trained in this step."""
    one_device: Mapping[str, Tensor] | None  # each ND, grad dtype
    """See `ReferenceStep`."""
    measured: Measure
    """Measure of `flat`, without `uncounted` params."""
    order_free: Mapping[str, Tensor] | None  # each ND, bool
    """See `ReferenceStep`."""
    nonzero_fraction: float
    nonfinite: NonFinite | None
