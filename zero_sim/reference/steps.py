"""Steps of the reference as records: what one began with, came to, and leaves to the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from zero_sim.reference.division import Division
from zero_sim.reference.gradient import Measure
from zero_sim.reference.mistakes import Mistakes
from zero_sim.reference.other_sums import OtherSums
from zero_sim.reference.otherwise import Otherwise
from zero_sim.reference.ranks import Contributions
from zero_sim.reference.replay import NonFinite


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
    divisor: float
    """What `grads` are yet to be divided by: 1 where nothing comes after the sum."""
    division: Division
    """How they are."""
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
    norm: Tensor  # 0D, fp32
    """Norm of the whole master gradient before clipping."""
    norm_certified: bool
    """Whether every order of adding gives that norm. Where not, it is not owed."""
    clip_certified: bool
    """Whether every order of adding clips alike, if anything is clipped by the norm. Where not,
    nothing is owed that follows."""
    other_sums: OtherSums | None
    """What the gradients would have been by another rule; None of more than `KEPT_ELEMS_MAX`."""
    otherwise: Otherwise | None
    """What the update would have come to by another rule; None where there is no other."""
    zeros: int
    """Elements of the master gradient that are zero, before clipping."""
    skipped: bool
    """Whether nothing was updated, because a scaled gradient was not finite."""
    loss_scale: float | None
    """What losses were multiplied by in this step; None without loss scaling."""
    lr_factor: float
    """What learning rates were multiplied by in this step."""
    nonzero_fraction: float
    """Share of the elements of `grads` that are not zero; 0 where there are none."""
    data_digests: Mapping[int, bytes]
    """By rank: hash of the bytes of its batches."""
    nonfinite: NonFinite | None
    """First NaN or infinity among the local gradients; None if there is none."""
    lost: str | None
    """Name of the first param whose master is not finite after the step; None if all are."""
    mistakes: Mistakes | None
    """What the update would have come to by known mistakes; None of more than `KEPT_ELEMS_MAX`."""
    masters_before: Mapping[str, Tensor]  # each ND, fp32
    """What `masters` were before the step; empty, as the next, of more than `KEPT_ELEMS_MAX`."""
    params_before: Mapping[str, Tensor]  # each ND, working dtype
    """What `params` were before the step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """What the next step begins with; live, not copied."""

    next_step: int
    masters: Mapping[str, Tensor]  # each ND, fp32
    params: Mapping[str, Tensor]  # each ND, working dtype
    scales: Mapping[str, Tensor]  # each 0D, fp32
    """Of params in fp8."""
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
    other_sums: OtherSums | None
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
