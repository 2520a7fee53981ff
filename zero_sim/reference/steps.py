"""Records: where a step began, where it came to, and where the next one begins."""

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
    """An optimizer step."""

    step: int
    """Its index, from 0."""
    grads: Mapping[str, Tensor]  # each ND, fp32
    """The optimizer's gradients, by stepped param."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerHistory:
    """All earlier optimizer steps."""

    masters: Mapping[str, Tensor]  # each ND, fp32
    """Masters before the first one."""
    steps: Sequence[OptimizerStep] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class StepStart:
    """Copies from before a step, so it can be taken again."""

    stepper: Stepper
    """Masters and optimizer state; not to be stepped itself."""
    loss_scale: LossScale | None
    working: WorkingParams
    """Dtypes and fp8 scales for the working params."""
    adding: Adding
    orders: Orders
    history: OptimizerHistory | None
    """None if there are too many elements to keep them."""

    def params(self) -> dict[str, Tensor]:
        """Cast the masters into working params."""
        masters = self.stepper.masters.items()
        return {name: self.working.cast(name, each, is_stepped=False) for name, each in masters}


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceStep:
    """All that one step produced; valid until the next step, since tensors may be live state."""

    step: int
    """Optimizer step, from 0."""
    losses: Mapping[tuple[int, int], Tensor]  # each 0D
    """Loss by (rank, micro-batch), not scaled."""
    grads: Mapping[str, Tensor]  # each ND, grad dtype
    """Sum over ranks, by param, before the division that `post` asks for and still scaled; zeros
    for a param that is frozen in this step."""
    one_device: Mapping[str, Tensor] | None  # each ND, grad dtype
    """Gradients of one device that sees the data once, where the case says that all ranks together
    compute these; scaled as `grads`."""
    update: Update
    """Division for `grads`; factors for losses and learning rates in this step."""
    stepped: Mapping[str, Tensor]  # each ND, fp32
    """What the optimizer was given, by param that it stepped: divided, unscaled and clipped; empty
    where the step was skipped."""
    masters: Mapping[str, Tensor]  # each ND, fp32
    params: Mapping[str, Tensor]  # each ND, working dtype
    """The working params: the masters, cast; of all ranks, also those that only some hold."""
    scales: Mapping[str, Tensor]  # each 0D, fp32
    """Of params in fp8: what their values are multiplied by, after the step."""
    state: Mapping[str, Mapping[str, Tensor]]
    """torch's optimizer state by param and key, `step` included."""
    order_free: Mapping[str, Tensor] | None  # each ND, bool
    """By param: which elements of `grads` come out the same in every order of addition; see
    `reference.certificate`. None where the model does not claim that of any, or where a gradient is
    not finite."""
    measured: Measure
    """Measure of the whole master gradient before clipping. A norm that is not certified is not
    owed."""
    clip_certified: bool
    """Whether every order of adding clips alike, if anything is clipped by the norm. Where not,
    nothing is owed that follows."""
    skipped: bool
    """Whether nothing was updated, because a scaled gradient was not finite."""
    nonzero_fraction: float
    """Share of the elements of `grads` that are not zero; 0 where there are none."""
    data_digests: Mapping[int, bytes]
    """By rank: hash of the bytes of its batches."""
    nonfinite: NonFinite | None
    """First NaN or infinity among the local gradients; None if there is none."""
    start: StepStart | None
    """What the step began with; None if there are too many elements to keep it."""
    cut_dependence: str = ""
    """Why the bits of the target's rule are not known, so that the step is not certified."""
    unmoved: frozenset[str] = frozenset()
    """Params without masters that kept their values, because each update was rounded away."""

    @property
    def divisor(self) -> float:
        """Divisor for `grads`: 1 if nothing is done after the sum."""
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
        """The masters before the step; empty if they are not kept."""
        return {} if self.start is None else self.start.stepper.masters

    @property
    def params_before(self) -> Mapping[str, Tensor]:  # each ND, working dtype
        """The working params before the step; empty if they are not kept."""
        return {} if self.start is None else self.start.params()

    @property
    def lost(self) -> str | None:
        """Name of the first param whose master is not finite after the step; None if all are."""
        for name, master in self.masters.items():
            # A norm needs no memory, and NaN is the greatest to it.
            if master.numel() and not isfinite(torch.linalg.vector_norm(master, torch.inf)):
                return name
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """What the next step begins with; live, not copied."""

    next_step: int
    masters: Mapping[str, Tensor]  # each ND, fp32
    params: Mapping[str, Tensor]  # each ND, working dtype
    scales: Mapping[str, Tensor]  # each 0D, fp32
    """Of params in fp8."""
    buffers: Mapping[str, Tensor]  # each ND
    """Those of the module that only a checkpoint has."""
    state: Mapping[str, Mapping[str, Tensor]]
    """torch's optimizer state by param and key; no keys for a param that was never stepped."""
    settings: Mapping[str, Mapping[str, object]]
    """By param: what its group in the optimizer says, `lr` before any factor."""
    loss_scale: float | None
    good_steps: int | None
    """Steps without overflow since the loss scale last changed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BegunStep:
    """A step whose gradients are there and whose update is not."""

    local: Contributions
    grads: Mapping[str, Tensor]  # each ND, grad dtype
    """As in `ReferenceStep`."""
    start: StepStart | None
    """As in `ReferenceStep`."""
    flat: Tensor  # 1D, fp32
    """The master gradient of what is trained in this step, not clipped."""
    one_device: Mapping[str, Tensor] | None  # each ND, grad dtype
    """As in `ReferenceStep`."""
    measured: Measure
    """Of `flat`, but for what does not count here."""
    order_free: Mapping[str, Tensor] | None  # each ND, bool
    """As in `ReferenceStep`."""
    nonzero_fraction: float
    nonfinite: NonFinite | None
