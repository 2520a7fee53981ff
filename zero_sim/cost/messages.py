"""Messages: the calls of a rank's step by what they do, control messages apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from zero_sim.cost.forms import ParamSize

if TYPE_CHECKING:
    from zero_sim.cost.volume import StepWindow
    from zero_sim.sim import CollectiveRecord

_CONTROL_ELEMS = 16
_CONTROL_ELEMS_A_PARAM = 4

_SUMS = ("SUM", "AVG", "PREMUL_SUM")
_REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_list")
_GATHERING = ("all_gather", "all_gather_list", "broadcast")


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldSize:
    """A tensor of a module as far as it may be moved."""

    elems: int
    row_elems: int
    """Of a row of its dim 0; 1 without dims, or without elements."""
    elem_bytes: int


def held_sizes_of(module: nn.Module) -> tuple[HeldSize, ...]:
    """All params and buffers of a module, trained or not; before anybody wrapped it."""
    tensors = (*module.parameters(), *module.buffers())
    return tuple(
        HeldSize(
            elems=tensor.numel(),
            row_elems=tensor[0].numel() if tensor.dim() and tensor.numel() else 1,
            elem_bytes=tensor.element_size(),
        )
        for tensor in tensors
    )


def control_elems(sizes: Sequence[HeldSize | ParamSize]) -> int:
    """Elements of a control message at most: a few numbers, or a few a param, as norms are."""
    return _CONTROL_ELEMS + _CONTROL_ELEMS_A_PARAM * len(sizes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Messages:
    """What one rank called in one step; of floating-point numbers, as params and gradients are."""

    reduced: tuple[CollectiveRecord, ...]
    """Sums over ranks that are no control messages."""
    gathered: tuple[CollectiveRecord, ...]
    """What brings a rank what others have, and is no control message."""


def messages_of(
    window: StepWindow, records: Sequence[CollectiveRecord], *, control: int
) -> Messages:
    """Sort the calls of a step.

    Args:
        window: Where they lie.
        records: All calls of the world.
        control: Elements of a control message at most.
    """
    reduced: list[CollectiveRecord] = []
    gathered: list[CollectiveRecord] = []
    for record in window.records(records):
        if "float" not in record.dtype or max(record.elems, record.output_elems) <= control:
            continue
        if record.kind in _REDUCING and record.detail.partition(" ")[0] in _SUMS:
            reduced.append(record)
        elif record.kind in _GATHERING:
            gathered.append(record)
    return Messages(reduced=tuple(reduced), gathered=tuple(gathered))
