"""Reduce buffers: memory of fixed length that gradients pass through on the way to their owners.

This is a gradient schedule with its own units, as in DeepSpeed's stages 1 and 2.

Each kind of params and gradient dtype has a buffer, or two that alternate: a buffer fills while the
other is in flight. This memory is allocated from a backward's first gradient to the last sum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

from zero_sim.errors import UsageError
from zero_sim.layout import GradUnitPlan, Span, plan_grad_units
from zero_sim.zero.buffer import Buffer
from zero_sim.zero.config import ZeroConfig
from zero_sim.zero.groups import Holders
from zero_sim.zero.schedule import UnderBackward, Wrapped
from zero_sim.zero.storage import Storage, TransientStorage
from zero_sim.zero.unit import ParamMemory, Unit
from zero_sim.zero.variants.grad_unit import GradSlice, GradUnit
from zero_sim.zero.variants.root_reduce import UnshardedSumUnit


class LentStorage:
    """A reduce buffer, which several units use in turn.

    The schedule must finish a unit before the next unit starts, and release the lender at the end.

    Args:
        lender: The buffer, at least as long as the unit.
        elems: Number of elements in the unit.
    """

    stays = False

    def __init__(self, lender: TransientStorage, *, elems: int) -> None:
        self._lender = lender
        self._elems = elems
        self._whole: Tensor | None = None

    @property
    def whole(self) -> Tensor | None:
        """The unit's part, 1D; None if not in use."""
        return self._whole

    def acquire(self) -> Tensor:
        """Allocate the memory if needed, and return the unit's part."""
        # Always from the start, because the buffer contains a single unit at a time.
        self._whole = self._lender.acquire().narrow(0, 0, self._elems)
        return self._whole

    def release(self) -> None:
        """Stop using the memory; the lender frees it."""
        self._whole = None


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferSettings:
    """Settings of reduce buffers.

    Raises:
        UsageError: If `elems` is not a positive integer.
    """

    elems: int
    """Buffer length in elements. A longer gradient travels alone."""
    contiguous_grads: bool = True
    """True to copy each gradient on arrival; False to copy a unit's gradients into new memory once
    all are complete."""
    sums_unsharded: bool = False
    """True to sum everything to all ranks; each rank keeps its part."""

    def __post_init__(self) -> None:
        # type(), because bool is a subclass of int.
        if type(self.elems) is not int or self.elems < 1:
            raise UsageError(f"expected elems to be an integer of at least 1, got {self.elems!r}.")


class ReduceBuffers:
    """A model's grad units, with their shared memory.

    Args:
        buffers: All flat buffers.
        params: Params by name, in registration order. Gradients should arrive in reverse.
        config: The engine's config. With overlapped gradients two buffers alternate.
        settings: Buffer length, and time of the copies.
        holders: The ranks that hold each kind of params.
    """

    units: tuple[GradUnit, ...]
    """Units in reduction order."""
    unit_of: Mapping[nn.Parameter, GradUnit]
    """The unit of each non-empty param."""

    def __init__(
        self,
        buffers: Sequence[Buffer],
        *,
        params: Mapping[str, nn.Parameter],
        config: ZeroConfig,
        settings: BufferSettings,
        holders: Holders,
    ) -> None:
        self._elems = settings.elems
        self._config, self._settings = config, settings
        self._lenders: dict[tuple[object, int], TransientStorage] = {}
        # A grad unit may contain params from several flat buffers.
        home_of = {param: buffer for buffer in buffers for param in buffer.memory}
        # A lane per kind and dtype, because a collective has a single group and dtype.
        lanes = [(buffer.plan.key.kind, buffer.grad_dtype) for buffer in buffers]
        plans = plan_grad_units(
            [buffer.plan for buffer in buffers],
            lanes=[f"{kind}/{dtype}" for kind, dtype in lanes],
            # Backward reaches the last registered param first.
            arrivals=[*params][::-1],
            buffer_elems=self._elems,
        )
        self.units = tuple(
            self._build_unit(
                plan,
                members=[
                    (home_of[params[placed.name]], params[placed.name]) for placed in plan.grads
                ],
                holders=holders,
            )
            for plan in plans
        )
        self.unit_of = {each.memory.param: unit for unit in self.units for each in unit.slices}

    @property
    def memory(self) -> list[Tensor]:
        """The allocated buffers, 1D each."""
        return [each.whole for each in self._lenders.values() if each.whole is not None]

    def release(self) -> None:
        """Free the buffers, once no unit uses them."""
        for lender in self._lenders.values():
            lender.release()

    def _build_unit(
        self,
        plan: GradUnitPlan,
        *,
        members: Sequence[tuple[Buffer, nn.Parameter]],
        holders: Holders,
    ) -> GradUnit:
        config, home = self._config, members[0][0]
        # Not None, because _check_config requires sharded state, so there is a shard group.
        group = holders.owners_of(home.plan.key.kind)
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
            sums_unsharded=self._settings.sums_unsharded,
            # Stage 1 accumulates in `main_grad`; stage 2 keeps only the owner's part of the sum.
            grads_stay=not config.sharding.grads,
            on_arrival=self._settings.contiguous_grads,
            # In these cases every micro-batch is reduced, so sums add up during the step.
            accumulates=config.sharding.grads or config.sync == "every",
        )

    def _storage_of(self, plan: GradUnitPlan, *, home: Buffer) -> Storage:
        def memory(elems: int) -> TransientStorage:
            # Not zeroed: gradients fill it without gaps, and missing gradients become zeros.
            return TransientStorage(elems, dtype=home.grad_dtype, device=home.device, zeroed=False)

        # A long gradient, or a unit that is copied late, gets separate memory.
        if plan.is_large or not self._settings.contiguous_grads:
            return memory(plan.numel)
        # With overlap a unit is in flight while the next unit fills, so two buffers alternate.
        turns = 2 if self._config.overlap_grads else 1
        key = (plan.lane, plan.turn % turns)
        lender = self._lenders.setdefault(key, memory(self._elems))
        return LentStorage(lender, elems=plan.numel)


class BufferedGrads(UnderBackward):
    """Copies gradients into reduce buffers on arrival, and reduces each unit once it is ready.

    Only the next unit to be issued copies gradients on arrival. Gradients for later units wait
    until the buffer is free: in `main_grad` if resident, else in `param.grad`.

    Args:
        wrapped: The module.
        settings: Buffer length, and time of the copies.

    Raises:
        UsageError: If config or units do not allow reduce buffers.
    """

    def __init__(self, wrapped: Wrapped, *, settings: BufferSettings) -> None:
        _check_config(wrapped.config)
        _check_units(wrapped.units)
        super().__init__(wrapped)
        self.buffers = ReduceBuffers(
            wrapped.buffers,
            params=wrapped.params,
            config=wrapped.config,
            settings=settings,
            holders=wrapped.holders,
        )
        # Grad units have all methods that the schedule calls.
        self._units = cast("Sequence[Unit]", self.buffers.units)
        self._unit_of = cast("Mapping[nn.Parameter, Unit]", self.buffers.unit_of)
        # At stage 2 the grad unit copies `param.grad` and drops it.
        self._grads_are_transient = wrapped.config.sharding.grads

    def take(self, memory: ParamMemory) -> None:
        """Accumulate a new gradient in `main_grad` if resident; otherwise leave it to its unit."""
        if self._grads_are_transient and memory.param in self._unit_of:
            self.mark_ready(memory.param)
        else:
            super().take(memory)

    def mark_ready(self, param: nn.Parameter) -> None:
        """Mark a gradient as complete, copy it if its unit is next, and issue ready units."""
        unit = self.buffers.unit_of.get(param)
        if self.running and unit is not None and unit is self.buffers.units[self._issued_count]:
            unit.arrive(param)
        super().mark_ready(param)

    def finish(self) -> None:
        """Issue the remaining units, wait until every unit is reduced, and free the buffers."""
        super().finish()
        self.buffers.release()

    def accumulate_sums(self, *, is_first: bool) -> None:
        """Zero the gradients. Each grad unit has already added up its sums."""
        for buffer in self._buffers:
            assert buffer.grad_data is not None
            buffer.grad_data.zero_()

    def reset(self) -> None:
        """Drop the step's gradients."""
        super().reset()
        for unit in self.buffers.units:
            unit.reset_grads()

    def _issue_next(self) -> None:
        # First, because this frees the buffer that the next unit uses.
        super()._issue_next()
        # Copy the next unit's gradients that arrived early.
        if self._issued_count < len(self.buffers.units):
            following = self.buffers.units[self._issued_count]
            for param in following.params:
                if self.running and param not in self._missing[self._units[self._issued_count]]:
                    following.arrive(param)


def _check_config(config: ZeroConfig) -> None:
    """Refuse settings that reduce buffers do not support."""
    if config.stage not in (1, 2):
        raise UsageError(
            f"expected stage 1 or 2 with reduce buffers, because they need unsharded params and "
            f"sharded state, got stage={config.stage}. Remove the buffers, or change the stage."
        )
    if config.redundancy > 1:
        raise UsageError(
            f"expected redundancy=1 with reduce buffers, because their sums end at a single owner, "
            f"without replicas, got {config.redundancy}. Remove either."
        )
    if config.sharding.grads and config.sync == "last":
        raise UsageError(
            "expected sync='every' with reduce buffers and stage=2, because no gradient stays for "
            "the next micro-batch, got 'last'. Set stage=1 or sync='every'."
        )


def _check_units(units: Sequence[Unit]) -> None:
    """Refuse unit classes with their own sums, which would never be issued."""
    for unit in units:
        if isinstance(unit, UnshardedSumUnit):
            raise UsageError(
                f"expected units without their own sums, because reduce buffers sum gradients, "
                f"got {type(unit).__name__} for {unit.name}. Remove `unit` from the seams; for an "
                f"all-reduce pass BufferSettings(sums_unsharded=True)."
            )


def _slice_of(memory: ParamMemory, *, span: Span) -> GradSlice:
    own = Span(span.start, span.start)
    if memory.fragment is not None:
        # Offsets into the grad unit, like `span`.
        own = memory.fragment.in_param.shift(span.start)
    return GradSlice(memory=memory, span=span, own=own)
