"""Faults in memory besides model states: arenas, step buffers, activation checkpoints."""

from __future__ import annotations

from zero_sim.layout import plan_arena
from zero_sim.mutants.patching import Patches
from zero_sim.mutants.records import mutant
from zero_sim.zero.unit import Unit
from zero_sim.zero.variants.activations import TensorParallel
from zero_sim.zero.variants.arena import Arena, ArenaStorage
from zero_sim.zero.variants.step_buffer import StepBuffer


@mutant("F01", "VOLUME", "B2 AS Z2", seen_in="class VOLUME", kill="memory", core=True)
def all_places_at_the_front(patch: Patches) -> None:
    """All units are placed at the arena's front, so the second unit needs separate memory."""
    patch[plan_arena, "Span(start, start + own)"] = "Span(0, own)"


@mutant("F02", "ALIAS", "B2 Z2", seen_in="class ALIAS", core=True)
def place_is_not_zeroed(patch: Patches) -> None:
    """Gradients are added to the arena's previous content."""
    patch[ArenaStorage.acquire, "place.zero_()"] = "place"


@mutant("F03", "VOLUME", "Z2", seen_in="class VOLUME", kill="memory")
def place_is_never_given_back(patch: Patches) -> None:
    """Arena memory is never returned, so later users need separate memory."""
    patch[Arena.take_back, "self._in_use.remove(span)"] = "pass"


@mutant("F04", "ASYNC", "AS B2 Z2", seen_in="class ASYNC", kill="race")
def place_is_given_back_while_reduced(patch: Patches) -> None:
    """A unit's place in the arena is zeroed for the next unit once its sum is issued."""
    # By name, because `Unit`'s module does not import this variant.
    patch[Unit.start_reduce, "self._chained = False"] = """
        ...
        if type(self.grad_storage).__name__ == "ArenaStorage":
            self.grads.zero_()"""


@mutant("F05", "ALIAS", "B2 Z2", seen_in="class ALIAS")
def taken_twice(patch: Patches) -> None:
    """A stretch of the arena is used twice if gradients arrive in another order."""
    patch[Arena.take, "for other in self._in_use"] = "for other in ()"


@mutant("F06", "OPTST", "", seen_in="class OPTST", core=True)
def last_turn_is_not_stepped(patch: Patches) -> None:
    """The gradients in the last, partly filled step buffer are measured but not stepped."""
    patch[StepBuffer._step_in_turns, "for turn in turns:"] = "for turn in turns[:-1]:"


@mutant("F07", "NORM", "CL", seen_in="class NORM")
def norm_of_the_last_turn(patch: Patches) -> None:
    """The norm covers only the step buffer's last turn."""
    patch[StepBuffer._measure_in_turns, "for turn in turns:"] = "for turn in turns[-1:]:"


@mutant("F08", "ALIAS", "", seen_in="class ALIAS", core=True)
def turn_overwrites_itself(patch: Patches) -> None:
    """Every gradient is copied to the step buffer's start, over the earlier gradients."""
    patch[StepBuffer.copy, "self._used, self._used + reduced.numel()"] = "0, reduced.numel()"


@mutant("F09", "VOLUME", "", seen_in="class VOLUME", kill="memory")
def all_turns_at_once(patch: Patches) -> None:
    """All gradients are created at once, regardless of the step buffer's size."""
    # The step buffer grows to the size of all masters, so a single turn takes all gradients.
    patch[StepBuffer.turns, "held = self.elems + 1"] = """
        self.elems = max(self.elems, sum(master.leaf.numel() for master in masters))
        ..."""


@mutant("F10", "NORM", "CL", seen_in="class NORM")
def turns_clipped_by_their_own_norm(patch: Patches) -> None:
    """Each turn is clipped by its local norm."""
    # `_measure_own` returns the local sum of squares first.
    patch[StepBuffer._step_in_turns, "norm=norm"] = """
        norm=optimizer._measure_own(turn, grads)[0].sqrt().to(norm.dtype)"""


@mutant("F11", "SCALE", "", seen_in="class SCALE")
def second_time_unscaled_by_the_next_scale(patch: Patches) -> None:
    """Gradients created again for the step are unscaled by the next step's scale."""
    # The scaler has been updated between the two passes over the gradients.
    patch[StepBuffer._step_in_turns, "for turn in turns:"] = """
        if optimizer.loss_scaler is not None:
            optimizer._scale_of_step = optimizer.loss_scaler.scale
        ..."""


@mutant("F12", "GROUP", "", seen_in="class GROUP", core=True)
def column_gradients_not_summed(patch: Patches) -> None:
    """Column-parallel layers do not sum their input gradient over the ranks."""
    # Backward then skips the all-reduce.
    patch[TensorParallel.enter, "self._group is None"] = "True"


@mutant("F13", "LAYOUT", "", seen_in="class LAYOUT")
def part_of_another_rank(patch: Patches) -> None:
    """Each tensor-parallel rank keeps the next rank's part of a checkpoint."""
    patch[TensorParallel.keep, "own = flat["] = """
        rank = (rank + 1) % ranks
        ..."""


@mutant("F14", "VOLUME", "", seen_in="class VOLUME", kill="memory")
def part_keeps_the_whole(patch: Patches) -> None:
    """A partitioned checkpoint is a view, so it keeps the unpartitioned memory alive."""
    # The part is a view of a new tensor with full length.
    patch[TensorParallel.keep, "flat.new_zeros(each)"] = "flat.new_zeros(flat.numel())[:each]"


@mutant("F15", "ALIAS", "", seen_in="class ALIAS")
def checkpoint_of_the_last_block(patch: Patches) -> None:
    """All blocks are recomputed from the last checkpoint."""
    # A checkpoint can only overwrite a checkpoint of equal size.
    patch[TensorParallel.keep, "self._kept.append(kept)"] = """
        ...
        for other in self._kept:
            if other.memory is not None and other.memory.numel() == memory.numel():
                other.memory.copy_(memory)"""


@mutant("F16", "GROUP", "", seen_in="class GROUP")
def row_gradients_summed(patch: Patches) -> None:
    """The gradient of a row-parallel sum, complete on every rank, is summed again."""
    # `enter` adds a sum over ranks to backward.
    patch[TensorParallel.leave, "_applied(_Leave, y, self._group)"] = "self.enter(...)"


@mutant("F17", "VOLUME", "", seen_in="class VOLUME", kill="memory")
def checkpoints_stay(patch: Patches) -> None:
    """A checkpoint stays in memory after its block is recomputed."""
    patch[TensorParallel.bring_back, "kept.memory = None\nself._kept.remove(kept)"] = "pass"


@mutant("F18", "VOLUME", "", seen_in="class VOLUME", kill="volume")
def whole_checkpoints_are_gathered(patch: Patches) -> None:
    """Unpartitioned checkpoints are gathered anyway."""
    # Drop the result, so that only the volume changes.
    patch[TensorParallel.bring_back, "return part.view(kept.shape)"] = """
        if self._checkpoints == "whole" and self._group is not None:
            ranks, _ = size_and_rank(self._group)
            all_gather(part.new_empty(ranks * part.numel()), part, group=self._group)
        ..."""
