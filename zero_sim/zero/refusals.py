"""Refusals of modules and optimizers that cannot be trained; no value depends on them.

An optimizer may be sharded if it is elementwise, so that it cannot tell a fragment from a param: if
each element of master and state follows from the same element of master, state and gradient and
from numbers that all ranks share. And it must round each element alike wherever it stands in a
tensor, which rules out fused CPU kernels and 16-bit state.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from zero_sim.errors import ModelError, UsageError

ELEMENTWISE: Final[frozenset[type[Optimizer]]] = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)
"""Classes known to be elementwise, in for-loop and foreach form. Not their subclasses, which may
override the step."""

_NOT_ELEMENTWISE: Final = frozenset({"Adafactor", "LBFGS", "Muon", "SparseAdam"})


@runtime_checkable
class Attached(Protocol):
    """An optimizer that knows that it gets fragments, and gathers what it needs besides."""

    def attach(self, optimizer: Any) -> None:
        """Take the `DistributedOptimizer` that it is the inner optimizer of."""


def check_optimizer(inner: Optimizer, *, declared: bool) -> None:
    """Refuse an optimizer whose update of a fragment is not that of the whole param.

    Args:
        inner: The optimizer.
        declared: Whether the caller vouches that an optimizer of an unknown class is elementwise.

    Raises:
        UsageError: If the optimizer is not elementwise, not known to be, or fused.
    """
    cls = type(inner)
    names = {base.__name__ for base in cls.__mro__ if base.__module__.startswith("torch.optim")}
    if names & _NOT_ELEMENTWISE:  # by what torch calls them
        raise UsageError(
            f"expected an elementwise optimizer, got {cls.__name__}, whose update of one "
            f"element depends on others that may lie on another rank. Try AdamW, Adam or SGD, or "
            f"one that gathers what it needs."
        )
    if cls not in ELEMENTWISE and not isinstance(inner, Attached) and not declared:
        known = ", ".join(sorted(known.__name__ for known in ELEMENTWISE))
        raise UsageError(
            f"expected an optimizer known to be elementwise ({known}), got {cls.__name__}. "
            f"If its update of one element depends on no other element, "
            f"try DistributedOptimizer(..., elementwise=True)."
        )
    if any(group.get("fused") for group in inner.param_groups):
        raise UsageError(
            f"expected fused=False, got {cls.__name__} with fused=True. The fused CPU kernels "
            f"round the vector body and the scalar tail of a tensor differently, so the result "
            f"would depend on where shards are cut. Try foreach=True."
        )


def check_groups(inner: Optimizer, *, handed: Sequence[Sequence[Tensor]]) -> None:
    """Refuse an optimizer that does not step exactly the masters it was handed, group by group.

    Raises:
        UsageError: If it has other groups, or other params in them.
    """
    groups = [group["params"] for group in inner.param_groups]
    if len(groups) != len(handed):
        raise UsageError(
            f"expected an optimizer of {len(handed)} param groups, as handed to optim_factory, "
            f"got {len(groups)} from {type(inner).__name__}. A rank sees only fragments, so a "
            f"factory cannot split them alike on all ranks; try group_of= for groups."
        )
    for index, (got, expected) in enumerate(zip(groups, handed, strict=True)):
        if [id(tensor) for tensor in got] != [id(tensor) for tensor in expected]:
            raise UsageError(
                f"expected {type(inner).__name__} to step the {len(expected)} masters handed to "
                f"optim_factory in param group {index}, in that order, got {len(got)} tensors, "
                f"not all of them the same. Try passing them on as they are, without a cast."
            )


def check_state(state: object, *, key: object, master: Tensor, param: str) -> None:
    """Refuse a state tensor that sharding would change.

    Args:
        state: A value of the optimizer's state; what is no tensor passes.
        key: Its name.
        master: The master it belongs to.
        param: Name of the param.

    Raises:
        UsageError: If it is neither 0D nor an fp32 value for each element of the master.
    """
    if not isinstance(state, Tensor) or state.dim() == 0:
        return
    if state.shape != master.shape:
        raise UsageError(
            f"expected optimizer state of one value an element or a param, got {key!r} of shape "
            f"{tuple(state.shape)} for a fragment of {master.numel()} elements of {param!r}. "
            f"Try an elementwise optimizer."
        )
    if state.dtype is not torch.float32:
        raise UsageError(
            f"expected fp32 optimizer state, got {key!r} of {state.dtype} for {param!r}. "
            f"16-bit state is not shard-invariant: its CPU kernels round the vector body and the "
            f"scalar tail of a tensor differently. Try an optimizer that keeps its state in the "
            f"dtype of its params."
        )


def check_params(
    params: Mapping[str, nn.Parameter], *, of: str, dtypes: Collection[torch.dtype]
) -> None:
    """Refuse params that cannot be trained.

    Args:
        params: All of a module, by name.
        of: Class of the module, as errors name it.
        dtypes: Dtypes that can be trained.

    Raises:
        ModelError: If none is trainable; if params lie on two devices or share memory; if one has a
            dtype or layout that cannot be trained, is not materialized, or is already wrapped.
    """
    for name, param in params.items():
        if is_lazy(param) or param.is_meta:
            raise ModelError(
                f"expected params with values, got {name!r}, which has none yet. "
                f"Try a forward pass (lazy modules) or to_empty() (meta device) first."
            )
    trainable = {name: param for name, param in params.items() if param.requires_grad}
    if not trainable:
        raise ModelError(
            f"expected at least one trainable param, got {of} with "
            f"{len(params)} params, all frozen. Try requires_grad_(True) on what is to be trained."
        )
    _check_one_device(params)
    for name, param in trainable.items():
        _check_trainable(name, param, dtypes)
    _check_no_shared_memory(params)


def _check_one_device(params: Mapping[str, nn.Parameter]) -> None:
    first_name, first = next(iter(params.items()))
    for name, param in params.items():
        if param.device != first.device:
            raise ModelError(
                f"expected all params on one device, got {first_name!r} on {first.device} and "
                f"{name!r} on {param.device}. Try module.to({str(first.device)!r})."
            )


def _check_trainable(name: str, param: nn.Parameter, dtypes: Collection[torch.dtype]) -> None:
    if param.layout is not torch.strided:
        raise ModelError(
            f"expected dense params, got {name!r} with layout {param.layout}. Try to_dense()."
        )
    if param.dtype not in dtypes:
        expected = ", ".join(map(str, dtypes))
        raise ModelError(
            f"expected params of {expected}, got {name!r} of {param.dtype}. "
            f"Try module.to(torch.float32), or freeze the param."
        )
    if hasattr(param, "main_grad"):
        raise ModelError(
            f"expected a module that is not wrapped yet, got {name!r} with a main_grad. "
            f"Its hooks would count every gradient twice; try a fresh module."
        )


def _check_no_shared_memory(params: Mapping[str, nn.Parameter]) -> None:
    """Refuse two params in one memory: a buffer would silently give each its own."""
    spans: list[tuple[int, int, str]] = []
    for name, param in params.items():
        if param.numel() == 0 or param.layout is not torch.strided:
            continue
        extent = 1 + sum(
            (dim - 1) * stride for dim, stride in zip(param.shape, param.stride(), strict=True)
        )
        start_bytes = param.data_ptr()
        spans.append((start_bytes, start_bytes + extent * param.element_size(), name))
    spans.sort()
    reach_bytes, reach_name = 0, ""
    for start_bytes, stop_bytes, name in spans:
        if start_bytes < reach_bytes:
            raise ModelError(
                f"expected params with memory of their own, got {reach_name!r} and {name!r}, "
                f"which overlap. Try one nn.Parameter for both, or clone() one of them."
            )
        reach_bytes, reach_name = stop_bytes, name
