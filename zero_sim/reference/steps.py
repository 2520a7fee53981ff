"""Records of a step: state before, results, and state before the next one."""

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
    """One step of the optimizer."""

    step: int
    """Index, from 0."""
    grads: Mapping[str, Tensor]  # each ND, fp32
    """The optimizer's gradients, by stepped param."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerHistory:
    """All earlier steps of the optimizer."""

    masters: Mapping[str, Tensor]  # each ND, fp32
    """Masters before the first step."""
    steps: Sequence[OptimizerStep] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class StepStart:
    """Copies from before a step, for repeating it."""

    stepper: Stepper
    """Masters and optimizer state; do not step it."""
    loss_scale: LossScale | None
    working: WorkingParams
    """Dtypes and fp8 scales of the working params."""
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
    """Results of one step. Valid until the next step, because tensors may be live state."""

    step: int
    """Optimizer step, from 0."""
    # Forward, backward and reduction.
    losses: Mapping[tuple[int, int], Tensor]  # each 0D
    """Loss by (rank, micro-batch), not scaled."""
    grads: Mapping[str, Tensor]  # each ND, grad dtype
    """Sum over ranks, by param, still scaled and before a `post` division; zeros for a param that
    is frozen in this step."""
    one_device: Mapping[str, Tensor] | None  # each ND, grad dtype
    """Gradients of one device that processes the data once, scaled as `grads`; None unless the case
    has `expect.one_device`."""
    # The update.
    update: Update
    """Division for `grads`; factors for losses and learning rates in this step."""
    stepped: Mapping[str, Tensor]  # each ND, fp32
    """The optimizer's gradients, by stepped param: divided, unscaled and clipped. Empty if the step
    was skipped."""
    # State after the step.
    masters: Mapping[str, Tensor]  # each ND, fp32
    params: Mapping[str, Tensor]  # each ND, working dtype
    """The masters cast to working params, of all ranks, including params of some ranks only."""
    scales: Mapping[str, Tensor]  # each 0D, fp32
    """fp8 scales after the step, by param."""
    state: Mapping[str, Mapping[str, Tensor]]
    """torch's optimizer state by param and key, `step` included."""
    # Guarantees: results that hold in every summation order.
    order_free: Mapping[str, Tensor] | None  # each ND, bool
    """True for elements of `grads` with the same bits in every summation order, by param; see
    `reference.certificate`. None if the model makes no such claim, or a gradient is not finite."""
    measured: Measure
    """Measure of the whole master gradient before clipping. It must be equal only if certified."""
    clip_certified: bool
    """True if every summation order leads to the same clipping. If False, exact results end
    here."""
    skipped: bool
    """True if nothing was updated, because a gradient was not finite."""
    nonzero_fraction: float
    """Share of the elements of `grads` that are not zero; 0 if there are none."""
    data_digests: Mapping[int, bytes]
    """Hash of each rank's batches, by rank."""
    nonfinite: NonFinite | None
    """First NaN or infinity among the local gradients; None if there is none."""
    start: StepStart | None
    """State before the step; None if there are too many elements to keep it."""
    cut_dependence: str = ""
    """Reason why the bits of the target's rule are unknown, so that the step is not certified."""
    unmoved: frozenset[str] = frozenset()
    """Params without masters whose values stayed, because each update was rounded away."""

    @property
    def divisor(self) -> float:
        """Divisor for `grads`; 1 if no division follows the sum."""
        return self.update.divisor

    @property
    def loss_scale(self) -> float | None:
        """Factor of the losses in this step; None without loss scaling."""
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
        """Name of the first param whose master is not finite after the step; None if all are."""
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
    """Buffers of the module whose values only a checkpoint can restore."""
    state: Mapping[str, Mapping[str, Tensor]]
    """torch's optimizer state by param and key; no keys for a param that was never stepped."""
    settings: Mapping[str, Mapping[str, object]]
    """Settings of each param's group in the optimizer, with `lr` before any factor."""
    loss_scale: float | None
    good_steps: int | None
    """Steps without overflow since the loss scale last changed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PendingStep:
    """A step with gradients, before its update."""

    local: Contributions
    grads: Mapping[str, Tensor]  # each ND, grad dtype
    """As in `ReferenceStep`."""
    start: StepStart | None
    """As in `ReferenceStep`."""
    flat: Tensor  # 1D, fp32
    """The master gradient of params trained in this step, before clipping."""
    one_device: Mapping[str, Tensor] | None  # each ND, grad dtype
    """As in `ReferenceStep`."""
    measured: Measure
    """Measure of `flat`, without `uncounted` params."""
    order_free: Mapping[str, Tensor] | None  # each ND, bool
    """As in `ReferenceStep`."""
    nonzero_fraction: float
    nonfinite: NonFinite | None
