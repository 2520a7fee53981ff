"""Precision faults that float64 hides: integers that a format rounds, and narrow reductions.

[Note: integers]
Integer sums, such as token counts, are exact in float64. So a sum that the script's own dtype
cannot represent is certainly wrong. Sums of other values are rounded in any case.

[Note: reductions of gradients]
The dtype of a gradient reduction is compared with declared dtypes: of params, of a compressing
communication hook, and `reduce_dtype` in a mixed-precision policy. A narrower dtype causes a note,
because it may be intended. A reduction is taken for a gradient reduction if it runs in a backward,
has as many elements as a param, or has more than the largest. Losses and logged counts are smaller.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from zero_sim.against.capture import RankCapture
from zero_sim.against.native_dtypes import native, stored
from zero_sim.against.points import dtype_name, tensors_in
from zero_sim.sim.call import Call
from zero_sim.sim.callsite import call_site, site_of
from zero_sim.sim.log import CollectiveRecord

# 2**(mantissa bits + 1).
EXACT_BELOW = {torch.bfloat16: 2**8, torch.float16: 2**11, torch.float32: 2**24}
"""Magnitude up to which a format represents all integers."""
ADDITIONS = frozenset(
    {"add", "add_", "sum", "cumsum", "cumsum_", "_foreach_add_", "index_add_", "scatter_add_"}
)
"""Operations whose results are checked."""
_REDUCTIONS = frozenset({"all_reduce", "reduce", "reduce_scatter"})
_SUMS = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM)
# DDP's built-in compressing hooks, by name.
_COMPRESSING = {"fp16_compress_hook": torch.float16, "bf16_compress_hook": torch.bfloat16}


class IntegerSums:
    """Integer sums on all ranks."""

    def __init__(self) -> None:
        self._found: dict[str, str] = {}
        """First lossy sum at each call site, in words."""
        self._pending: dict[tuple[str, tuple[int, ...], int], dict[int, list[Tensor]]] = {}

    def added(self, rank: int, operation: str, result: Any) -> None:
        """Check an `ADDITIONS` operation's result: a float64 tensor or a list."""
        for each in tensors_in((result,)):
            dtype = native(each)
            if dtype in EXACT_BELOW and _is_whole(each):
                self._check(rank, dtype, each, operation, site=None)

    def called(self, record: CollectiveRecord, call: Call) -> None:
        """Collect ranks' contributions to a sum, and check it when all have come."""
        if call.kind not in _REDUCTIONS or call.reduce_op != ReduceOp.SUM:
            return
        # Clones, because the collective may write in place.
        whole = [
            each.detach().clone()
            for each in call.inputs
            if native(each) in EXACT_BELOW and _is_whole(each)
        ]
        # The call's number in its group identifies the collective.
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
        # Small sums are exact, and this is the common case.
        if float(sums.abs().max()) <= EXACT_BELOW[dtype]:
            return
        rounded = sums.to(dtype).to(torch.float64)
        lost = (rounded != sums).reshape(-1)
        if not bool(lost.any()):
            return
        if site is None:
            file, line = call_site()
            if _is_of_simulator(file):
                return  # A collective's own addition. `called` checks the whole sum.
            site = site_of(file, line)
        place = f"{operation} at {site}"
        first = int(lost.nonzero()[0])
        text = (
            f"integers summed in a float format beyond its exact range: {dtype_name(dtype)} has "
            f"all integers up to {EXACT_BELOW[dtype]:,}. Rank {rank}, {place}: "
            f"{float(sums.reshape(-1)[first]):,.0f} becomes "
            f"{float(rounded.reshape(-1)[first]):,.0f}. Count in integers or in a wider dtype."
        )
        # Only the first at each place, because a loop repeats it in each step.
        self._found.setdefault(place, text)

    @property
    def notes(self) -> tuple[str, ...]:
        """Note about lossy sums; empty if none was found."""
        if not self._found:
            return ()
        _, *others = self._found
        places = ", ".join(others[:3]) + (", ..." if len(others) > 3 else "")
        # One note for all, because one mistake often shows in many places.
        more = f" Also at {len(others)} more places: {places}." if others else ""
        return (next(iter(self._found.values())) + more,)


def _is_of_simulator(file: str) -> bool:
    """Return True if simulator code is computing for the script's file."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != file:
        if frame.f_globals.get("__name__", "").startswith("zero_sim.sim."):
            return True
        frame = frame.f_back
    return False


def _is_whole(tensor: Tensor) -> bool:
    """Return True if all values are finite integers."""
    if not tensor.numel() or stored(tensor) is not torch.float64:
        return False
    if tensor.layout is not torch.strided or not tensor.untyped_storage().nbytes():
        return False
    # Most tensors fail at their first element, which is cheap to read.
    first = float(tensor.detach()[(0,) * tensor.dim()])
    if not first.is_integer():
        return False
    return bool((tensor.detach().trunc() == tensor).all()) and bool(tensor.isfinite().all())


@dataclass(frozen=True, slots=True)
class _Rank:
    """Facts about a rank's modules."""

    roots: int
    counts: frozenset[int]
    """Element counts of params with more than one element."""
    dtypes: frozenset[torch.dtype]
    """Dtypes that params and settings declare."""


class Reductions:
    """Reductions that are narrower than declared, on all ranks."""

    def __init__(self) -> None:
        self.narrow: dict[str, tuple[torch.dtype, torch.dtype]] = {}
        """Reduction dtype and widest declared dtype, by description of the call."""
        self._ranks: dict[int, _Rank] = {}

    def called(self, record: CollectiveRecord, call: Call, capture: RankCapture) -> None:
        """Check a reduction by a rank with known modules."""
        if call.kind not in _REDUCTIONS or call.reduce_op not in _SUMS or not capture.names.roots:
            return
        dtypes = {native(each) for each in call.inputs if each.is_floating_point()}
        known = self._ranks.get(record.rank)
        # Compute again only if the rank has a new outermost module.
        if known is None or known.roots != len(capture.names.roots):
            known = self._ranks[record.rank] = _facts_of(capture)
        sizes, largest = {each.numel() for each in call.inputs}, max(known.counts, default=0)
        # See [Note: reductions of gradients].
        is_of_gradients = sizes & known.counts or max(sizes, default=0) > largest > 0
        if not known.dtypes or not (capture.is_in_backward or is_of_gradients):
            return
        # The smallest epsilon means the widest mantissa.
        widest = min(known.dtypes, key=_epsilon)
        for dtype in dtypes:
            if all(_epsilon(dtype) > _epsilon(each) for each in known.dtypes):
                self.narrow.setdefault(f"{record.kind} at {record.site}", (dtype, widest))

    @property
    def notes(self) -> tuple[str, ...]:
        """Note about narrow reductions; empty if none was found."""
        if not self.narrow:
            return ()
        place, (dtype, declared) = next(iter(self.narrow.items()))
        more = f", and at {len(self.narrow) - 1} more places" if len(self.narrow) > 1 else ""
        return (
            f"gradients are reduced in {dtype_name(dtype)}, but params and settings declare "
            f"{dtype_name(declared)}: {place}{more}. If you intend this, declare it, such as "
            "by `reduce_dtype`, because float64 hides the loss.",
        )


def _facts_of(capture: RankCapture) -> _Rank:
    params = [param for _, param in capture.names.params() if param.is_floating_point()]
    dtypes: set[torch.dtype] = set()
    for param in params:
        local: Any = param.to_local() if hasattr(param, "to_local") else param
        dtypes.add(native(local))
    for root in capture.names.roots:
        for module in root.modules():
            dtypes.update(_of_settings(module))
    # A count of 1 would match any reduction of a loss.
    counts = frozenset(param.numel() for param in params if param.numel() > 1)
    return _Rank(len(capture.names.roots), counts, frozenset(dtypes))


def _of_settings(module: Module) -> Iterator[torch.dtype]:
    policies: list[Any] = []
    if isinstance(module, FSDPModule):
        # FSDP2 keeps its policy in the state, the others on the module.
        policies.append(module._get_fsdp_state()._mp_policy)
    elif isinstance(module, FullyShardedDataParallel):
        policies.append(module.mixed_precision)
    elif isinstance(module, DistributedDataParallel):
        policies.append(module.mixed_precision)
        for hook, _ in module._comm_hooks:
            known = _COMPRESSING.get(getattr(hook, "__name__", ""))
            if known is not None:
                yield known
    for policy in policies:
        if policy is not None and policy.reduce_dtype is not None:
            yield policy.reduce_dtype


def _epsilon(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps
