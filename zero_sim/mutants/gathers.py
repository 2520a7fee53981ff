"""Faults in gathering and freeing sharded params: too often, too early, or never.

The constants are source fragments that several mutants edit.
"""

from __future__ import annotations

from zero_sim.mutants.patching import Patches
from zero_sim.mutants.records import mutant
from zero_sim.zero.data_parallel import DistributedDataParallel
from zero_sim.zero.gathers import OnUse
from zero_sim.zero.optimizer import DistributedOptimizer
from zero_sim.zero.unit import Unit

_IS_WHOLE = "unit.param_state is ParamState.WHOLE"
_KEPT = "last if wrapped.config.reshard_after_forward else units"
_ALL_ISSUED = "for unit in (*needed, *ahead):"
_AHEAD = "line[first : first + self._prefetch] if self._pending[unit]"
_GATHER_IN_BACKWARD = "self._gather(use.needed, ahead=self._before_in_backward(use.needed))"


@mutant("W01", "VOLUME", "Z3 B2", seen_in="class VOLUME", kill="volume", core=True)
def not_freed_after_forward(patch: Patches) -> None:
    """Units are not freed after forward, so backward finds them unsharded."""
    patch[OnUse._leave, "has_backward and unit in self._kept"] = "True"


@mutant("W02", "VOLUME", "Z3 B2", seen_in="class VOLUME", kill="volume", core=True)
def freed_by_the_first_user(patch: Patches) -> None:
    """A unit is freed after its first user and gathered again for the next."""
    patch[OnUse._after_forward, "self._pending[unit].discard(module)"] = (
        "self._pending[unit].clear()"
    )


@mutant("W03", "ASYNC", "Z3 B2", seen_in="class ASYNC", kill="volume")
def freed_while_in_use(patch: Patches) -> None:
    """A module frees its units at its end, although an enclosing module still uses them."""
    # Reset the user count first, because `reshard` would refuse a unit in use.
    patch[OnUse._after_forward, "if is_outermost and self._saving"] = """
        for unit in needed if not is_outermost else ():
            if unit.param_state in (ParamState.WHOLE, ParamState.IN_USE):
                unit.param_state, unit._users = ParamState.WHOLE, 0
                unit.reshard()
        ..."""


@mutant("W04", "ALIAS", "Z3", seen_in="class ALIAS", kill="contract")
def freed_twice(patch: Patches) -> None:
    """At the end of backward every unit is freed, unsharded or not."""
    patch[OnUse.reshard_all, _IS_WHOLE] = "True"


@mutant("W05", "ASYNC", "Z3", seen_in="class ASYNC", core=True)
def forward_does_not_gather(patch: Patches) -> None:
    """The last unit is not gathered before a module uses it."""
    # The module then reads placeholders.
    patch[OnUse._before_forward, "self._gather(needed"] = """
        self._gather([unit for unit in needed if unit is not self._units[-1]]"""


@mutant("W06", "VOLUME", "Z3 B2", seen_in="class VOLUME", kill="volume")
def backward_does_not_gather(patch: Patches) -> None:
    """Backward only gathers units whose tensors autograd saved."""
    patch[OnUse._unwind, _GATHER_IN_BACKWARD] = "pass"


@mutant("W07", "ALIAS", "Z3", seen_in="class ALIAS", core=True)
def kept_without_its_place(patch: Patches) -> None:
    """A saved view of a unit is restored at the unit's start."""
    patch[OnUse._restore, "kept.offset"] = "0"


@mutant("W08", "LAYOUT", "Z3", seen_in="class LAYOUT")
def kept_without_its_strides(patch: Patches) -> None:
    """A saved view of a unit is restored as if it were contiguous."""
    patch[OnUse._restore, "whole.as_strided(kept.size, kept.stride, kept.offset)"] = """
        whole[kept.offset :][: torch.Size(kept.size).numel()].view(kept.size)"""


@mutant("W09", "ALIAS", "Z3 S2", seen_in="class ALIAS", core=True)
def whole_params_kept_over_a_step(patch: Patches) -> None:
    """Unsharded params stay after backward, so the next forward uses outdated params."""
    # Disable both places that free units.
    patch[OnUse.reshard_all, _IS_WHOLE] = "False"
    patch[OnUse._end_gradients, _IS_WHOLE] = "False"


@mutant("W11", "VOLUME", "Z3 IN", seen_in="class VOLUME", kill="volume")
def gathered_where_a_step_was_skipped(patch: Patches) -> None:
    """After a skipped step all units are gathered and freed again."""
    # A skipped step changes no params, so only the volume shows the fault.
    patch[DistributedOptimizer.step, "return StepResult("] = """
        for buffer in self.ddp.buffers if skipped else ():
            for unit in buffer.units if buffer.sharding.params else ():
                unit.gather()
                unit.reshard()
        ..."""


@mutant("W12", "VOLUME", "Z3", seen_in="class VOLUME", kill="volume", core=True)
def last_unit_freed_after_forward(patch: Patches) -> None:
    """The last unit is freed after forward as well, so backward must gather it again."""
    # By default the last unit is kept, because backward needs it first.
    patch[OnUse.__init__, _KEPT] = "() if wrapped.config.reshard_after_forward else units"


@mutant("W13", "VOLUME", "Z3 B2", seen_in="class VOLUME", kill="volume")
def freed_though_it_should_stay(patch: Patches) -> None:
    """Params are freed after forward even if `reshard_after_forward` is off."""
    patch[OnUse.__init__, _KEPT] = "last"


@mutant("W14", "VOLUME", "Z3 B2", seen_in="class VOLUME", kill="volume")
def never_freed_after_forward(patch: Patches) -> None:
    """Params stay between forward and backward regardless of `reshard_after_forward`."""
    patch[OnUse.__init__, _KEPT] = "units"


@mutant("W15", "VOLUME", "Z3 B2", seen_in="class VOLUME", kill="volume")
def first_unit_stays(patch: Patches) -> None:
    """The first unit stays between forward and backward instead of the last."""
    patch[OnUse.__init__, _KEPT] = "units[:1] if wrapped.config.reshard_after_forward else units"


@mutant("W16", "VOLUME", "Z3 B2", seen_in="class VOLUME", kill="volume", core=True)
def prefetched_behind(patch: Patches) -> None:
    """Forward prefetches units that precede the unit in use."""
    # `min` instead of `max` gives earlier positions.
    patch[OnUse._after_in_forward, "first = max("] = "first = min("
    patch[OnUse._after_in_forward, _AHEAD] = "line[max(0, first - 1 - self._prefetch) : first - 1]"


@mutant("W18", "ASYNC", "Z3 AS B2", seen_in="class ASYNC", kill="race", core=True)
def prefetched_and_not_waited_for(patch: Patches) -> None:
    """Prefetched units are used without waiting for their gathers."""
    patch[OnUse._gather, _ALL_ISSUED] = """
        for unit in needed:
            unit._gathering = None
        ..."""


@mutant("W19", "VOLUME", "Z3 B2", seen_in="class VOLUME", kill="volume")
def gathered_by_every_module(patch: Patches) -> None:
    """Every module gathers its units, even if they are already unsharded."""
    # Another gather only changes the volume, no value.
    patch[OnUse._gather, _ALL_ISSUED] = """
        for unit in needed:
            unit.gather()
        ..."""


@mutant("W20", "ASYNC", "Z3 AS B2", seen_in="Megatron-LM#6388")
def only_the_first_unit_waited_for(patch: Patches) -> None:
    """A module waits only for the first unit that it reads."""
    patch[OnUse._gather, "for unit in needed:"] = "for unit in needed[:1]:"


@mutant("W21", "ASYNC", "Z3 AS", seen_in="class ASYNC", kill="race")
def whole_when_it_is_issued(patch: Patches) -> None:
    """Params count as unsharded when their gather is issued."""
    # Params then point at memory that the gather still writes.
    patch[Unit.start_gather, "self._gathering = self._gather_shards(async_op=True)"] = """
        ...
        if self.frees_params and self.gathering:
            self._gathering = None
            self._adopt_unsharded()"""


@mutant("W22", "ORDER", "Z3 B2", seen_in="class ORDER", kill="contract")
def odd_ranks_do_not_prefetch(patch: Patches) -> None:
    """Odd ranks do not prefetch, so their gathers and reductions interleave differently."""
    # The factor is 0 on odd ranks.
    patch[OnUse.__init__, "self._prefetch = wrapped.config.prefetch"] = (
        "... * (1 - dist.get_rank() % 2)"
    )


@mutant("W23", "ORDER", "Z3 B2", seen_in="class ORDER")
def odd_ranks_gather_in_reverse(patch: Patches) -> None:
    """Odd ranks gather a module's units in reverse order."""
    patch[OnUse._gather, _ALL_ISSUED] = """
        needed = needed[:: -1 if dist.get_rank() % 2 else 1]
        ..."""


@mutant("W31", "EMPTY", "Z3 FZ", seen_in="class EMPTY")
def frozen_units_not_gathered(patch: Patches) -> None:
    """A unit is not gathered if all its params are temporarily frozen."""
    # Filter both lists: the units that the module needs, and the units to prefetch.
    patch[OnUse._gather, _ALL_ISSUED] = """
        needed, ahead = (
            [unit for unit in units if any(each.param.requires_grad for each in unit.members)]
            for units in (needed, ahead)
        )
        ..."""


@mutant("W33", "EMPTY", "Z3 ME DR", seen_in="class EMPTY", kill="contract")
def idle_experts_not_gathered(patch: Patches) -> None:
    """Experts that receive no tokens are not gathered on that rank."""
    # An idle expert's input has no elements. Other ranks still gather, so the calls mismatch.
    patch[OnUse._before_forward, "self._gather(needed,"] = """
        if not args or not isinstance(args[0], Tensor) or args[0].numel():
            ..."""


@mutant("W34", "VOLUME", "Z3", seen_in="class VOLUME", kill="volume", core=True)
def gathered_after_the_step(patch: Patches) -> None:
    """After a step all units are gathered, as stages 1 and 2 do."""
    # Free them again, so that only the volume shows the fault.
    patch[OnUse.gather, "self.reshard_all()"] = """
        ...
        for unit in (unit for buffer in self._gathered for unit in buffer.units):
            unit.gather()
            unit.reshard()"""


@mutant("W35", "VOLUME", "Z3 GA", seen_in="class VOLUME", kill="volume")
def kept_between_micro_batches(patch: Patches) -> None:
    """Unsharded params are kept between micro-batches; only the last micro-batch frees them."""
    # Instance attributes shadow the methods during this call.
    patch[DistributedDataParallel.end_micro_batch, "self.param_schedule.finish_backward()"] = """
        on_use = self.param_schedule
        if not last and self.config.sharding.params:
            on_use.reshard_all, on_use._end_gradients = (lambda: None), on_use._grads.close
        ...
        for name in ("reshard_all", "_end_gradients"):
            vars(on_use).pop(name, None)"""


@mutant("W39", "BUCKET", "Z3 TI B2", seen_in="class BUCKET", kill="contract", core=True)
def closed_before_the_last_user(patch: Patches) -> None:
    """A unit is closed when backward reaches the module that used it last."""
    patch[OnUse._after_forward, "min(start, self._first_use"] = "max(start, self._first_use"


@mutant("W40", "ASYNC", "Z3 B2", seen_in="class ASYNC", kill="contract")
def closed_when_it_is_reached(patch: Patches) -> None:
    """A unit is closed when backward reaches a module that uses it, not after that module."""
    patch[OnUse._unwind, _GATHER_IN_BACKWARD] = """
        ...
        for unit in use.needed:
            self._grads.close(unit)"""


@mutant("W41", "VOLUME", "Z3 B2", seen_in="class VOLUME", kill="volume")
def freed_when_it_is_reached(patch: Patches) -> None:
    """A unit is freed when backward reaches a module that uses it, and then gathered again."""
    patch[OnUse._unwind, _GATHER_IN_BACKWARD] = f"""
        ...
        for unit in use.needed:
            if {_IS_WHOLE}:
                unit.reshard()"""


@mutant("W42", "VOLUME", "Z3", seen_in="class VOLUME", kill="volume")
def backward_begins_with_nothing(patch: Patches) -> None:
    """All units are freed when backward begins, including units kept for backward."""
    patch[OnUse._before_backward, "self._in_backward = True"] = """
        if not self._in_backward:
            self.reshard_all()
        ..."""


@mutant("W43", "VOLUME", "Z3 B2", seen_in="class VOLUME", kill="volume")
def use_never_ends(patch: Patches) -> None:
    """A module that has run still counts as a user, so nothing is freed after forward."""
    # Reset the user counts at the end, because the final free would be refused.
    patch[OnUse._after_forward, "unit.leave()"] = "pass"
    for function in (OnUse.reshard_all, OnUse._end_gradients):
        patch[function, "unit.finish_gather()"] = """
            ...
            if unit.param_state is ParamState.IN_USE:
                unit.param_state, unit._users = ParamState.WHOLE, 0"""


@mutant("W54", "VOLUME", "Z3 B2", seen_in="class VOLUME", kill="memory")
def first_unit_stays_too(patch: Patches) -> None:
    """The first unit also stays between forward and backward."""
    patch[OnUse._leave, "unit in self._kept"] = "unit in {*self._kept, self._units[0]}"


@mutant("W55", "VOLUME", "Z3 B2", seen_in="class VOLUME", kill="memory")
def one_unit_too_far_ahead(patch: Patches) -> None:
    """One unit too many is prefetched."""
    patch[OnUse.__init__, "self._prefetch = wrapped.config.prefetch"] = "... + 1"


@mutant("W56", "VOLUME", "Z3 B2", seen_in="class VOLUME", kill="memory")
def params_stay_through_backward(patch: Patches) -> None:
    """Params stay unsharded until backward ends, although gradients are freed earlier."""
    patch[OnUse._end_gradients, _IS_WHOLE] = "False"


@mutant("W57", "ORDER", "Z3 B2 PG ME", seen_in="class ORDER")
def ahead_among_all_units(patch: Patches) -> None:
    """The prefetch distance counts expert units, whose number differs between ranks.

    A campaign found this bug in our own system.
    """
    patch[OnUse._after_in_forward, "line = self._of_group[group]"] = "line = self._units"
    patch[OnUse._before_in_backward, "if unit.group is group and"] = "if"


@mutant("W58", "ORDER", "Z3 B2 PG ME", seen_in="class ORDER")
def only_the_last_unit_of_all_stays(patch: Patches) -> None:
    """A single unit stays after forward; on some ranks this unit holds experts."""
    patch[OnUse.__init__, _KEPT] = "units[-1:] if wrapped.config.reshard_after_forward else units"


_HAS_BACKWARD = "torch.is_grad_enabled() or self._saving is not None"
_WATCH_AGAIN = "self._watch_again(module, output)"


@mutant("W60", "ASYNC", "Z3", seen_in="class ASYNC", kill="refusal")
def reentrant_checkpoints_go_unseen(patch: Patches) -> None:
    """A forward without gradients does not count as a use, so reentrant checkpoints are missed."""
    patch[OnUse._after_forward, _HAS_BACKWARD] = "torch.is_grad_enabled()"


@mutant("W61", "ASYNC", "Z3", seen_in="class ASYNC", kill="refusal")
def gradients_end_with_the_second_forward(patch: Patches) -> None:
    """A module that a checkpoint recomputes ends its gradients before they arrive."""
    patch[OnUse._after_forward, _WATCH_AGAIN] = """
        for unit in needed:
            self._end_gradients(unit)"""


@mutant("W62", "ACCUM", "Z3", seen_in="class ACCUM")
def counted_for_each_forward(patch: Patches) -> None:
    """A reentrant checkpoint's output gradient counts once per forward."""
    patch[OnUse._watch_again, "on_gradients_of(output, partial(self._before_backward, use))"] = """
        ...
        on_gradients_of(output, lambda grad: grad + grad)"""
