"""Protocol of a workload: module, batches, loss, and optionally an accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeGuard, cast

from torch import Tensor, nn

from zero_sim.scenario.spec import Scenario


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One micro-batch of one rank.

    The tensors belong to the caller. No other call of `Workload.batch` returns the same storage, so
    a system that overwrites its inputs cannot change the reference's.
    """

    inputs: Tensor  # ND, first dim rows; in `params`: (2, elements), the factors c and d
    """Input of the module's forward."""
    targets: Tensor | None
    """Targets of the loss; None if it needs none."""
    uses: frozenset[str] = frozenset()
    """Params that this micro-batch's forward uses, although others may not."""
    unread: frozenset[str] = frozenset()
    """Params that this micro-batch's forward omits, although others may use them."""
    extra: tuple[Tensor, ...] = ()
    """Further tensors of a target's own model."""
    skipped: frozenset[str] = frozenset()
    """Params in `unread` whose modules no forward of the step calls."""
    row_count: int | None = None
    """Number of rows; None for the first dimension of `inputs`."""

    @property
    def rows(self) -> int:
        """Rows (samples) of the loss."""
        return self.inputs.shape[0] if self.row_count is None else self.row_count


class Workload(Protocol):
    """A model, its data and its loss: a pure function of one scenario.

    System and reference share it, so it has no state that either could change.
    """

    def build(self) -> nn.Module:
        """Return a fresh module: always the same initial bits, without global random numbers."""
        ...

    def batch(self, *, step: int, rank: int, micro: int) -> Batch:
        """Return one micro-batch: a pure function of the arguments and the scenario."""
        ...

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """Return the scalar loss. It only calls `module`, so any wrapper will do."""
        ...

    def accuracy(self, module: nn.Module) -> float | None:
        """Return the accuracy on held-out data, from 0 to 1; None without such data."""
        ...


class ExpertWorkload(Workload, Protocol):
    """A workload whose module differs between ranks: each has a share of the experts."""

    def build_share(self, expert_index: int) -> nn.Module:
        """Return a fresh module, as `build`, with the experts of one expert-parallel index.

        An expert has the same names on all ranks. Different experts have different names.
        """
        ...


class SplitWorkload(Workload, Protocol):
    """A workload whose module is split over tensor-parallel ranks; `build` returns the whole."""

    def build_part(self, tp_index: int) -> nn.Module:
        """Return a fresh module with the parts of one tensor-parallel index.

        A part has the same names on all ranks. Parts of different indices have different names.
        """
        ...


class TermsWorkload(Workload, Protocol):
    """A workload whose loss may have a second term, which a system may scale separately."""

    def terms(self, module: nn.Module, batch: Batch) -> tuple[Tensor, ...]:
        """Return the main loss, and a second loss if there is one, each 0-D, from a single forward.

        `loss` is their sum.
        """
        ...


# By one attribute: isinstance() of a protocol looks up all its names, for each module.
def is_split(workload: Workload) -> TypeGuard[SplitWorkload]:
    """Return True if the workload's module is split over tensor-parallel ranks."""
    return hasattr(workload, "build_part")


def has_experts(workload: Workload) -> TypeGuard[ExpertWorkload]:
    """Return True if each rank has a share of the workload's experts."""
    return hasattr(workload, "build_share")


def loss_terms(workload: Workload, module: nn.Module, batch: Batch) -> tuple[Tensor, ...]:
    """Return the terms of the loss, main loss first, from a single forward.

    Args:
        workload: The workload.
        module: Its module, or a wrapper around it.
        batch: A micro-batch.
    """
    if hasattr(workload, "terms"):
        return cast(TermsWorkload, workload).terms(module, batch)
    return (workload.loss(module, batch),)


def total_loss(terms: Sequence[Tensor]) -> Tensor:
    """Return the sum of the terms of a loss, each 0-D."""
    main, *others = terms
    return main + others[0] if others else main


def build_module(
    workload: Workload, *, expert_index: int, tp_index: int | None = None
) -> nn.Module:
    """Return a rank's fresh module. All ranks' modules are equal if nothing is split.

    Args:
        workload: The workload.
        expert_index: Expert-parallel index of the rank.
        tp_index: Tensor-parallel index of the rank; None for a single device with all parts.
    """
    # A single device has all parts, so it takes `build` below.
    if tp_index is not None and is_split(workload):
        return workload.build_part(tp_index)
    if has_experts(workload):
        return workload.build_share(expert_index)
    return workload.build()


def share_of(loss: Tensor, *, scenario: Scenario) -> Tensor:
    """Return the loss for a rank's backward: a mean, or a rank's share of it.

    Args:
        loss: Mean over the rank's rows, 0D.
        scenario: A case without a summed loss.
    """
    if scenario.data.loss == "mean":
        return loss
    # Otherwise a rank's share, because ranks' gradients are then summed.
    # A tensor, because some devices multiply by the rounded reciprocal of a Python number.
    return loss / loss.new_full((), scenario.world.size)
