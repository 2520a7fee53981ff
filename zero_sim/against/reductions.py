"""Dtypes in which gradients are reduced, compared with those that the script's settings declare.

Declared are the dtypes of the params, the dtype of a communication hook that compresses, and
`reduce_dtype` of a mixed-precision policy. A narrower dtype is a note: it may be meant, and float64
hides it.

[Note: reductions of gradients]
Those of a backward, and others whose elements are as many as a param has, or more than any has.
Losses and counts for a log are smaller.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ReduceOp
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from zero_sim.against.capture import RankCapture
from zero_sim.against.native_dtypes import native
from zero_sim.against.points import dtype_name
from zero_sim.sim.call import Call
from zero_sim.sim.log import CollectiveRecord

_KINDS = frozenset({"all_reduce", "reduce", "reduce_scatter"})
_SUMS = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM)
_COMPRESSING = {"fp16_compress_hook": torch.float16, "bf16_compress_hook": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class _Rank:
    """Facts of one rank's modules."""

    roots: int
    counts: frozenset[int]
    """Elements of each param that has more than one."""
    dtypes: frozenset[torch.dtype]
    """What params and settings declare."""


class Reductions:
    """The reductions of all ranks of one run that are narrower than declared."""

    def __init__(self) -> None:
        self.narrow: dict[str, tuple[torch.dtype, torch.dtype]] = {}
        """By call in words: the dtype of the reduction, and the widest dtype declared."""
        self._ranks: dict[int, _Rank] = {}

    def called(self, record: CollectiveRecord, call: Call, capture: RankCapture) -> None:
        """Look at a reduction by a rank whose modules a capture knows."""
        if call.kind not in _KINDS or call.reduce_op not in _SUMS or not capture.names.roots:
            return
        dtypes = {native(each) for each in call.inputs if each.is_floating_point()}
        known = self._ranks.get(record.rank)
        if known is None or known.roots != len(capture.names.roots):
            known = self._ranks[record.rank] = _facts_of(capture)
        if not known.dtypes or not (capture.is_in_backward or _is_of_gradients(call, known)):
            return
        widest = min(known.dtypes, key=_epsilon)
        for dtype in dtypes:
            if all(_epsilon(dtype) > _epsilon(each) for each in known.dtypes):
                self.narrow.setdefault(f"{record.kind} at {record.site}", (dtype, widest))

    @property
    def notes(self) -> tuple[str, ...]:
        """What is narrower than declared, in words."""
        if not self.narrow:
            return ()
        place, (dtype, declared) = next(iter(self.narrow.items()))
        more = f", and at {len(self.narrow) - 1} more places" if len(self.narrow) > 1 else ""
        return (
            f"gradients are reduced in {dtype_name(dtype)}, and params and settings declare "
            f"{dtype_name(declared)}: {place}{more}. If it is meant, declare it, such as by "
            "`reduce_dtype`; float64 hides what it loses.",
        )


def _is_of_gradients(call: Call, known: _Rank) -> bool:
    largest = max(known.counts, default=0)
    return any(each.numel() in known.counts or each.numel() > largest > 0 for each in call.inputs)


def _facts_of(capture: RankCapture) -> _Rank:
    params = [param for _, param in capture.names.params() if param.is_floating_point()]
    dtypes: set[torch.dtype] = set()
    for param in params:
        local: Any = param.to_local() if hasattr(param, "to_local") else param
        dtypes.add(native(local))
    for root in capture.names.roots:
        for module in root.modules():
            dtypes.update(_of_settings(module))
    counts = frozenset(param.numel() for param in params if param.numel() > 1)
    return _Rank(len(capture.names.roots), counts, frozenset(dtypes))


def _of_settings(module: Module) -> Iterator[torch.dtype]:
    policies: list[Any] = []
    if isinstance(module, FSDPModule):
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
