"""Access to torch's dispatcher. torch's private names for it stay in here."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from zero_sim.sim.call import SPARSE

_COMM_DEBUG_MODE = "torch.distributed.tensor.debug._comm_mode"

_OPERATORS = {
    "all_reduce": ("allreduce_", "allreduce_coalesced_"),
    SPARSE: ("allreduce_", "allreduce_"),
    "reduce": ("reduce_", "reduce_"),
    "broadcast": ("broadcast_", "broadcast_"),
    "reduce_scatter": ("_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"),
    "reduce_scatter_list": ("reduce_scatter_", "reduce_scatter_"),
    "all_gather": ("_allgather_base_", "allgather_into_tensor_coalesced_"),
    "all_gather_list": ("allgather_", "allgather_coalesced_"),
    "gather": ("gather_", "gather_"),
    "scatter": ("scatter_", "scatter_"),
    "all_to_all": ("alltoall_base_", "alltoall_base_"),
    "all_to_all_list": ("alltoall_", "alltoall_"),
}
"""Operators in torch's library `c10d` by kind of call, as (single, coalesced)."""

_PLAIN_DISPATCH = torch.Tensor.__torch_dispatch__


def push_mode(mode: TorchDispatchMode) -> None:
    """Push a mode that sees this thread's tensor operations before all other modes."""
    torch._C._push_on_torch_dispatch_stack(mode)


def pop_mode() -> None:
    """Pop the mode on top."""
    torch._C._pop_torch_dispatch_stack(None)


def top_mode() -> object:
    """Return the mode that sees an operation first, or None."""
    count = torch._C._len_torch_dispatch_stack()
    return torch._C._get_dispatch_stack_at(count - 1) if count else None


def modes_on_stack() -> list[Any]:
    """Return the modes on this thread's stack. The last mode sees an operation first."""
    count = torch._C._len_torch_dispatch_stack()
    return [torch._C._get_dispatch_stack_at(place) for place in range(count)]


def is_on_stack(mode: TorchDispatchMode) -> bool:
    """Return True if a mode is on this thread's stack; False while it handles an operation."""
    # By identity, because modes may define ==.
    return any(each is mode for each in modes_on_stack())


def push_mode_lowest(mode: TorchDispatchMode) -> None:
    """Push a mode that sees this thread's tensor operations after all other modes."""
    above = []
    # Stays above torch's own modes, which have fixed places at the bottom.
    while (top := top_mode()) is not None and getattr(top, "_mode_key", None) is None:
        above.append(torch._C._pop_torch_dispatch_stack(None))
    # The new mode first, then the others in their old order.
    for each in (mode, *reversed(above)):
        torch._C._push_on_torch_dispatch_stack(each)


def remove_mode(mode: TorchDispatchMode) -> None:
    """Remove a mode from the stack, wherever it is."""
    # The stack only has push and pop, so pop the modes above and push them again.
    above = []
    while is_on_stack(mode):
        popped = torch._C._pop_torch_dispatch_stack(None)
        if popped is not mode:
            above.append(popped)
    for each in reversed(above):
        torch._C._push_on_torch_dispatch_stack(each)


def autograd_node() -> str:
    """Return the name of the running autograd node or hook; empty if none."""
    node = torch._C._current_autograd_node()
    return "" if node is None else node.name().removeprefix("torch::autograd::")


def schema_of(operation: Any) -> Any:
    """Return an operation's schema; None for a higher-order operator."""
    return operation._schema if isinstance(operation, torch._ops.OpOverload) else None


def name_of(operation: Any) -> str:
    """Return an operation's name, such as `aten::add_`."""
    return operation._schema.name


def has_own_dispatch(tensor_class: type[torch.Tensor]) -> bool:
    """Return True if a tensor class handles operations itself; False for Tensor and Parameter."""
    return tensor_class.__torch_dispatch__ is not _PLAIN_DISPATCH


def is_fake(tensor_class: type[torch.Tensor]) -> bool:
    """Return True for tensors without memory, which torch uses to infer shapes.

    While FakeTensorMode is active, a mode must run their operations unchanged, because the class
    returns NotImplemented and FakeTensorMode takes over.
    """
    return issubclass(tensor_class, FakeTensor)


class _Issued:
    """A stand-in for an operator, which CommDebugMode can count."""

    def __init__(self, name: str) -> None:
        # CommDebugMode looks this attribute up in its own table of collectives.
        self._overloadpacket = getattr(torch.ops.c10d, name)
        self.__name__ = f"{name}.default"

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __repr__(self) -> str:
        return f"c10d.{self.__name__}"


# [Note: CommDebugMode] CommDebugMode counts collectives by their operators in the dispatcher.
# Functional collectives always go through the dispatcher, but collectives of `torch.distributed`
# only in a process group's C++. A simulated group has no C++, so it reports its calls to the mode.
def count_in_modes(kind: str, *, coalesced: bool) -> None:
    """Count a call in each CommDebugMode of the calling rank; see [Note: CommDebugMode]."""
    # Not imported here: if the program has not imported the mode, it cannot be active.
    module = sys.modules.get(_COMM_DEBUG_MODE)
    if module is None or kind not in _OPERATORS:
        return
    for mode in modes_on_stack():
        if isinstance(mode, module.CommDebugMode):
            mode.__torch_dispatch__(_Issued(_OPERATORS[kind][coalesced]), (), (), {})
