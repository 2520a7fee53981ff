"""Faults in ownership: parts of a model, experts, replicas, and their groups."""

from __future__ import annotations

from zero_sim.mutants.patching import Patches
from zero_sim.mutants.records import mutant
from zero_sim.zero.buffer import Buffer
from zero_sim.zero.data_parallel import DistributedDataParallel
from zero_sim.zero.optimizer import DistributedOptimizer
from zero_sim.zero.unit import Unit
from zero_sim.zero.variants.model_groups import build_expert_groups, build_model_parallel_group


@mutant("G07", "GROUP", "DR", seen_in="class GROUP", core=True)
def nothing_summed_without_shards(patch: Patches) -> None:
    """Without sharding, gradients are not summed over ranks."""
    patch[Unit._sum_replicas, "not self._has_replica_sum"] = "... or self.group is None"


@mutant("G08", "GROUP", "ME", seen_in="Megatron-LM#6080")
def experts_sharded_over_all(patch: Patches) -> None:
    """Experts are sharded over all ranks, although each rank holds only some of them."""
    patch[build_expert_groups, "if expert_parallel > 1:"] = "if False:"


@mutant("G09", "GROUP", "", seen_in="class GROUP", kill="contract")
def parts_meet_at_other_places(patch: Patches) -> None:
    """Norms of a model's parts are summed over ranks with different positions in their parts."""
    # Shift the position by one in all parts but the first.
    patch[build_model_parallel_group, "rank = dist.get_rank()"] = """
        ...
        following = [*places[1:], *places[:1]]
        places = [(first, *others) for (first, *_), (_, *others) in zip(places, following)]"""


@mutant("Z05", "ALIAS", "", seen_in="silent data corruption")
def one_bit_on_one_rank(patch: Patches) -> None:
    """After each step, the last rank flips the lowest bit of an element in a working param."""
    # Finish the gather first, because it would overwrite the flipped bit.
    patch[DistributedOptimizer.step, "return StepResult("] = """
        data = self.ddp.buffers[-1].param_data
        if data is not None and self.ddp.rank == self.ddp.group.size() - 1:
            self.ddp.finish_param_gather()
            data.view(torch.uint8)[0] ^= 1
        ..."""


_BUILT_BUFFERS = "if broadcast_params:"


@mutant("H01", "GROUP", "K DR Z2", seen_in="verl#7493", core=True)
def copies_not_summed(patch: Patches) -> None:
    """The sum of sharded gradients over replicas is omitted."""
    patch[Unit._has_replica_sum, "self.replica_group is not None"] = "not self.frees_grads and ..."


@mutant("H02", "ACCUM", "K GA DR Z2", seen_in="PyTorch#125484")
def copies_of_the_first_sum_only(patch: Patches) -> None:
    """Only the first micro-batch's sum enters the sum over replicas."""
    patch[Unit._has_replica_sum, "self.replica_group is not None"] = """
        not (self.frees_grads and self._has_sum) and ..."""


@mutant("H03", "ACCUM", "K GA Z2", seen_in="PyTorch#125484", core=True)
def sums_summed_again(patch: Patches) -> None:
    """The sum over replicas takes all sums so far instead of this micro-batch's sum."""
    # Over n replicas, this adds the earlier total n times instead of once.
    patch[Unit._end_reduce, "self.accumulate_sum(is_first=not self._has_sum)"] = """
        before = self.grad_total.clone()
        ...
        if self._has_sum and self.group is not None and self._has_replica_sum:
            self.grad_total.add_(before, alpha=self.replica_group.size() - 1)"""


@mutant("H04", "GROUP", "K Z2", seen_in="class GROUP")
def groups_exchanged(patch: Patches) -> None:
    """If shard group and replica group have equal sizes, a unit's two groups are exchanged."""
    # Groups of different sizes would mismatch in their calls, not in values.
    patch[DistributedDataParallel.__init__, _BUILT_BUFFERS] = """
        for unit in (unit for buffer in self.buffers for unit in buffer.units):
            group, copies = unit.group, unit.replica_group
            if unit.frees_grads and copies is not None and copies.size() == group.size():
                unit.groups = KindGroups(group=dense.group, shard_group=copies, replica_group=group)
        ..."""


@mutant("H05", "GROUP", "K Z3", seen_in="class GROUP")
def gathered_from_the_copies(patch: Patches) -> None:
    """If shard group and replica group have equal sizes, params are gathered over the latter."""
    # Groups of different sizes would mismatch in their calls, not in values.
    patch[Unit.collect, "group = self.group"] = """
        group, copies = self.group, self.replica_group
        if self.frees_params and copies is not None and copies.size() == group.size():
            group = copies"""


@mutant("H06", "GROUP", "K Z3", seen_in="class GROUP", kill="contract")
def gathered_over_all_ranks(patch: Patches) -> None:
    """Params are gathered over all ranks instead of the shard group."""
    patch[Unit.collect, "group = self.group"] = """
        is_split = self.frees_params and self.replica_group
        group = dist.group.WORLD if is_split else self.group"""


@mutant("H07", "GROUP", "ME Z2", seen_in="Megatron-LM#6080", kill="contract")
def experts_over_the_dense_block(patch: Patches) -> None:
    """Sharded expert gradients are reduced over the dense params' shard group."""
    # Replace only the shard group, and only of units whose gradients are sharded.
    patch[DistributedDataParallel.__init__, _BUILT_BUFFERS] = """
        for buffer in self.buffers:
            for unit in buffer.units if buffer.plan.key.kind == "expert" else ():
                if unit.frees_grads:
                    unit.groups = KindGroups(
                        group=unit.groups.group,
                        shard_group=dense.shard_group,
                        replica_group=unit.replica_group,
                    )
        ..."""


@mutant("H08", "ASYNC", "AS K Z2", seen_in="DeepSpeed#5545", kill="race")
def copies_summed_too_early(patch: Patches) -> None:
    """The sum over replicas is issued before the sum over the shard group has completed."""
    # Wait for the first sum after the second call, so only the order is wrong.
    patch[Unit.chain_reduce, "self._wait_reduce()"] = """
        if self.frees_grads:
            first, self._reducing = self._reducing, self._sum_replicas(async_op=True)
            first.wait()
            return
        ..."""


@mutant("W59", "ORDER", "K DR B2", seen_in="class ORDER")
def empty_parts_end_no_sum(patch: Patches) -> None:
    """A rank with an empty part of a unit does not finish the first sum before the second."""
    # A campaign found this bug in our own system: a root-reduced sum ends with a call of all ranks.
    patch[Unit.chain_reduce, "self.replica_group is not None"] = "self._has_replica_sum"


@mutant("H09", "VOLUME", "K Z2", seen_in="class VOLUME", kill="volume")
def copies_sum_whole_units(patch: Patches) -> None:
    """Replicas sum unsharded units, although each rank's shard would suffice."""
    patch[Unit._sum_replicas, "assert self.replica_group is not None"] = """
        if self.frees_grads:
            return all_reduce_sum(self.grads, group=self.replica_group, async_op=async_op)"""


@mutant("H10", "GROUP", "K Z3", seen_in="class GROUP")
def copies_not_written(patch: Patches) -> None:
    """Only the first shard group writes new values to its param shards."""
    # Rank 0 of a replica group belongs to the first shard group.
    patch[Buffer.write_param_shard, "self._cast.write_("] = """
        unit = memory.unit
        copies = unit.replica_group if unit is not None and unit.frees_params else None
        if copies is not None and copies.rank() > 0:
            return
        ..."""


@mutant("H11", "GROUP", "K Z2", seen_in="PyTorch#155903", core=True)
def copies_summed_twice(patch: Patches) -> None:
    """Sharded gradients are summed over replicas twice."""
    patch[Unit._sum_replicas, "assert self.replica_group is not None"] = """
        if self.frees_grads:
            all_reduce_sum(self.grad_shard, group=self.replica_group)"""
