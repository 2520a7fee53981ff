"""torch's CommDebugMode, which counts collectives by the operators that they are to the dispatcher.

Functional collectives pass it as operators anywhere. Those of `torch.distributed` become operators
only in a process group's C++, which a simulated group has none of; so it tells the mode itself.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from zero_sim.sim.call import SPARSE
from zero_sim.sim.dispatch import modes_on_stack

_MODULE = "torch.distributed.tensor.debug._comm_mode"

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
    """Let each CommDebugMode that the calling rank has entered count a call.

    Args:
        kind: The call's kind.
        coalesced: Whether it has several tensors.
    """
    module = sys.modules.get(_MODULE)
    if module is None or kind not in _OPERATORS:
        return
    for mode in modes_on_stack():
        if isinstance(mode, module.CommDebugMode):
            mode.__torch_dispatch__(_Issued(_OPERATORS[kind][coalesced]), (), (), {})
