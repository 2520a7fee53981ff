"""Arena: memory allocated once, for unsharded gradients that come and go within a step.

Unsharded gradients live from their backward to their sum, while activations are allocated and freed
around them. With separate allocations, memory fragments into holes with many sizes (ZeRO, arXiv
1910.02054, section 6.3, M_D). In an arena each unit has a fixed place from the start.

[Note: places]
Units are reduced in a fixed order: while a unit fills, at most one other is in flight. So units
alternate: even turns start at the front of the arena, odd turns end at its back. The arena is as
long as the longest two consecutive units. If all gradients stay until the last micro-batch, each
unit has a separate span. If gradients arrive in another order and a unit's place is in use, the
unit allocates its own memory.

Expert units have a separate part of the arena, because their number may differ between ranks. So
dense gradients are at the same place on each rank.
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
    """Memory allocated once, lent out in spans.

    Args:
        size: Size in bytes.
        device: Device of the memory.
    """

    memory: Tensor  # 1D uint8

    def __init__(self, size: int, *, device: torch.device) -> None:
        # Bytes, because units of several dtypes share the memory.
        self.memory = torch.zeros(size, dtype=torch.uint8, device=device)
        self._in_use: list[Span] = []

    def take(self, span: Span, *, dtype: torch.dtype) -> Tensor | None:
        """Return a span as a 1D tensor, with its old contents; None if any byte is in use.

        Args:
            span: Span in bytes. Start and length are multiples of the element size.
            dtype: Dtype of the tensor.
        """
        if any(not span.intersect(other).empty for other in self._in_use):
            return None
        self._in_use.append(span)
        return self.memory[span.start : span.stop].view(dtype)

    def take_back(self, span: Span) -> None:
        """Mark a span as free."""
        self._in_use.remove(span)


class ArenaStorage:
    """A unit's memory at its place in an arena; see [Note: places].

    Args:
        arena: The arena.
        place: Span in bytes.
        dtype: Dtype of the elements.
        otherwise: Storage to use while another unit occupies the place.
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
        """True if the elements are in memory outside the arena."""

    @property
    def whole(self) -> Tensor | None:
        """All elements, 1D; None between a release and the next use."""
        return self._whole

    def acquire(self) -> Tensor:
        """Return the unit's memory. If it is new: zeros, at its place or else outside the arena."""
        if self._whole is None:
            place = self._arena.take(self._place, dtype=self._dtype)
            self.is_outside = place is None
            # Zeros, because gradients accumulate; `otherwise` allocates zeros too.
            self._whole = self._otherwise.acquire() if place is None else place.zero_()
        return self._whole

    def release(self) -> None:
        """Free the place for other units."""
        if self._whole is None:
            return
        if self.is_outside:
            self._otherwise.release()
        else:
            self._arena.take_back(self._place)
        self._whole, self.is_outside = None, False


def move_grads(ddp: DistributedDataParallel) -> Arena:
    """Move the unsharded gradients of all units into a new arena.

    Args:
        ddp: A module at stage 2 or 3, with transient unsharded gradients.

    Raises:
        UsageError: If unsharded gradients are resident, or use reduce buffers.
    """
    config, buffers = ddp.config, ddp.buffers
    if isinstance(ddp.grad_schedule, BufferedGrads):
        raise UsageError(
            "expected gradients in the units of their params with an arena, got a "
            "DistributedDataParallel with reduce buffers. Remove either."
        )
    if not config.sharding.grads:
        raise UsageError(
            f"expected stage 2 or 3 with an arena, got stage={config.stage}, which keeps unsharded "
            f"gradients resident. Remove the arena, or choose another stage."
        )
    # Reduction order is reverse forward order.
    order = order_by_forward(buffers, params=list(ddp.params.values()))[::-1]
    dtypes = {unit: buffer.grad_dtype for buffer in buffers for unit in buffer.units}
    kinds = {unit: buffer.plan.key.kind for buffer in buffers for unit in buffer.units}
    # With sync="last", gradients stay until the last micro-batch, so units cannot share a place.
    stay = config.sync == "last" and config.micro_batches != 1
    places: dict[Unit, Span] = {}
    # Bytes planned so far; the next kind's part starts there.
    size = 0
    # Sorted, so dense units come first and their places do not depend on a rank's experts.
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
