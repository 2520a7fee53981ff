"""Reduce buffers: memory of fixed length through which gradients go on their way to their owners.

One for each kind of params and dtype of gradients, or two that take turns, so that one fills while
what is in the other is on its way. They are there from the first gradient of a backward to the last
sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn

from zero_sim.layout import GradUnitPlan, Span, plan_grad_units
from zero_sim.zero.buffer import Buffer
from zero_sim.zero.config import ZeroConfig
from zero_sim.zero.groups import KindGroups
from zero_sim.zero.storage import LentStorage, Storage, TransientStorage
from zero_sim.zero.unit import ParamMemory
from zero_sim.zero.variants.grad_unit import GradSlice, GradUnit


class ReduceBuffers:
    """The grad units of a model with the memory that they share.

    Args:
        buffers: All buffers of its params.
        params: The params by name, in registration order; their gradients come in reverse.
        config: What is copied when, and how many buffers take turns.
        groups_of: The groups of a kind of params.
    """

    units: tuple[GradUnit, ...]
    """In the order in which they are reduced."""
    unit_of: Mapping[nn.Parameter, GradUnit]
    """The unit of each param that has elements."""

    def __init__(
        self,
        buffers: Sequence[Buffer],
        *,
        params: Mapping[str, nn.Parameter],
        config: ZeroConfig,
        groups_of: Callable[[str], KindGroups],
    ) -> None:
        assert config.reduce_buffer_elems is not None
        self._elems = config.reduce_buffer_elems
        self._config = config
        self._lenders: dict[tuple[object, int], TransientStorage] = {}
        home_of = {param: buffer for buffer in buffers for param in buffer.memory}
        # A collective has one group and one dtype.
        lanes = [(buffer.plan.key.kind, buffer.grad_dtype) for buffer in buffers]
        plans = plan_grad_units(
            [buffer.plan for buffer in buffers],
            lanes=[f"{kind}/{dtype}" for kind, dtype in lanes],
            arrivals=[*params][::-1],
            buffer_elems=self._elems,
        )
        self.units = tuple(
            self._build_unit(
                plan,
                members=[
                    (home_of[params[placed.name]], params[placed.name]) for placed in plan.grads
                ],
                groups_of=groups_of,
            )
            for plan in plans
        )
        self.unit_of = {each.memory.param: unit for unit in self.units for each in unit.slices}

    @property
    def memory(self) -> list[Tensor]:
        """The buffers, 1D each, as far as they are there."""
        return [each.whole for each in self._lenders.values() if each.whole is not None]

    def release(self) -> None:
        """Let go of the memory, once no unit uses it."""
        for lender in self._lenders.values():
            lender.release()

    def _build_unit(
        self,
        plan: GradUnitPlan,
        *,
        members: Sequence[tuple[Buffer, nn.Parameter]],
        groups_of: Callable[[str], KindGroups],
    ) -> GradUnit:
        config, home = self._config, members[0][0]
        group = groups_of(home.plan.key.kind).shard_group
        assert group is not None
        slices = [
            _slice_of(buffer.memory[param], span=placed.span)
            for (buffer, param), placed in zip(members, plan.grads, strict=True)
        ]
        return GradUnit(
            plan=plan,
            slices=slices,
            storage=self._storage_of(plan, home=home),
            group=group,
            sums_whole=config.sum_by == "all-reduce",
            grads_stay=not config.sharding.grads,
            on_arrival=config.contiguous_grads,
            accumulates=config.sharding.grads or config.sync == "every",
        )

    def _storage_of(self, plan: GradUnitPlan, *, home: Buffer) -> Storage:
        def memory(elems: int) -> TransientStorage:
            # All of it is written: gradients lie in it without a gap.
            return TransientStorage(elems, dtype=home.grad_dtype, device=home.device, zeroed=False)

        if plan.is_large or not self._config.contiguous_grads:
            return memory(plan.numel)
        turns = 2 if self._config.overlap_grads else 1
        key = (plan.lane, plan.turn % turns)
        lender = self._lenders.setdefault(key, memory(self._elems))
        return LentStorage(lender, elems=plan.numel)


def _slice_of(memory: ParamMemory, *, span: Span) -> GradSlice:
    own = Span(span.start, span.start)
    if memory.fragment is not None:
        own = memory.fragment.in_param.shift(span.start)
    return GradSlice(memory=memory, span=span, own=own)
