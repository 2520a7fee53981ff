"""Integers that are summed in a float format beyond its exact range, such as counts of tokens.

The script runs in float64, where such sums are exact, so each one that its own dtype cannot hold is
known for certain: the format would round it. Sums of other numbers are rounded anyway.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from zero_sim.against.native_dtypes import native, stored
from zero_sim.against.points import dtype_name, tensors_in
from zero_sim.sim.call import Call
from zero_sim.sim.callsite import call_site, site_of
from zero_sim.sim.log import CollectiveRecord

EXACT_BELOW = {torch.bfloat16: 2**8, torch.float16: 2**11, torch.float32: 2**24}
"""Magnitude up to which a format has all integers."""
ADDITIONS = frozenset(
    {"add", "add_", "sum", "cumsum", "cumsum_", "_foreach_add_", "index_add_", "scatter_add_"}
)
"""Operations whose results are looked at."""
_REDUCTIONS = frozenset({"all_reduce", "reduce", "reduce_scatter"})


class IntegerSums:
    """Looks at the sums of all ranks of one run."""

    def __init__(self) -> None:
        self._found: dict[str, str] = {}
        """The first loss at each place, in words."""
        self._pending: dict[tuple[str, tuple[int, ...], int], dict[int, list[Tensor]]] = {}

    def added(self, rank: int, operation: str, result: Any) -> None:
        """Look at the result of an operation of `ADDITIONS`: a tensor in float64, or a list."""
        for each in tensors_in((result,)):
            dtype = native(each)
            if dtype in EXACT_BELOW and _is_whole(each):
                self._check(rank, dtype, each, operation, site=None)

    def called(self, record: CollectiveRecord, call: Call) -> None:
        """Keep what a rank gives to a sum, until all ranks have given theirs."""
        if call.kind not in _REDUCTIONS or call.reduce_op != ReduceOp.SUM:
            return
        whole = [
            each.detach().clone()
            for each in call.inputs
            if native(each) in EXACT_BELOW and _is_whole(each)
        ]
        key = record.group, record.group_ranks, record.sequence
        given = self._pending.setdefault(key, {})
        given[record.rank] = whole if len(whole) == len(call.inputs) else []
        if len(given) < len(record.group_ranks):
            return
        del self._pending[key]
        if all(given.values()):
            for like, *tensors in zip(call.inputs, *given.values(), strict=True):
                total = torch.stack(tensors).sum(0)
                self._check(record.rank, native(like), total, record.kind, site=record.site)

    def _check(
        self, rank: int, dtype: torch.dtype, sums: Tensor, operation: str, *, site: str | None
    ) -> None:
        if float(sums.abs().max()) <= EXACT_BELOW[dtype]:
            return
        rounded = sums.to(dtype).to(torch.float64)
        lost = (rounded != sums).reshape(-1)
        if not bool(lost.any()):
            return
        if site is None:
            file, line = call_site()
            if _is_of_simulator(file):
                return  # A collective, which is looked at as a whole.
            site = site_of(file, line)
        place = f"{operation} at {site}"
        first = int(lost.nonzero()[0])
        text = (
            f"integers summed in a float format beyond its exact range: {dtype_name(dtype)} has "
            f"all integers up to {EXACT_BELOW[dtype]:,}. Rank {rank}, {place}: "
            f"{float(sums.reshape(-1)[first]):,.0f} becomes "
            f"{float(rounded.reshape(-1)[first]):,.0f}. Count in integers or in a wider dtype."
        )
        self._found.setdefault(place, text)

    @property
    def notes(self) -> tuple[str, ...]:
        """The losses in words, in the order in which they were found."""
        if not self._found:
            return ()
        _, *others = self._found
        places = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
        more = f" So at {len(others)} more places: {places}." if others else ""
        return (next(iter(self._found.values())) + more,)


def _is_of_simulator(file: str) -> bool:
    """True if the simulator computes, called by the script's file."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != file:
        if frame.f_globals.get("__name__", "").startswith("zero_sim.sim."):
            return True
        frame = frame.f_back
    return False


def _is_whole(tensor: Tensor) -> bool:
    """True for finite whole numbers alone; most tensors fail by their first element."""
    if not tensor.numel() or stored(tensor) is not torch.float64:
        return False
    if tensor.layout is not torch.strided or not tensor.untyped_storage().nbytes():
        return False
    first = float(tensor.detach()[(0,) * tensor.dim()])
    if not first.is_integer():
        return False
    return bool((tensor.detach().trunc() == tensor).all()) and bool(tensor.isfinite().all())
