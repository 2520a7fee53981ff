"""Integers that are summed in a float format beyond its exact range, such as counts of tokens.

The script runs in float64, where such sums are exact, so each one that its own dtype cannot hold is
known for certain: the format would round it. Sums of other numbers are rounded anyway.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from zero_sim.against.native_dtypes import native, stored
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


@dataclass(frozen=True, kw_only=True, slots=True)
class LostInteger:
    """A sum of integers that its dtype cannot hold."""

    dtype: torch.dtype
    rank: int
    place: str
    """The operation or the collective, with the script's line."""
    exact: float
    rounded: float

    @property
    def text(self) -> str:
        """The loss in words."""
        name = str(self.dtype).removeprefix("torch.")
        return (
            f"integers summed in a float format beyond its exact range: {name} has all integers "
            f"up to {EXACT_BELOW[self.dtype]:,}. Rank {self.rank}, {self.place}: "
            f"{self.exact:,.0f} becomes {self.rounded:,.0f}. Count in integers or in a wider dtype."
        )


class IntegerSums:
    """Looks at the sums of all ranks of one run."""

    def __init__(self) -> None:
        self.found: dict[str, LostInteger] = {}
        """The first loss at each place."""
        self._pending: dict[tuple[str, tuple[int, ...], int], dict[int, list[Tensor]]] = {}

    def added(self, rank: int, operation: str, result: Any) -> None:
        """Look at the result of an operation of `ADDITIONS`.

        Args:
            rank: World rank.
            operation: Its name.
            result: A tensor stored in float64, or a list of them.
        """
        for each in result if isinstance(result, (list, tuple)) else (result,):
            dtype = native(each) if isinstance(each, Tensor) else None
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
        dtypes = [native(each) for each in call.inputs]
        for dtype, total in zip(dtypes, _totals(given), strict=False):
            if dtype in EXACT_BELOW:
                self._check(record.rank, dtype, total, record.kind, site=record.site)

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
        self.found.setdefault(
            place,
            LostInteger(
                dtype=dtype,
                rank=rank,
                place=place,
                exact=float(sums.reshape(-1)[first]),
                rounded=float(rounded.reshape(-1)[first]),
            ),
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """The losses in words, in the order in which they were found."""
        if not self.found:
            return ()
        first, *others = self.found.values()
        more = f" So at {len(others)} more places: {_listed(others)}." if others else ""
        return (first.text + more,)


def _listed(losses: Sequence[LostInteger]) -> str:
    return ", ".join(each.place for each in losses[:3]) + (", ..." if len(losses) > 3 else "")


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


def _totals(given: Mapping[int, Sequence[Tensor]]) -> list[Tensor]:
    """Sums over ranks, if each rank gave whole numbers."""
    lists = list(given.values())
    if not all(lists):
        return []
    return [torch.stack(list(each)).sum(0) for each in zip(*lists, strict=True)]
