"""Faults of residual memory, what is beside model states: arenas, step buffers, checkpoints."""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist

from zero_sim.layout import Span
from zero_sim.mutants.patching import Patches
from zero_sim.mutants.records import mutant
from zero_sim.zero.norm import root_of_squares
from zero_sim.zero.unit import Unit
from zero_sim.zero.variants import activations
from zero_sim.zero.variants import arena as arenas
from zero_sim.zero.variants.activations import TensorParallel
from zero_sim.zero.variants.arena import Arena, ArenaStorage
from zero_sim.zero.variants.step_buffer import StepBuffer


@mutant("F01", "VOLUME", "B2 AS Z2", seen_in="class VOLUME", kill="memory", core=True)
def all_places_at_the_front(patch: Patches) -> None:
    """Every unit's place begins at the front, so that the second has memory of its own again."""

    @patch(arenas, "plan_arena")
    def wrong(right, sizes, *, at_a_time):
        plan = right(sizes, at_a_time=at_a_time)
        return replace(plan, places=tuple(Span(0, place.numel) for place in plan.places))


@mutant("F02", "ALIAS", "B2 Z2", seen_in="class ALIAS", core=True)
def place_is_not_zeroed(patch: Patches) -> None:
    """Gradients are added to what the place in the arena was left with."""

    @patch(ArenaStorage, "acquire")
    def wrong(right, self):
        place = self._arena.take(self._place, dtype=self._dtype) if self._whole is None else None
        if place is None:
            return right(self)
        self._whole = place
        return place


@mutant("F03", "VOLUME", "Z2", seen_in="class VOLUME", kill="memory")
def place_is_never_given_back(patch: Patches) -> None:
    """What was taken once stays taken, so that the next has memory of its own."""

    @patch(Arena, "take_back")
    def wrong(right, self, span):
        return None


@mutant("F04", "ASYNC", "AS B2 Z2", seen_in="class ASYNC", kill="race")
def place_is_given_back_while_reduced(patch: Patches) -> None:
    """The place is zeroed for its next user as soon as the sum is issued."""

    @patch(Unit, "start_reduce")
    def wrong(right, self):
        right(self)
        if isinstance(self.grad_storage, ArenaStorage):
            self.grads.zero_()


@mutant("F05", "ALIAS", "B2 Z2", seen_in="class ALIAS")
def taken_twice(patch: Patches) -> None:
    """A stretch is given out once more while it is in use, as gradients come in another order."""

    @patch(Arena, "take")
    def wrong(right, self, span, *, dtype):
        in_use, self._in_use = self._in_use, []
        try:
            return right(self, span, dtype=dtype)
        finally:
            self._in_use = [*in_use, span]


@mutant("F06", "OPTST", "", seen_in="class OPTST", core=True)
def last_turn_is_not_stepped(patch: Patches) -> None:
    """What is left behind the last full step buffer is measured and never stepped."""

    @patch(StepBuffer, "_step_in_turns")
    def wrong(right, self, turns, *, norm):
        right(self, turns[:-1], norm=norm)


@mutant("F07", "NORM", "CL", seen_in="class NORM")
def norm_of_the_last_turn(patch: Patches) -> None:
    """The norm is that of the gradients which passed the step buffer last."""

    @patch(StepBuffer, "_measure_in_turns")
    def wrong(right, self, turns):
        return right(self, turns[-1:])


@mutant("F08", "ALIAS", "", seen_in="class ALIAS", core=True)
def turn_overwrites_itself(patch: Patches) -> None:
    """Every gradient is copied to the front of the step buffer, over those before it."""

    @patch(StepBuffer, "copy")
    def wrong(right, self, reduced):
        self._used = 0
        return right(self, reduced)


@mutant("F09", "VOLUME", "", seen_in="class VOLUME", kill="memory")
def all_turns_at_once(patch: Patches) -> None:
    """All gradients are made at once, whatever the step buffer holds."""

    @patch(StepBuffer, "turns")
    def wrong(right, self, masters):
        self.elems = max(self.elems, sum(master.leaf.numel() for master in masters))
        return right(self, masters)


@mutant("F10", "NORM", "CL", seen_in="class NORM")
def turns_clipped_by_their_own_norm(patch: Patches) -> None:
    """Each turn is clipped by the norm of what it holds on this rank."""

    @patch(StepBuffer, "_step_in_turns")
    def wrong(right, self, turns, *, norm):
        for turn in turns:
            own = self._optimizer._measure_own(turn, self._upcast_turn(turn))
            right(self, [turn], norm=root_of_squares(own[0]))


@mutant("F11", "SCALE", "", seen_in="class SCALE")
def second_time_unscaled_by_the_next_scale(patch: Patches) -> None:
    """Gradients made anew to be stepped are unscaled by what the scaler has grown to meanwhile."""

    @patch(StepBuffer, "_step_in_turns")
    def wrong(right, self, turns, *, norm):
        optimizer = self._optimizer
        if optimizer.loss_scaler is not None:
            optimizer._scale_of_step = optimizer.loss_scaler.scale
        right(self, turns, norm=norm)


@mutant("F12", "GROUP", "", seen_in="class GROUP", core=True)
def column_gradients_not_summed(patch: Patches) -> None:
    """The gradient of what column-parallel layers read is not summed over the ranks."""

    @patch(TensorParallel, "enter")
    def wrong(right, self, x):
        return x


@mutant("F13", "LAYOUT", "", seen_in="class LAYOUT")
def part_of_another_rank(patch: Patches) -> None:
    """Each tensor-parallel rank keeps the part of a checkpoint that the next one is to keep."""

    @patch(activations, "size_and_rank")
    def wrong(right, group):
        ranks, rank = right(group)
        return ranks, (rank + 1) % ranks


@mutant("F14", "VOLUME", "", seen_in="class VOLUME", kill="memory")
def part_keeps_the_whole(patch: Patches) -> None:
    """A part of a checkpoint is a view, which keeps the whole in memory."""

    @patch(TensorParallel, "keep")
    def wrong(right, self, x):
        kept = right(self, x)
        memory = kept.memory
        if memory is not None and memory.numel() < x.numel() and not self._offload:
            whole = memory.new_empty(x.numel())
            kept.memory = whole[: memory.numel()].copy_(memory)
        return kept


@mutant("F15", "ALIAS", "", seen_in="class ALIAS")
def checkpoint_of_the_last_block(patch: Patches) -> None:
    """All blocks are run again from the checkpoint that was kept last."""

    @patch(TensorParallel, "keep")
    def wrong(right, self, x):
        kept = right(self, x)
        if kept.memory is not None:
            for other in self._kept:
                if other.memory is not None and other.memory.numel() == kept.memory.numel():
                    other.memory.copy_(kept.memory)
        return kept


@mutant("F16", "GROUP", "", seen_in="class GROUP")
def row_gradients_summed(patch: Patches) -> None:
    """The gradient of a row-parallel sum, which each rank has whole, is summed once more."""

    @patch(TensorParallel, "leave")
    def wrong(right, self, y):
        return self.enter(right(self, y))


@mutant("F17", "VOLUME", "", seen_in="class VOLUME", kill="memory")
def checkpoints_stay(patch: Patches) -> None:
    """A checkpoint stays in memory when its block was run again."""

    @patch(TensorParallel, "bring_back")
    def wrong(right, self, kept):
        memory = kept.memory
        whole = right(self, kept)
        kept.memory = memory
        self._kept.append(kept)
        return whole


@mutant("F18", "VOLUME", "", seen_in="class VOLUME", kill="volume")
def whole_checkpoints_are_gathered(patch: Patches) -> None:
    """Checkpoints that every rank has whole are sent round all the same."""

    @patch(TensorParallel, "bring_back")
    def wrong(right, self, kept):
        whole = right(self, kept)
        if self._checkpoints == "whole" and self._group is not None:
            ranks = dist.get_world_size(self._group)
            gathered = whole.new_empty(ranks * whole.numel())
            activations.all_gather(gathered, whole.reshape(-1), group=self._group)
        return whole
