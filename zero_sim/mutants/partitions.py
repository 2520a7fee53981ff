"""Faults in partitions by rows and by owners, all-reduced units, and late gathers."""

from __future__ import annotations

from zero_sim.layout import planner
from zero_sim.layout.partition import Partition
from zero_sim.mutants.patching import Patches
from zero_sim.mutants.records import mutant
from zero_sim.zero.unit import Unit
from zero_sim.zero.variants.gathers import GatheredAfterStep
from zero_sim.zero.variants.reduce_buffers import _check_units
from zero_sim.zero.variants.root_reduce import AllReducedUnit, SummedAtFirstUnit, UnshardedSumUnit


@mutant("Q01", "LAYOUT", "NP", seen_in="class LAYOUT", kill="memory")
def rows_are_cut(patch: Patches) -> None:
    """A param sharded by rows is padded only to even shards, so a row is cut in two."""
    # A row has the elements of all dimensions after the first.
    patch[planner._row_elems, "math.prod(shape[1:])"] = "1"


@mutant("Q02", "LAYOUT", "NP", seen_in="class LAYOUT", kill="memory")
def padded_by_its_first_dim(patch: Patches) -> None:
    """Shards are padded to a multiple of the row count, not the row length."""
    patch[planner._row_elems, "math.prod(shape[1:])"] = "math.prod(shape[:1])"


@mutant("Q03", "LAYOUT", "NP", seen_in="class LAYOUT", kill="memory")
def owner_by_place_in_the_model(patch: Patches) -> None:
    """Units are assigned to owners in consecutive runs, not in turn."""
    patch[planner._plan_bucket, "index % shard_count"] = "index // shard_count % shard_count"


@mutant("Q04", "GROUP", "NP", seen_in="class GROUP", core=True)
def broadcast_from_a_neighbour(patch: Patches) -> None:
    """Params are broadcast from the rank after their owner, whose params are outdated."""
    patch[Unit.collect, "owner=_index_of(sizes)"] = "owner=(_index_of(sizes) + 1) % len(sizes)"


@mutant("Q05", "GROUP", "NP", seen_in="class GROUP", core=True)
def reduced_to_a_neighbour(patch: Patches) -> None:
    """A unit's sum arrives at the rank after its owner."""
    patch[Unit._scatter, "owner=_index_of(sizes)"] = "owner=(_index_of(sizes) + 1) % len(sizes)"


@mutant("Q06", "LAYOUT", "NP", seen_in="class LAYOUT", kill="memory")
def owner_lacks_the_last(patch: Patches) -> None:
    """If a unit has one owner, its last element is assigned to the next rank."""
    # The next rank's shard starts one element early.
    patch[Partition.start, "return self.numel"] = (
        "... - (shard == self.owner + 1 < self.shard_count)"
    )


@mutant("Q12", "VOLUME", "NP", seen_in="class VOLUME", kill="volume")
def reduced_to_owners_all_the_same(patch: Patches) -> None:
    """Gradients are reduced to their owners although an all-reduce is configured."""
    patch[UnshardedSumUnit._sum_shards, "return self.sum_all(self.grads, group=self.group,"] = (
        "return Unit._sum_shards(self,"
    )


@mutant("Q13", "GROUP", "K", seen_in="class GROUP")
def summed_to_all_ranks_twice(patch: Patches) -> None:
    """With replicas, an all-reduced shard is summed over its replicas twice."""
    # Edit the units of both `sum_by` settings: all-reduce and first rank.
    patch[Unit._sum_replicas, "return all_reduce_sum("] = """
        if hasattr(self, "sum_all"):
            all_reduce_sum(self.grad_shard, group=self.replica_group, async_op=False)
        ..."""
    patch[SummedAtFirstUnit._sum_replicas, "return sum_at_first("] = """
        sum_at_first(self.grad_shard, group=self.replica_group, async_op=False)
        ..."""


@mutant("Q15", "GROUP", "", seen_in="class GROUP", kill="refusal")
def lone_owners_are_taken_for_none(patch: Patches) -> None:
    """In a shard group of one rank, all-reduced units are refused, as if unsharded."""
    patch[AllReducedUnit.__post_init__, "self.group is None"] = "... or self.group.size() == 1"


@mutant("Q16", "GROUP", "", seen_in="class GROUP", kill="refusal")
def chunks_are_taken_for_sums(patch: Patches) -> None:
    """Reduce buffers are refused beside chunked gathers, as if these units summed differently."""
    patch[_check_units, "isinstance(unit, UnshardedSumUnit)"] = "type(unit) is not Unit"


@mutant("Q14", "ASYNC", "Z3", seen_in="class ASYNC", kill="memory")
def stays_whole_after_the_step(patch: Patches) -> None:
    """Params that are gathered once more after the step are not freed."""
    patch[GatheredAfterStep.gather, "unit.reshard()"] = "pass"
