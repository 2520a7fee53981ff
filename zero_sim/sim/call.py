"""One rank's side of a collective, as every corner of the simulated cluster knows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed import ReduceOp


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """One rank's side of one collective, as torch.distributed handed it over; nobody changes it.

    What the lists hold depends on the kind: for a coalesced form entry `i` of `inputs` and
    `outputs` belongs to the i-th collective; for list forms see the function of the kind.
    """

    kind: str
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor] = ()
    reduce_op: ReduceOp.RedOpType | None = None
    factor: float | Tensor | None = None
    """What PREMUL_SUM multiplies this rank's contribution by."""
    root: int = 0
    input_splits: Sequence[int] = ()
    output_splits: Sequence[int] = ()
    file: str = ""
    line: int = 0
    timeout_seconds: float | None = None
    """How long a wait for it may take, in simulated time."""


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
"""All kinds of collectives; what each does is in `zero_sim.sim.comm.collectives`."""

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
"""The operations that a reduction may name."""

SPARSE = "all_reduce_sparse"
"""The kind whose tensors are sparse: they have no memory of a fixed size that could be lent."""

IN_PLACE = ("all_reduce", "reduce", "broadcast", SPARSE)
"""Kinds that write what they read, so that `outputs` is empty."""
