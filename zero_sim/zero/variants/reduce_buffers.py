"""Reduce buffers: memory of fixed length through which gradients go on their way to their owners.

A gradient schedule with units of its own, as in DeepSpeed's stages 1 and 2.

One for each kind of params and dtype of gradients, or two that take turns, so that one fills while
what is in the other is on its way. They are there from the first gradient of a backward to the last
sum.
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
from zero_sim.zero.variants.root_reduce import WholeSumUnit


class LentStorage:
    """A part of memory that several units use, one after another: a reduce buffer.

    Who lends it makes sure that a unit is done with it before the next one begins, and lets go of
    it behind the last.

    Args:
        lender: The memory, at least as long as the unit.
        elems: Elements of the unit.
    """

    stays = False

    def __init__(self, lender: TransientStorage, *, elems: int) -> None:
        self._lender = lender
        self._elems = elems
        self._whole: Tensor | None = None

    @property
    def whole(self) -> Tensor | None:
        """The unit's part, or None while it does not use it."""
        return self._whole

    def acquire(self) -> Tensor:
        """Begin to use it."""
        self._whole = self._lender.acquire().narrow(0, 0, self._elems)
        return self._whole

    def release(self) -> None:
        """Be done with it."""
        self._whole = None


@dataclass(frozen=True, kw_only=True, slots=True)
class BufferSettings:
    """Settings of reduce buffers.

    Raises:
        UsageError: If a length is no such integer.
    """

    elems: int
    """The length of the buffers into which gradients are copied as backward gives them, and out of
    which each owner's are reduced to it: one, or with `overlap_grads` two that take turns. A longer
    gradient goes by itself."""
    contiguous_grads: bool = True
    """True if each gradient is copied when it comes; else all that go together are when the last of
    them is there, into new memory."""
    sums_whole: bool = False
    """True if every rank gets the sum of all, of which it keeps its own."""

    def __post_init__(self) -> None:
        if type(self.elems) is not int or self.elems < 1:
            raise UsageError(f"expected elems to be an integer of at least 1, got {self.elems!r}.")


class ReduceBuffers:
    """The grad units of a model with the memory that they share.

    Args:
        buffers: All buffers of its params.
        params: The params by name, in registration order; their gradients come in reverse.
        config: Of the engine; with overlapped gradients two buffers take turns.
        settings: Length of the buffers, and what is copied when.
        holders: The ranks that hold each kind of params.
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
        settings: BufferSettings,
        holders: Holders,
    ) -> None:
        self._elems = settings.elems
        self._config, self._settings = config, settings
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
                holders=holders,
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
        holders: Holders,
    ) -> GradUnit:
        config, home = self._config, members[0][0]
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
            sums_whole=self._settings.sums_whole,
            grads_stay=not config.sharding.grads,
            on_arrival=self._settings.contiguous_grads,
            accumulates=config.sharding.grads or config.sync == "every",
        )

    def _storage_of(self, plan: GradUnitPlan, *, home: Buffer) -> Storage:
        def memory(elems: int) -> TransientStorage:
            # All of it is written: gradients lie in it without a gap.
            return TransientStorage(elems, dtype=home.grad_dtype, device=home.device, zeroed=False)

        if plan.is_large or not self._settings.contiguous_grads:
            return memory(plan.numel)
        turns = 2 if self._config.overlap_grads else 1
        key = (plan.lane, plan.turn % turns)
        lender = self._lenders.setdefault(key, memory(self._elems))
        return LentStorage(lender, elems=plan.numel)


class BufferedGrads(UnderBackward):
    """Copies gradients into reduce buffers as they come, and reduces each unit of them once ready.

    The first unit that is not issued takes gradients as they come; others wait for their turn where
    autograd left them, as the memory into which they go is another one's.

    Args:
        wrapped: Its gradients are reduced.
        settings: Length of the buffers, and what is copied when.

    Raises:
        UsageError: If reduce buffers do not go with the config, or with the units.
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
        # They have all that a schedule calls.
        self._units = cast("Sequence[Unit]", self.buffers.units)
        self._unit_of = cast("Mapping[nn.Parameter, Unit]", self.buffers.unit_of)
        self._leave_by_themselves = wrapped.config.sharding.grads

    def take(self, memory: ParamMemory) -> None:
        """Accumulate a fresh gradient where gradients stay; else leave it to its grad unit."""
        if self._leave_by_themselves and memory.param in self._unit_of:
            self.mark_ready(memory.param)
        else:
            super().take(memory)

    def mark_ready(self, param: nn.Parameter) -> None:
        """Note that a gradient is complete, copy it if it is its turn, and issue what is ready."""
        unit = self.buffers.unit_of.get(param)
        if self.running and unit is not None and unit is self.buffers.units[self._issued_count]:
            unit.arrive(param)
        super().mark_ready(param)

    def finish(self) -> None:
        """Issue the rest, wait until every unit is reduced, and let go of the buffers."""
        super().finish()
        self.buffers.release()

    def accumulate_sums(self, *, is_first: bool) -> None:
        """Zero gradients: their sums were added up when they came back."""
        for buffer in self._buffers:
            assert buffer.grad_data is not None
            buffer.grad_data.zero_()

    def reset(self) -> None:
        """Forget the step's gradients."""
        super().reset()
        for unit in self.buffers.units:
            unit.reset_grads()

    def _issue_next(self) -> None:
        super()._issue_next()
        if self._issued_count < len(self.buffers.units):
            following = self.buffers.units[self._issued_count]
            for param in following.params:
                if self.running and param not in self._missing[self._units[self._issued_count]]:
                    following.arrive(param)


def _check_config(config: ZeroConfig) -> None:
    """Refuse settings that reduce buffers do not go with."""
    if config.stage not in (1, 2):
        raise UsageError(
            f"expected stage 1 or 2 with reduce buffers, whose params are whole and whose state is "
            f"sharded, got stage={config.stage}. Remove the buffers, or choose another stage."
        )
    if config.redundancy > 1:
        raise UsageError(
            f"expected redundancy=1 with reduce buffers, whose sums end with one owner and go on "
            f"to no copies, got {config.redundancy}. Remove either."
        )
    if config.sharding.grads and config.sync == "last":
        raise UsageError(
            "expected sync='every' with reduce buffers and stage=2, where gradients leave as "
            "backward goes and none stays for the next micro-batch, got 'last'. Try stage=1, or "
            "sync='every'."
        )


def _check_units(units: Sequence[Unit]) -> None:
    """Refuse units with sums of their own, which would never be issued."""
    for unit in units:
        if isinstance(unit, WholeSumUnit):
            raise UsageError(
                f"expected units without sums of their own with reduce buffers, which sum "
                f"gradients in their place, got {type(unit).__name__} for {unit.name}. Remove "
                f"`unit` from the seams; for an all-reduce pass BufferSettings(sums_whole=True)."
            )


def _slice_of(memory: ParamMemory, *, span: Span) -> GradSlice:
    own = Span(span.start, span.start)
    if memory.fragment is not None:
        own = memory.fragment.in_param.shift(span.start)
    return GradSlice(memory=memory, span=span, own=own)
