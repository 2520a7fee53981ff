"""Arena: memory taken once, in which whole gradients lie that come and go within a step.

Gradients that live from their backward to their sum have activations born and freed around them;
where each asks the allocator for memory, holes of many sizes are left between them (ZeRO, arXiv
1910.02054, section 6.3, M_D). In an arena each unit has a place of its own from the start.

[Note: places]
Units are reduced in one order, one fills while at most one is in flight. So those at even places of
that order begin at the front of the arena, those at odd ones end at its back, and it is as long as
the longest two in a row. Where all gradients stay until the last micro-batch each has a stretch of
its own. Gradients that come in another order can find their place in use: that unit then has memory
of its own, once more.

Units of experts have a part of the arena to themselves: ranks can have different numbers of these,
and what all ranks sum lies in the same place on each of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zero_sim.errors import UsageError
from zero_sim.layout import Span, plan_arena
from zero_sim.zero.data_parallel import DistributedDataParallel
from zero_sim.zero.schedule import order_by_forward
from zero_sim.zero.storage import Storage
from zero_sim.zero.unit import Unit
from zero_sim.zero.variants.reduce_buffers import BufferedGrads


class Arena:
    """Memory taken once, of which stretches are given out.

    Args:
        size: Its bytes.
        device: Where it lies.
    """

    memory: Tensor  # 1D uint8

    def __init__(self, size: int, *, device: torch.device) -> None:
        self.memory = torch.zeros(size, dtype=torch.uint8, device=device)
        self._in_use: list[Span] = []

    def take(self, span: Span, *, dtype: torch.dtype) -> Tensor | None:
        """Return a stretch as 1D of a dtype, as it was left; None where some of it is in use.

        Args:
            span: In bytes.
            dtype: Of which it begins at a multiple, and has a whole number.
        """
        if any(not span.intersect(other).empty for other in self._in_use):
            return None
        self._in_use.append(span)
        return self.memory[span.start : span.stop].view(dtype)

    def take_back(self, span: Span) -> None:
        """Note that a stretch is not used any more."""
        self._in_use.remove(span)


class ArenaStorage:
    """The whole memory of a unit at its place in an arena; see [Note: places].

    Args:
        arena: Where its place is.
        place: In bytes.
        dtype: Of the elements.
        otherwise: Where they lie while others use the place.
    """

    stays = False

    def __init__(
        self, arena: Arena, *, place: Span, dtype: torch.dtype, otherwise: Storage
    ) -> None:
        self._arena = arena
        self._place = place
        self._dtype = dtype
        self._otherwise = otherwise
        self._whole: Tensor | None = None
        self.is_outside = False
        """Whether the elements are in memory of their own."""

    @property
    def whole(self) -> Tensor | None:
        """All elements, or None between a release and the next use."""
        return self._whole

    def acquire(self) -> Tensor:
        """Zero its place, or take memory that is zero, unless it has some."""
        if self._whole is None:
            place = self._arena.take(self._place, dtype=self._dtype)
            self.is_outside = place is None
            self._whole = self._otherwise.acquire() if place is None else place.zero_()
        return self._whole

    def release(self) -> None:
        """Leave the place to others."""
        if self._whole is None:
            return
        if self.is_outside:
            self._otherwise.release()
        else:
            self._arena.take_back(self._place)
        self._whole, self.is_outside = None, False


def move_grads(ddp: DistributedDataParallel) -> Arena:
    """Give the whole gradients of all units places in a new arena.

    Args:
        ddp: A module at stage 2 or 3, whose whole gradients come and go.

    Raises:
        UsageError: If whole gradients stay, or do not lie in units of their params.
    """
    config, buffers = ddp.config, ddp.buffers
    if isinstance(ddp.grad_schedule, BufferedGrads):
        raise UsageError(
            "expected gradients that fill the units of their params with an arena, got a "
            "DistributedDataParallel with reduce buffers, in which they lie instead. Remove either."
        )
    if not config.sharding.grads:
        raise UsageError(
            f"expected stage 2 or 3 with an arena, got stage={config.stage}, which keeps gradients "
            f"whole in memory that stays. Remove the arena, or choose another stage."
        )
    order = order_by_forward(buffers, params=list(ddp.params.values()))[::-1]
    dtypes = {unit: buffer.grad_dtype for buffer in buffers for unit in buffer.units}
    kinds = {unit: buffer.plan.key.kind for buffer in buffers for unit in buffer.units}
    stay = config.sync == "last" and config.micro_batches != 1
    places: dict[Unit, Span] = {}
    size = 0
    for kind in sorted(set(kinds.values())):
        units = [unit for unit in order if kinds[unit] == kind]
        plan = plan_arena(
            [unit.plan.span.numel * dtypes[unit].itemsize for unit in units],
            at_a_time=None if stay else 1 + config.overlap_grads,
        )
        places |= {unit: place.shift(size) for unit, place in zip(units, plan.places, strict=True)}
        size += plan.size
    arena = Arena(size, device=buffers[0].device)
    for unit in order:
        unit.grad_storage = ArenaStorage(
            arena, place=places[unit], dtype=dtypes[unit], otherwise=unit.grad_storage
        )
    return arena
