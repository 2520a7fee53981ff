"""Faults of when sharded params are gathered and freed: too often, too early, or never."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from zero_sim.mutants.patching import Patches
from zero_sim.mutants.records import mutant
from zero_sim.zero.data_parallel import DistributedDataParallel
from zero_sim.zero.gathers import OnUse
from zero_sim.zero.optimizer import DistributedOptimizer
from zero_sim.zero.schedule import Wrapped
from zero_sim.zero.unit import ParamState, Unit


def _with(wrapped: Wrapped, **changes: Any) -> Wrapped:
    """The pieces of a module with other settings."""
    return replace(wrapped, config=replace(wrapped.config, **changes))


@mutant("W01", "VOLUME", "Z3 B2", seen_in="class VOLUME", kill="volume", core=True)
def not_freed_after_forward(patch: Patches) -> None:
    """A unit whose modules have run is not freed, and backward finds it whole."""

    @patch(OnUse, "_leave")
    def wrong(right, self, unit, *, has_backward):
        return None


@mutant("W02", "VOLUME", "Z3 B2", seen_in="class VOLUME", kill="volume", core=True)
def freed_by_the_first_user(patch: Patches) -> None:
    """A unit is freed after the first module that uses it, and gathered again for the next."""

    @patch(OnUse, "_after_forward")
    def wrong(right, self, needed, module, args, output):
        for unit in needed:
            self._pending[unit].clear()
        right(self, needed, module, args, output)


@mutant("W03", "ASYNC", "Z3 B2", seen_in="class ASYNC", kill="volume")
def freed_while_in_use(patch: Patches) -> None:
    """A module that ends frees what it used, though the module around it uses it, too."""

    @patch(OnUse, "_after_forward")
    def wrong(right, self, needed, module, args, output):
        in_backward = self._in_backward
        right(self, needed, module, args, output)
        for unit in needed if self._starts and not in_backward else ():
            if unit.param_state in (ParamState.WHOLE, ParamState.IN_USE):
                unit.param_state, unit._users = ParamState.WHOLE, 0
                unit.free_params()


@mutant("W04", "ALIAS", "Z3", seen_in="class ALIAS", kill="contract")
def freed_twice(patch: Patches) -> None:
    """At the end of backward every unit is freed, whole or not."""

    @patch(OnUse, "free_all")
    def wrong(right, self):
        for unit in self._units:
            unit.free_params()


@mutant("W05", "ASYNC", "Z3", seen_in="class ASYNC", core=True)
def forward_does_not_gather(patch: Patches) -> None:
    """The last unit is not gathered before a module uses it."""

    @patch(OnUse, "_before_forward")
    def wrong(right, self, needed, module, args):
        right(self, tuple(unit for unit in needed if unit is not self._units[-1]), module, args)
        self._in_use.update(unit for unit in needed if unit is self._units[-1])


@mutant("W06", "VOLUME", "Z3 B2", seen_in="class VOLUME", kill="volume")
def backward_does_not_gather(patch: Patches) -> None:
    """Backward gathers only what autograd kept of a unit, and nothing where it kept nothing."""

    @patch(OnUse, "_unwind")
    def wrong(right, self, count):
        self._gather = lambda needed, *, ahead: None
        try:
            right(self, count)
        finally:
            del self._gather


@mutant("W07", "ALIAS", "Z3", seen_in="class ALIAS", core=True)
def kept_without_its_place(patch: Patches) -> None:
    """What autograd kept of a unit is found again at the start of the unit."""

    @patch(OnUse, "_restore")
    def wrong(right, self, kept):
        whole = right(self, kept)
        return whole if kept is whole else whole.as_strided(whole.shape, whole.stride(), 0)


@mutant("W08", "LAYOUT", "Z3", seen_in="class LAYOUT")
def kept_without_its_strides(patch: Patches) -> None:
    """What autograd kept of a unit is found again as if it had been contiguous."""

    @patch(OnUse, "_restore")
    def wrong(right, self, kept):
        whole = right(self, kept)
        if kept is whole:
            return whole
        flat = whole.as_strided((whole.numel(),), (1,), whole.storage_offset())
        return flat.view(whole.shape)


@mutant("W09", "ALIAS", "Z3 S2", seen_in="class ALIAS", core=True)
def whole_params_kept_over_a_step(patch: Patches) -> None:
    """Whole params stay after backward, and the next forward finds those of the step before."""

    @patch(OnUse, "free_all")
    def kept(right, self):
        return None

    @patch(OnUse, "_end_gradients")
    def wrong(right, self, unit):
        self._grads.close(unit)
        self._first_use.pop(unit, None)
        unit.finish_gather()


@mutant("W10", "ALIAS", "Z3 S2", seen_in="class ALIAS")
def last_unit_kept_over_a_step(patch: Patches) -> None:
    """The unit that stays between forward and backward stays after backward, too."""
    kept: set[Unit] = set()

    @patch(Unit, "free_params")
    def wrong(right, self):
        if self not in kept:
            right(self)

    @patch(OnUse, "__init__")
    def noted(right, self, wrapped, **named):
        right(self, wrapped, **named)
        kept.update(self._units[-1:])


@mutant("W11", "VOLUME", "Z3 IN", seen_in="class VOLUME", kill="volume")
def gathered_where_a_step_was_skipped(patch: Patches) -> None:
    """After a skipped step all units are gathered and let go of, to be sure."""

    @patch(DistributedOptimizer, "step")
    def wrong(right, self):
        result = right(self)
        for buffer in self.ddp.buffers if result.skipped else ():
            for unit in buffer.units if buffer.sharding.params else ():
                unit.gather()
                unit.free_params()
        return result


@mutant("W12", "VOLUME", "Z3", seen_in="class VOLUME", kill="volume", core=True)
def last_unit_freed_after_forward(patch: Patches) -> None:
    """The last unit is freed, too, and backward begins with gathering it again."""

    @patch(OnUse, "__init__")
    def wrong(right, self, wrapped, **named):
        right(self, wrapped, **named)
        if wrapped.config.reshard_after_forward:
            self._kept = frozenset()


@mutant("W13", "VOLUME", "Z3 B2", seen_in="class VOLUME", kill="volume")
def freed_though_it_should_stay(patch: Patches) -> None:
    """That params should stay between forward and backward is not heard of."""

    @patch(OnUse, "__init__")
    def wrong(right, self, wrapped, **named):
        right(self, _with(wrapped, reshard_after_forward=True), **named)


@mutant("W14", "VOLUME", "Z3 B2", seen_in="class VOLUME", kill="volume")
def never_freed_after_forward(patch: Patches) -> None:
    """Params stay between forward and backward whatever was asked for."""

    @patch(OnUse, "__init__")
    def wrong(right, self, wrapped, **named):
        right(self, _with(wrapped, reshard_after_forward=False), **named)


@mutant("W15", "VOLUME", "Z3 B2", seen_in="class VOLUME", kill="volume")
def first_unit_stays(patch: Patches) -> None:
    """It is the first unit that stays between forward and backward, not the last."""

    @patch(OnUse, "__init__")
    def wrong(right, self, wrapped, **named):
        right(self, wrapped, **named)
        if wrapped.config.reshard_after_forward:
            self._kept = frozenset(self._units[:1])


@mutant("W16", "VOLUME", "Z3 B2", seen_in="class VOLUME", kill="volume", core=True)
def prefetched_behind(patch: Patches) -> None:
    """What is gathered ahead in forward are units before the one in use."""

    @patch(OnUse, "_after_in_forward")
    def wrong(right, self, needed):
        if not needed or not self._prefetch or self._in_backward:
            return ()
        first = min(map(self._units.index, needed))
        return self._units[max(0, first - self._prefetch) : first]


@mutant("W17", "VOLUME", "Z3 B2", seen_in="class VOLUME", kill="volume")
def prefetched_though_it_has_run(patch: Patches) -> None:
    """What is gathered ahead may be a unit that no module of this forward needs any more."""

    @patch(OnUse, "_after_in_forward")
    def wrong(right, self, needed):
        if not needed or not self._prefetch or self._in_backward:
            return ()
        first = max(map(self._units.index, needed)) + 1
        following = (*self._units[first:], *self._units[:first])
        return following[: self._prefetch]


@mutant("W18", "ASYNC", "Z3 AS B2", seen_in="class ASYNC", kill="race", core=True)
def prefetched_and_not_waited_for(patch: Patches) -> None:
    """What was gathered ahead counts as there when it is used."""

    @patch(OnUse, "_gather")
    def wrong(right, self, needed, *, ahead):
        for unit in needed:
            if unit.gathering:
                unit._gathering = None
        right(self, needed, ahead=ahead)


@mutant("W19", "VOLUME", "Z3 B2", seen_in="class VOLUME", kill="volume")
def gathered_by_every_module(patch: Patches) -> None:
    """Every module gathers what it uses, whether or not it is there."""

    @patch(OnUse, "_gather")
    def wrong(right, self, needed, *, ahead):
        for unit in needed:
            unit.gather()
        right(self, needed, ahead=ahead)


@mutant("W20", "ASYNC", "Z3 AS B2", seen_in="Megatron-LM#6388")
def only_the_first_unit_waited_for(patch: Patches) -> None:
    """A module waits for the first unit that it reads from, and not for the others."""

    @patch(OnUse, "_gather")
    def wrong(right, self, needed, *, ahead):
        right(self, needed[:1], ahead=(*needed[1:], *ahead))


@mutant("W21", "ASYNC", "Z3 AS", seen_in="class ASYNC", kill="race")
def whole_when_it_is_issued(patch: Patches) -> None:
    """Params count as whole as soon as their gather is issued."""

    @patch(Unit, "start_gather")
    def wrong(right, self):
        right(self)
        if self.frees_params and self._gathering is not None:
            self._gathering = None
            self._adopt_whole()


@mutant("W22", "ORDER", "Z3 B2", seen_in="class ORDER", kill="contract")
def odd_ranks_do_not_prefetch(patch: Patches) -> None:
    """Odd ranks gather nothing ahead, so that their gathers stand elsewhere among reductions."""

    @patch(OnUse, "__init__")
    def wrong(right, self, wrapped, **named):
        prefetch = 0 if dist.get_rank() % 2 else wrapped.config.prefetch
        right(self, _with(wrapped, prefetch=prefetch), **named)


@mutant("W23", "ORDER", "Z3 B2", seen_in="class ORDER")
def odd_ranks_gather_in_reverse(patch: Patches) -> None:
    """Odd ranks issue the gathers of a module's units in reverse."""

    @patch(OnUse, "_gather")
    def wrong(right, self, needed, *, ahead):
        right(self, needed[::-1] if dist.get_rank() % 2 else needed, ahead=ahead)


@mutant("W31", "EMPTY", "Z3 FZ", seen_in="class EMPTY")
def frozen_units_not_gathered(patch: Patches) -> None:
    """A unit all of whose params are frozen for now is not gathered."""

    @patch(OnUse, "_gather")
    def wrong(right, self, needed, *, ahead):
        def is_trained(unit: Unit) -> bool:
            return any(memory.param.requires_grad for memory in unit.members)

        trained = [unit for unit in needed if is_trained(unit)]
        right(self, trained, ahead=[unit for unit in ahead if is_trained(unit)])


@mutant("W33", "EMPTY", "Z3 ME DR", seen_in="class EMPTY", kill="contract")
def idle_experts_not_gathered(patch: Patches) -> None:
    """Experts to which no token was sent are not gathered, on ranks where there are such."""

    @patch(OnUse, "_before_forward")
    def wrong(right, self, needed, module, args):
        is_idle = bool(args) and isinstance(args[0], torch.Tensor) and not args[0].numel()
        right(self, () if is_idle else needed, module, args)
        if is_idle:
            self._in_use.update(needed)


@mutant("W34", "VOLUME", "Z3", seen_in="class VOLUME", kill="volume", core=True)
def gathered_after_the_step(patch: Patches) -> None:
    """After a step all units are gathered, as stages 1 and 2 do."""

    @patch(DistributedDataParallel, "start_param_gather")
    def wrong(right, self):
        right(self)
        for buffer in self.buffers:
            for unit in buffer.units if buffer.sharding.params else ():
                unit.gather()
                unit.free_params()


@mutant("W35", "VOLUME", "Z3 GA", seen_in="class VOLUME", kill="volume")
def kept_between_micro_batches(patch: Patches) -> None:
    """Whole params stay from a micro-batch to the next, and only the last frees them."""

    @patch(DistributedDataParallel, "end_micro_batch")
    def wrong(right, self, last, *, count=None):
        on_use = self.param_schedule
        if last or not self.config.sharding.params:
            right(self, last, count=count)
            return
        on_use.free_all = lambda: None
        on_use._end_gradients = on_use._grads.close
        try:
            right(self, last, count=count)
        finally:
            del on_use.free_all, on_use._end_gradients


@mutant("W39", "BUCKET", "Z3 TI B2", seen_in="class BUCKET", kill="contract", core=True)
def closed_before_the_last_user(patch: Patches) -> None:
    """A unit counts as done once backward comes to the module that used it last."""

    @patch(OnUse, "_after_forward")
    def wrong(right, self, needed, module, args, output):
        start = self._starts[-1]
        right(self, needed, module, args, output)
        for unit in needed:
            if unit in self._first_use:
                self._first_use[unit] = max(start, self._first_use[unit])


@mutant("W40", "ASYNC", "Z3 B2", seen_in="class ASYNC", kill="contract")
def closed_when_it_is_reached(patch: Patches) -> None:
    """A unit counts as done once backward comes to a module that uses it, not past it."""

    @patch(OnUse, "_unwind")
    def wrong(right, self, count):
        reached = [unit for use in self._uses[len(self._uses) - count :] for unit in use.needed]
        right(self, count)
        for unit in dict.fromkeys(reached):
            self._grads.close(unit)


@mutant("W41", "VOLUME", "Z3 B2", seen_in="class VOLUME", kill="volume")
def freed_when_it_is_reached(patch: Patches) -> None:
    """A unit is freed when backward comes to a module that uses it, and gathered once more."""

    @patch(OnUse, "_unwind")
    def wrong(right, self, count):
        reached = [unit for use in self._uses[len(self._uses) - count :] for unit in use.needed]
        right(self, count)
        for unit in dict.fromkeys(reached):
            if unit.param_state is ParamState.WHOLE:
                unit.free_params()


@mutant("W42", "VOLUME", "Z3", seen_in="class VOLUME", kill="volume")
def backward_begins_with_nothing(patch: Patches) -> None:
    """When backward begins, all units are freed, also those that stayed for it."""

    @patch(OnUse, "_before_backward")
    def wrong(right, self, use, grad):
        if not self._in_backward:
            self.free_all()
        right(self, use, grad)


@mutant("W43", "VOLUME", "Z3 B2", seen_in="class VOLUME", kill="volume")
def use_never_ends(patch: Patches) -> None:
    """A module that has run still counts as a user, so that nothing is freed after forward."""

    @patch(OnUse, "_after_forward")
    def wrong(right, self, needed, module, args, output):
        self._in_use.update(needed)
        right(self, needed, module, args, output)


@mutant("W54", "VOLUME", "Z3 B2", seen_in="class VOLUME", kill="memory")
def first_unit_stays_too(patch: Patches) -> None:
    """Between forward and backward the first unit stays, too."""

    @patch(OnUse, "_leave")
    def wrong(right, self, unit, *, has_backward):
        if not (has_backward and unit is self._units[0]):
            right(self, unit, has_backward=has_backward)


@mutant("W55", "VOLUME", "Z3 B2", seen_in="class VOLUME", kill="memory")
def one_unit_too_far_ahead(patch: Patches) -> None:
    """One unit more than was asked for is gathered ahead."""

    @patch(OnUse, "__init__")
    def wrong(right, self, wrapped, **named):
        right(self, _with(wrapped, prefetch=wrapped.config.prefetch + 1), **named)


@mutant("W56", "VOLUME", "Z3 B2", seen_in="class VOLUME", kill="memory")
def params_stay_through_backward(patch: Patches) -> None:
    """Params stay whole to the end of backward, though their gradients leave on the way."""

    @patch(OnUse, "_end_gradients")
    def wrong(right, self, unit):
        self._grads.close(unit)
        self._first_use.pop(unit, None)
        unit.finish_gather()


@mutant("W57", "ORDER", "Z3 B2 PG ME", seen_in="class ORDER")
def ahead_among_all_units(patch: Patches) -> None:
    """How far is gathered ahead counts units of experts, of which other ranks have other numbers.

    A bug of our own, found by a campaign.
    """

    @patch(OnUse, "_after_in_forward")
    def wrong_in_forward(right, self, needed):
        if not needed or not self._prefetch or self._in_backward:
            return ()
        first = max(map(self._units.index, needed)) + 1
        following = self._units[first : first + self._prefetch]
        return [unit for unit in following if self._pending[unit]]

    @patch(OnUse, "_before_in_backward")
    def wrong_in_backward(right, self, needed):
        if not needed or not self._prefetch:
            return ()
        coming = dict.fromkeys(unit for use in self._uses[::-1] for unit in use.needed)
        return [unit for unit in coming if unit not in needed][: self._prefetch]


@mutant("W58", "ORDER", "Z3 B2 PG ME", seen_in="class ORDER")
def only_the_last_unit_of_all_stays(patch: Patches) -> None:
    """Between forward and backward one unit stays, which on some ranks is one of experts."""

    @patch(OnUse, "__init__")
    def wrong(right, self, wrapped, **named):
        right(self, wrapped, **named)
        if wrapped.config.reshard_after_forward:
            self._kept = frozenset(self._units[-1:])
