"""Calls with several tensors per rank, as from a process with several devices.

gloo accepts such calls on any device. Here the call itself has a single tensor. Before and after
the call, the rank combines its tensors in its own turn, so the call is complete when it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed import ReduceOp

_FOLDS: dict[ReduceOp.RedOpType, Callable[[Tensor, Tensor], Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}


def can_fold(op: ReduceOp.RedOpType) -> bool:
    """Return True if a rank can reduce its own tensors with this operation."""
    return op in _FOLDS


def fold(tensors: Sequence[Tensor], op: ReduceOp.RedOpType) -> None:
    """Reduce a rank's tensors into the first, in list order."""
    total = tensors[0].detach()
    for tensor in tensors[1:]:
        total = _FOLDS[op](total, tensor.detach())
    _write(tensors[0], total)


def spread(source: Tensor, targets: Sequence[Tensor]) -> None:
    """Copy a tensor into others, invisibly to autograd."""
    for target in targets:
        if target is not source:
            _write(target, source.detach())


def _write(target: Tensor, source: Tensor) -> None:
    if target.is_sparse:  # Has no fixed memory behind `data`: copy_ replaces its values.
        with torch.no_grad():
            target.copy_(source)
    else:
        target.data.copy_(source)


def by_input(row: Sequence[Tensor], count: int) -> list[Tensor]:
    """Reorder outputs from member-major to input-major."""
    return [tensor for index in range(count) for tensor in row[index::count]]
