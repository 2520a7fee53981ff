"""Faults of optimizers that look at whole params, over shards."""

from __future__ import annotations

from typing import Any

import torch

from zero_sim.mutants.patching import Patches
from zero_sim.mutants.records import mutant
from zero_sim.zero.variants import whole_params


@mutant("U01", "LAYOUT", "SP", seen_in="class LAYOUT", core=True)
def own_part_from_the_start(patch: Patches) -> None:
    """Each owner takes the first elements of what the whole param gives, in place of its own."""

    @patch(whole_params, "_of_param")
    def wrong(right, master, wholes):
        mine, place = right(master, wholes)
        return mine, slice(0, place.stop - place.start)


@mutant("U02", "OPTST", "SP", seen_in="class OPTST", kill="volume")
def part_taken_for_the_whole(patch: Patches) -> None:
    """Each owner makes its part orthogonal, or takes its norm, as if that were the whole param."""

    @patch(whole_params, "_whole_of")
    def wrong(right, optimizer, gathers, parts):
        return whole_params.leaves_are_whole(parts)


@mutant("U03", "EMPTY", "NP", seen_in="class EMPTY", kill="contract")
def gathers_only_with_a_part(patch: Patches) -> None:
    """A rank without anything in a bucket does not come to its gather."""

    @patch(whole_params, "whole_of_unit")
    def wrong(right, unit, shard):
        return right(unit, shard) if shard.any() else shard.new_zeros(unit.plan.span.numel)


@mutant("U05", "OPTST", seen_in="class OPTST")
def one_iteration_less(patch: Patches) -> None:
    """Matrices are made orthogonal in four steps."""

    @patch(whole_params, "orthogonalized")
    def wrong(right, direction, *, eps):
        module: Any = whole_params
        steps, module._NEWTON_SCHULZ_STEPS = module._NEWTON_SCHULZ_STEPS, 4
        try:
            return right(direction, eps=eps)
        finally:
            module._NEWTON_SCHULZ_STEPS = steps


@mutant("U06", "SCALE", seen_in="class SCALE")
def scaled_by_the_other_side(patch: Patches) -> None:
    """A matrix is scaled by columns over rows."""

    @patch(whole_params, "orthogonalized")
    def wrong(right, direction, *, eps):
        made = right(direction, eps=eps)
        if direction.dim() < 2 or not direction.numel():
            return made
        rows, columns = direction.shape[0], direction.numel() // direction.shape[0]
        return made * (max(1.0, columns / rows) / max(1.0, rows / columns)) ** 0.5


@mutant("U07", "LAYOUT", seen_in="class LAYOUT")
def transposed_for_good(patch: Patches) -> None:
    """A tall matrix is not transposed back."""

    @patch(whole_params, "orthogonalized")
    def wrong(right, direction, *, eps):
        made = right(direction, eps=eps)
        if direction.dim() < 2 or direction.shape[0] <= direction[0].numel():
            return made
        flat = made.reshape(direction.shape[0], -1)
        return flat.mT.contiguous().view(direction.shape)


@mutant("U08", "DTYPE", "SP", seen_in="class DTYPE")
def gathered_in_16_bits(patch: Patches) -> None:
    """What whole params are looked at for travels in bf16."""

    @patch(whole_params, "whole_of_unit")
    def wrong(right, unit, shard):
        return right(unit, shard.to(torch.bfloat16)).to(torch.float32)


@mutant("U09", "LAYOUT", seen_in="class LAYOUT", core=True)
def whole_of_the_first_param(patch: Patches) -> None:
    """Every param of a bucket is looked for at the bucket's start."""

    @patch(whole_params, "_of_param")
    def wrong(right, master, wholes):
        at = master.buffer.memory[master.param].in_unit.start
        return right(master, [whole.roll(at) for whole in wholes])


@mutant("U10", "OPTST", "PG", seen_in="class OPTST")
def first_group_for_all(patch: Patches) -> None:
    """All params are moved by the settings of the first param group."""

    @patch(whole_params, "_groups_of")
    def wrong(right, optimizer):
        return dict.fromkeys(right(optimizer), optimizer.param_groups[0])


@mutant("U11", "NORM", seen_in="class NORM")
def ratio_of_squares(patch: Patches) -> None:
    """A step is as long as the squared norm of its param says."""

    @patch(whole_params, "trust_ratio")
    def wrong(right, weights, direction):
        return right(weights, direction) ** 2
