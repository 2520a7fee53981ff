"""Faults of who holds what: shards over all ranks, parts of a model, experts, and their groups."""

from __future__ import annotations

from zero_sim.mutants.patching import Patches
from zero_sim.mutants.records import mutant
from zero_sim.zero import buffer as buffers
from zero_sim.zero import groups
from zero_sim.zero.buffer import Buffer
from zero_sim.zero.optimizer import DistributedOptimizer
from zero_sim.zero.unit import Unit


@mutant("G07", "GROUP", "DR", seen_in="class GROUP", core=True)
def nothing_summed_without_shards(patch: Patches) -> None:
    """Where nothing is sharded, gradients are not summed over ranks."""
    patch[Unit._sum_replicas, "not self._has_replica_sum"] = "... or self.group is None"


@mutant("G08", "GROUP", "ME", seen_in="Megatron-LM#6080")
def experts_sharded_over_all(patch: Patches) -> None:
    """Experts are sharded over all ranks, though each rank holds only some of them."""
    patch[groups.build_expert_groups, "if expert_parallel > 1:"] = "if False:"


@mutant("G09", "GROUP", "", seen_in="class GROUP", kill="contract")
def parts_meet_at_other_places(patch: Patches) -> None:
    """The ranks that put the norms of a model's parts together are not at one place in them."""
    patch[groups.build_model_parallel_group, "rank = dist.get_rank()"] = """
        ...
        following = [*places[1:], *places[:1]]
        places = [(first, *others) for (first, *_), (_, *others) in zip(places, following)]"""


@mutant("H12", "GROUP", "K", seen_in="class GROUP")
def parts_of_a_block_not_spread(patch: Patches) -> None:
    """With the state over all ranks a block is gathered without what its copies own of it."""
    patch[Unit.start_spread, "self.part_count > 1"] = "False"


@mutant("H13", "ASYNC", "AS K", seen_in="class ASYNC", kill="race")
def spread_not_waited_for(patch: Patches) -> None:
    """Nobody waits until the parts of a block are together."""
    patch[Unit.finish_spread, "self._spreading.wait()"] = "pass"


@mutant("H14", "LAYOUT", "K", seen_in="class LAYOUT")
def shards_block_by_block(patch: Patches) -> None:
    """With the state over all ranks, shards are dealt to one block after the other."""
    patch[buffers._find_own_shard, "place * parts + part"] = "part * places + place"


@mutant("H15", "LAYOUT", "K NP", seen_in="DeepSpeed#1422")
def uneven_parts_in_reverse(patch: Patches) -> None:
    """The parts of a block are taken to grow in length where they shrink."""
    patch[Unit.__post_init__, "self._block_sizes = parts[place]"] = "...[::-1]"


@mutant("H16", "GROUP", "K Z3", seen_in="class GROUP", core=True)
def sharded_params_not_spread(patch: Patches) -> None:
    """After a step nobody brings the parts of sharded params together that several ranks own."""
    patch[Buffer.spread_params, "unit.start_spread()"] = "pass"


@mutant("Z05", "ALIAS", "", seen_in="silent data corruption")
def one_bit_on_one_rank(patch: Patches) -> None:
    """After each step the last rank flips the lowest bit of one element of a working param."""
    patch[DistributedOptimizer.step, "return StepResult("] = """
        data = self.ddp.buffers[-1].param_data
        if data is not None and self.ddp.rank == self.ddp.world_size - 1:
            self.ddp.finish_param_gather()
            data.view(torch.uint8)[0] ^= 1
        ..."""
