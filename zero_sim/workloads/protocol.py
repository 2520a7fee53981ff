"""Protocol of a workload: a module, batches, a loss and its shares, maybe an accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeGuard, cast

from torch import Tensor, nn

from zero_sim.scenario.spec import Scenario


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One micro-batch of one rank.

    The tensors belong to the caller: no other call of `Workload.batch` returns the same storage, so
    a system that spoils its input cannot spoil the reference's.
    """

    inputs: Tensor  # ND, first dim rows; in `params`: (2, elements), the factors c and d
    """What the module's forward is called with."""
    targets: Tensor | None
    """What the loss compares the output with; None where the loss needs no target."""
    uses: frozenset[str] = frozenset()
    """Params that this micro-batch's forward uses and others' may not."""
    unread: frozenset[str] = frozenset()
    """Params that this micro-batch's forward leaves out, though others' may use them."""
    extra: tuple[Tensor, ...] = ()
    """Further tensors, of a model that a target brings."""
    skipped: frozenset[str] = frozenset()
    """Those of `unread` whose modules no forward of the step calls."""
    row_count: int | None = None
    """Rows it stands for, where that is not the first dim of `inputs`."""

    @property
    def rows(self) -> int:
        """Rows (samples) that the loss is taken over."""
        return self.inputs.shape[0] if self.row_count is None else self.row_count


class Workload(Protocol):
    """A model, its data and its loss: a pure function of one scenario.

    System and reference share one, so it must hold no state that either of them could change.
    """

    def build(self) -> nn.Module:
        """Return a fresh module: always the same initial bits, no global random number used."""
        ...

    def batch(self, *, step: int, rank: int, micro: int) -> Batch:
        """Return one micro-batch: a pure function of the arguments and the scenario."""
        ...

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """Return the scalar loss; touches `module` only by calling it, so any wrapper will do."""
        ...

    def accuracy(self, module: nn.Module) -> float | None:
        """Return the accuracy on held-out data, 0 to 1; None where there is no such data."""
        ...


class ExpertWorkload(Workload, Protocol):
    """A workload whose module differs from rank to rank: each holds a share of the experts."""

    def build_share(self, expert_index: int) -> nn.Module:
        """Return a fresh module, as `build`, with the experts of one expert-parallel index.

        Experts have the same names on whatever rank they are; two different ones have two names.
        """
        ...


class SplitWorkload(Workload, Protocol):
    """A workload of which tensor-parallel ranks hold a part each; `build` returns the whole."""

    def build_part(self, tp_index: int) -> nn.Module:
        """Return a fresh module with the parts of one tensor-parallel index.

        Parts have the same names wherever they are; those of two indices have two names.
        """
        ...


class TermsWorkload(Workload, Protocol):
    """A workload whose loss may have a second term, which a system may scale by itself."""

    def terms(self, module: nn.Module, batch: Batch) -> tuple[Tensor, ...]:
        """Return the loss, or the main loss and a second loss, each 0-D; a single forward for both.

        `loss` is their sum.
        """
        ...


# By what tells them apart: by isinstance Python looks for all names of a protocol, at each module.
def is_split(workload: Workload) -> TypeGuard[SplitWorkload]:
    """Whether tensor-parallel ranks hold a part each of what it builds."""
    return hasattr(workload, "build_part")


def has_experts(workload: Workload) -> TypeGuard[ExpertWorkload]:
    """Whether each rank holds a share of the experts of what it builds."""
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
    """Return the fresh module of a rank; all ranks have the same one where nothing is dealt out.

    Args:
        workload: What is trained.
        expert_index: The rank's expert-parallel index.
        tp_index: Its tensor-parallel index; None for one device, which holds all parts.
    """
    if tp_index is not None and is_split(workload):
        return workload.build_part(tp_index)
    if has_experts(workload):
        return workload.build_share(expert_index)
    return workload.build()


def share_of(loss: Tensor, *, scenario: Scenario) -> Tensor:
    """Return the loss that a rank runs backward from, where that is a mean or a part of one.

    Args:
        loss: Mean over the rank's rows, 0D.
        scenario: A case without a summed loss.
    """
    if scenario.data.loss == "mean":
        return loss
    # A tensor: by a Python number some devices multiply with its rounded reciprocal.
    return loss / loss.new_full((), scenario.world.size)
