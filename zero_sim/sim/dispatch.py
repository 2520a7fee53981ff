"""Questions to torch's dispatcher; torch's private names for it live here.

[Note: CommDebugMode]
It counts collectives by the operators that they are to the dispatcher. Functional collectives pass
it as operators anywhere. Those of `torch.distributed` become operators only in a process group's
C++, which a simulated group has none of; so it is told of them.
"""

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
"""Operators of torch's library `c10d` for each kind of call: of one tensor, and coalesced."""

_PLAIN_DISPATCH = torch.Tensor.__torch_dispatch__


def push_mode(mode: TorchDispatchMode) -> None:
    """Let a mode see every tensor operation of this thread, before those that were there."""
    torch._C._push_on_torch_dispatch_stack(mode)


def pop_mode() -> None:
    """Take the mode off that was pushed last."""
    torch._C._pop_torch_dispatch_stack(None)


def top_mode() -> object:
    """The mode that sees an operation first, or None."""
    count = torch._C._len_torch_dispatch_stack()
    return torch._C._get_dispatch_stack_at(count - 1) if count else None


def modes_on_stack() -> list[Any]:
    """The modes that see the operations of this thread, the first to see one last."""
    count = torch._C._len_torch_dispatch_stack()
    return [torch._C._get_dispatch_stack_at(place) for place in range(count)]


def is_on_stack(mode: TorchDispatchMode) -> bool:
    """Whether a mode sees the operations of this thread; not while it handles one itself."""
    return any(each is mode for each in modes_on_stack())


def push_mode_lowest(mode: TorchDispatchMode) -> None:
    """Let a mode see every tensor operation of this thread, after those that were there."""
    above = []
    # Modes of torch's own have places below all others, and are not reached by a plain push.
    while (top := top_mode()) is not None and getattr(top, "_mode_key", None) is None:
        above.append(torch._C._pop_torch_dispatch_stack(None))
    for each in (mode, *reversed(above)):
        torch._C._push_on_torch_dispatch_stack(each)


def remove_mode(mode: TorchDispatchMode) -> None:
    """Take a mode off the stack, wherever it is in it."""
    above = []
    while is_on_stack(mode):
        popped = torch._C._pop_torch_dispatch_stack(None)
        if popped is not mode:
            above.append(popped)
    for each in reversed(above):
        torch._C._push_on_torch_dispatch_stack(each)


def autograd_node() -> str:
    """Name of the autograd node that this thread runs or whose hook it runs; empty for none."""
    node = torch._C._current_autograd_node()
    return "" if node is None else node.name().removeprefix("torch::autograd::")


def schema_of(operation: Any) -> Any:
    """The schema of an operation as a mode gets it; None for a higher-order operator."""
    return operation._schema if isinstance(operation, torch._ops.OpOverload) else None


def name_of(operation: Any) -> str:
    """An operation's name, such as `aten::add_`."""
    return operation._schema.name


def has_own_dispatch(tensor_class: type[torch.Tensor]) -> bool:
    """Whether a class of tensors runs its operations itself; Tensor and Parameter do not."""
    return tensor_class.__torch_dispatch__ is not _PLAIN_DISPATCH


def is_fake(tensor_class: type[torch.Tensor]) -> bool:
    """Whether it is a class of tensors without memory, with which torch works out shapes.

    While its own mode is at work it leaves operations to whoever called it, and must be obeyed.
    """
    return issubclass(tensor_class, FakeTensor)


class _Issued:
    """An operator that has been carried out elsewhere."""

    def __init__(self, name: str) -> None:
        self._overloadpacket = getattr(torch.ops.c10d, name)
        self.__name__ = f"{name}.default"

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __repr__(self) -> str:
        return f"c10d.{self.__name__}"


def tell_modes(kind: str, *, coalesced: bool) -> None:
    """Let each CommDebugMode that the calling rank has entered count a call; see the note above.

    Args:
        kind: The call's kind.
        coalesced: Whether it has several tensors.
    """
    module = sys.modules.get(_COMM_DEBUG_MODE)
    if module is None or kind not in _OPERATORS:
        return
    for mode in modes_on_stack():
        if isinstance(mode, module.CommDebugMode):
            mode.__torch_dispatch__(_Issued(_OPERATORS[kind][coalesced]), (), (), {})
