"""Several tensors a rank in one call: the form of a process that has several devices.

gloo takes it, whatever the devices are. Here it is the call with one tensor, before and after which
the rank's tensors are brought together in its own turn; so it has come to its end when it returns.
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
    """Whether tensors of one rank can be brought together by a reduction."""
    return op in _FOLDS


def fold(tensors: Sequence[Tensor], op: ReduceOp.RedOpType) -> None:
    """Reduce a rank's tensors into the first of them, one after another."""
    total = tensors[0].detach()
    for tensor in tensors[1:]:
        total = _FOLDS[op](total, tensor.detach())
    _write(tensors[0], total)


def spread(source: Tensor, targets: Sequence[Tensor]) -> None:
    """Copy a tensor into others, unseen by autograd."""
    for target in targets:
        if target is not source:
            _write(target, source.detach())


def _write(target: Tensor, source: Tensor) -> None:
    if target.is_sparse:  # Which has no memory but what is written to it last.
        with torch.no_grad():
            target.copy_(source)
    else:
        target.data.copy_(source)


def by_input(row: Sequence[Tensor], count: int) -> list[Tensor]:
    """Outputs that lie by member and then by input, as they lie by input and then by member."""
    return [tensor for index in range(count) for tensor in row[index::count]]
