"""One rank's side of a collective, as the whole simulated cluster passes it on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed import ReduceOp


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """One rank's side of one collective, with the arguments of torch.distributed. Never changed.

    The layout of the lists depends on the kind. In a coalesced call, entry `i` of `inputs` and
    `outputs` belongs to the i-th collective; for list forms, see the kind's function in
    `zero_sim.sim.comm.collectives`.
    """

    # Compared by identity (`eq=False`): == on tensors is elementwise.

    kind: str
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor] = ()
    reduce_op: ReduceOp.RedOpType | None = None
    factor: float | Tensor | None = None
    """Factor that PREMUL_SUM multiplies this rank's contribution by."""
    root: int = 0
    input_splits: Sequence[int] = ()
    output_splits: Sequence[int] = ()
    file: str = ""
    # Call site in the program.
    line: int = 0
    timeout_seconds: float | None = None
    """Longest wait for the call, in seconds of simulated time. None for no limit."""


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
"""Operations that a reduction can use."""

SPARSE = "all_reduce_sparse"
"""Kind with sparse tensors, which have no memory of fixed size to lend."""

IN_PLACE = ("all_reduce", "reduce", "broadcast", SPARSE)
"""Kinds that write their inputs, so `outputs` is empty."""
