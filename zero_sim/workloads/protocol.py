"""Workload protocol: module, batches, loss, and optionally an accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeGuard, cast

from torch import Tensor, nn

from zero_sim.scenario.spec import Scenario


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One rank's micro-batch.

    The tensors belong to the caller: every `Workload.batch` call returns new storage, so a system
    that overwrites its inputs does not change the reference's.
    """

    inputs: Tensor  # ND, first dim rows; in `params`: (2, elements), the factors c and d
    """Forward input."""
    targets: Tensor | None
    """Loss targets; None if the loss needs none."""
    uses: frozenset[str] = frozenset()
    """Params that this micro-batch's forward uses, although others may not."""
    unread: frozenset[str] = frozenset()
    """Params that this micro-batch's forward omits, although others may use them."""
    extra: tuple[Tensor, ...] = ()
    """Further tensors for a target's own model."""
    skipped: frozenset[str] = frozenset()
    """Params in `unread` whose modules no forward in the step calls."""
    row_count: int | None = None
    """Number of rows; None for the first dimension of `inputs`."""

    @property
    def rows(self) -> int:
        """Rows (samples) in the loss."""
        return self.inputs.shape[0] if self.row_count is None else self.row_count


class Workload(Protocol):
    """A scenario's model, data and loss.

    System and reference share it, so it has no state that either could change.
    """

    def build(self) -> nn.Module:
        """Return a fresh module. Its initial bits do not depend on global random numbers."""
        ...

    def batch(self, *, step: int, rank: int, micro: int) -> Batch:
        """Return a micro-batch, which depends only on these arguments and the scenario."""
        ...

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """Return the scalar loss. Only call `module`, because it may be a wrapper."""
        ...

    def accuracy(self, module: nn.Module) -> float | None:
        """Return the accuracy on held-out data, from 0 to 1; None without such data."""
        ...


class ExpertWorkload(Workload, Protocol):
    """A workload with a different share of the experts on each rank's module."""

    def build_share(self, expert_index: int) -> nn.Module:
        """Return a fresh module with one expert-parallel index's experts; see `build`.

        An expert has the same names on all ranks. Different experts have different names.
        """
        ...


class SplitWorkload(Workload, Protocol):
    """A workload with a module split over tensor-parallel ranks; `build` returns the whole."""

    def build_part(self, tp_index: int) -> nn.Module:
        """Return a fresh module with one tensor-parallel index's parts.

        A part has the same names on all ranks. Different parts have different names.
        """
        ...


class TermsWorkload(Workload, Protocol):
    """A workload with an optional second loss term, which a system may scale separately."""

    def terms(self, module: nn.Module, batch: Batch) -> tuple[Tensor, ...]:
        """Return the main loss, and any second loss, from a single forward; each 0-D.

        `loss` is their sum.
        """
        ...


# By a single attribute, because isinstance() with a protocol looks up all its names each time.
def is_split(workload: Workload) -> TypeGuard[SplitWorkload]:
    """Return True if tensor-parallel ranks split the workload's module."""
    return hasattr(workload, "build_part")


def has_experts(workload: Workload) -> TypeGuard[ExpertWorkload]:
    """Return True if each rank has a share of the workload's experts."""
    return hasattr(workload, "build_share")


def loss_terms(workload: Workload, module: nn.Module, batch: Batch) -> tuple[Tensor, ...]:
    """Return the loss terms, main loss first, from a single forward."""
    if hasattr(workload, "terms"):
        return cast(TermsWorkload, workload).terms(module, batch)
    return (workload.loss(module, batch),)


def total_loss(terms: Sequence[Tensor]) -> Tensor:
    """Return the sum of the loss terms, each 0-D."""
    main, *others = terms
    return main + others[0] if others else main


def build_module(
    workload: Workload, *, expert_index: int, tp_index: int | None = None
) -> nn.Module:
    """Return a rank's fresh module. If nothing is split, all ranks' modules are equal.

    A `tp_index` of None stands for a single device with all parts.
    """
    # A single device has all parts, so it takes `build` below.
    if tp_index is not None and is_split(workload):
        return workload.build_part(tp_index)
    if has_experts(workload):
        return workload.build_share(expert_index)
    return workload.build()


def share_of(loss: Tensor, *, scenario: Scenario) -> Tensor:
    """Return a rank's loss for backward: the mean over its rows (0D), or 1 / world_size of it.

    Do not call it for summed losses.
    """
    if scenario.data.loss == "mean":
        return loss
    # A share, because ranks' gradients are then summed.
    # A tensor, because some devices multiply by the rounded reciprocal of a Python number.
    return loss / loss.new_full((), scenario.world.size)
