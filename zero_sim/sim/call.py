"""A rank's call of a collective, and the kinds of collectives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed import ReduceOp


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """A rank's call of a collective, with the arguments of torch.distributed.

    The layout of the lists depends on the kind. In a coalesced call, entry `i` of `inputs` and
    `outputs` belongs to the i-th collective. For list forms, see the kind's function in
    `zero_sim.sim.comm.collectives`.
    """

    # eq=False, because == on tensors is elementwise.

    kind: str
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor] = ()
    reduce_op: ReduceOp.RedOpType | None = None
    factor: float | Tensor | None = None
    """PREMUL_SUM's factor for this rank's contribution; None for other operations."""
    root: int = 0
    input_splits: Sequence[int] = ()
    output_splits: Sequence[int] = ()
    # Call site in the program.
    file: str = ""
    line: int = 0
    timeout_seconds: float | None = None
    """Longest wait, in simulated time. None for no limit."""


KINDS = (
    "all_reduce",
    "all_reduce_sparse",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_list",
    "all_gather",
    "all_gather_list",
    "broadcast",
    "scatter",
    "gather",
    "all_to_all_list",
    "all_to_all",
    "barrier",
)
"""All kinds of collectives; `zero_sim.sim.comm.collectives` defines each."""

REDUCE_OPS = (
    ReduceOp.SUM,
    ReduceOp.AVG,
    ReduceOp.PREMUL_SUM,
    ReduceOp.PRODUCT,
    ReduceOp.MIN,
    ReduceOp.MAX,
    ReduceOp.BAND,
    ReduceOp.BOR,
    ReduceOp.BXOR,
)
"""All reduce operations."""

SPARSE = "all_reduce_sparse"
"""Kind for sparse tensors, which have no fixed memory to lend."""

IN_PLACE = ("all_reduce", "reduce", "broadcast", SPARSE)
"""Kinds that write into their inputs, so `outputs` is empty."""
