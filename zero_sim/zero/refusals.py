"""Checks that refuse modules and optimizers that cannot be trained. They change no value.

Only elementwise optimizers can be sharded, because they cannot distinguish a fragment from a param.
In master and state, each new element depends only on the same element of master, state and
gradient, and on numbers that all ranks share. An element's rounding must not depend on its position
in a tensor either, which excludes fused CPU kernels and 16-bit state.
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
"""Elementwise optimizers, in for-loop and foreach form. Subclasses are excluded because they may
override the step."""

_NOT_ELEMENTWISE: Final = frozenset({"Adafactor", "LBFGS", "Muon", "SparseAdam"})


@runtime_checkable
class Attached(Protocol):
    """An optimizer that is prepared for fragments and gathers the other values that it needs."""

    def attach(self, optimizer: Any) -> None:
        """Receive the `DistributedOptimizer` around this inner optimizer."""


def check_optimizer(inner: Optimizer, *, declared: bool) -> None:
    """Refuse an optimizer that may step a fragment differently from the whole param.

    Args:
        inner: The optimizer.
        declared: True if the caller guarantees that an unknown optimizer is elementwise.

    Raises:
        UsageError: If the optimizer is fused, not elementwise, or unknown and not declared.
    """
    cls = type(inner)
    names = {base.__name__ for base in cls.__mro__ if base.__module__.startswith("torch.optim")}
    if names & _NOT_ELEMENTWISE:  # by torch's class names, subclasses included
        raise UsageError(
            f"expected an elementwise optimizer, got {cls.__name__}, which updates an element "
            f"from others that may be on another rank. Use AdamW, Adam or SGD, or an "
            f"optimizer with attach()."
        )
    # The exact class, because a subclass may override step().
    if cls not in ELEMENTWISE and not isinstance(inner, Attached) and not declared:
        known = ", ".join(sorted(known.__name__ for known in ELEMENTWISE))
        raise UsageError(
            f"expected an optimizer known to be elementwise ({known}), got {cls.__name__}. "
            f"If it updates each element without reading others, "
            f"pass DistributedOptimizer(..., elementwise=True)."
        )
    if any(group.get("fused") for group in inner.param_groups):
        raise UsageError(
            f"expected fused=False, got {cls.__name__} with fused=True. The fused CPU kernels "
            f"round the vector body and the scalar tail of a tensor differently, so the result "
            f"would depend on shard boundaries. Pass foreach=True."
        )


def check_groups(inner: Optimizer, *, handed: Sequence[Sequence[Tensor]]) -> None:
    """Refuse an optimizer that does not step exactly the given masters, group by group.

    Raises:
        UsageError: If its groups, or the params in them, differ from `handed`.
    """
    groups = [group["params"] for group in inner.param_groups]
    if len(groups) != len(handed):
        raise UsageError(
            f"expected an optimizer with {len(handed)} param groups, as passed to optim_factory, "
            f"got {len(groups)} from {type(inner).__name__}. Pass group_of= for groups: a factory "
            f"sees only this rank's fragments, so it cannot split them alike on all ranks."
        )
    for index, (got, expected) in enumerate(zip(groups, handed, strict=True)):
        # By identity, because the optimizer would step a cast or clone instead of the master.
        if [id(tensor) for tensor in got] != [id(tensor) for tensor in expected]:
            raise UsageError(
                f"expected {type(inner).__name__} to step the {len(expected)} masters passed to "
                f"optim_factory in param group {index}, in that order, got {len(got)} tensors, "
                f"with some different. Pass the masters on unchanged, without a cast."
            )


def check_state(state: object, *, key: object, master: Tensor, param: str) -> None:
    """Refuse a state tensor that sharding would change.

    Args:
        state: A value in the optimizer's state.
        key: Its name.
        master: The master with this state.
        param: The param's name.

    Raises:
        UsageError: If it is a tensor, but neither 0D nor fp32 with the master's shape.
    """
    # Numbers and 0D tensors, such as step counts, belong to the whole param.
    if not isinstance(state, Tensor) or state.dim() == 0:
        return
    if state.shape != master.shape:
        raise UsageError(
            f"expected optimizer state with one value per element or per param, got {key!r} of "
            f"shape {tuple(state.shape)} for a fragment of {master.numel()} elements of {param!r}. "
            f"Use an elementwise optimizer."
        )
    if state.dtype is not torch.float32:
        raise UsageError(
            f"expected fp32 optimizer state, got {key!r} of {state.dtype} for {param!r}. "
            f"16-bit state is not shard-invariant: its CPU kernels round the vector body and the "
            f"scalar tail of a tensor differently. Use an optimizer whose state has the dtype of "
            f"its params."
        )


def check_params(
    params: Mapping[str, nn.Parameter], *, of: str, dtypes: Collection[torch.dtype]
) -> None:
    """Refuse params that cannot be trained.

    Args:
        params: All params in a module, by name.
        of: The module's class, for messages.
        dtypes: Trainable dtypes.

    Raises:
        ModelError: If no param is trainable; if params are on two devices or share memory; or if a
            param has an unsupported dtype or layout, is not materialized, or is already wrapped.
    """
    # Frozen params too, because they are broadcast from the first rank.
    for name, param in params.items():
        if is_lazy(param) or param.is_meta:
            raise ModelError(
                f"expected params with values, got {name!r}, which has none yet. "
                f"Run a forward (lazy modules) or call to_empty() (meta device) first."
            )
    trainable = {name: param for name, param in params.items() if param.requires_grad}
    if not trainable:
        raise ModelError(
            f"expected at least one trainable param, got {of} with "
            f"{len(params)} params, all frozen. Call requires_grad_(True) on the params to train."
        )
    _check_one_device(params)
    for name, param in trainable.items():
        _check_trainable(name, param, dtypes)
    _check_no_shared_memory(params)


def _check_one_device(params: Mapping[str, nn.Parameter]) -> None:
    # Frozen params count too: forward needs all params on one device.
    first_name, first = next(iter(params.items()))
    for name, param in params.items():
        if param.device != first.device:
            raise ModelError(
                f"expected all params on one device, got {first_name!r} on {first.device} and "
                f"{name!r} on {param.device}. Call module.to({str(first.device)!r})."
            )


def _check_trainable(name: str, param: nn.Parameter, dtypes: Collection[torch.dtype]) -> None:
    if param.layout is not torch.strided:
        raise ModelError(
            f"expected dense params, got {name!r} with layout {param.layout}. Call to_dense()."
        )
    if param.dtype not in dtypes:
        expected = ", ".join(map(str, dtypes))
        raise ModelError(
            f"expected params of {expected}, got {name!r} of {param.dtype}. "
            f"Call module.to(torch.float32), or freeze the param."
        )
    # Set by a wrapper, and removed by its unwrap().
    if hasattr(param, "main_grad"):
        raise ModelError(
            f"expected a module that is not wrapped yet, got {name!r} with a main_grad. "
            f"Build a new module: hooks of two wrappers would count every gradient twice."
        )


def _check_no_shared_memory(params: Mapping[str, nn.Parameter]) -> None:
    """Refuse params that share memory, because a buffer would silently separate them."""
    spans: list[tuple[int, int, str]] = []
    for name, param in params.items():
        if param.numel() == 0 or param.layout is not torch.strided:
            continue
        # Elements from the first to the last in memory, for any strides.
        extent = 1 + sum(
            (dim - 1) * stride for dim, stride in zip(param.shape, param.stride(), strict=True)
        )
        # Bytes, because params of different dtypes can overlap too.
        start_bytes = param.data_ptr()
        spans.append((start_bytes, start_bytes + extent * param.element_size(), name))
    spans.sort()
    # Sorted by start, so one pass finds any overlap with the furthest end so far.
    reach_bytes, reach_name = 0, ""
    for start_bytes, stop_bytes, name in spans:
        if start_bytes < reach_bytes:
            raise ModelError(
                f"expected params with separate memory, got {reach_name!r} and {name!r}, "
                f"which overlap. Use the same nn.Parameter for both, or clone() one of them."
            )
        reach_bytes, reach_name = stop_bytes, name
