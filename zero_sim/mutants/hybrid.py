"""Faults of shards that are held in copies: sums over copies, and gathers inside a block."""

from __future__ import annotations

import torch.distributed as dist

from zero_sim.mutants.patching import Patches
from zero_sim.mutants.records import mutant
from zero_sim.zero import unit as units
from zero_sim.zero.buffer import Buffer
from zero_sim.zero.buffered_module import BufferedModule
from zero_sim.zero.unit import Unit


@mutant("H01", "GROUP", "K DR Z2", seen_in="verl#7493", core=True)
def copies_not_summed(patch: Patches) -> None:
    """Where gradients are sharded, the sum over copies is left out."""

    @patch(Unit, "_has_replica_sum")
    def wrong(right, self):
        return right(self) and not self.frees_grads


@mutant("H02", "ACCUM", "K GA DR Z2", seen_in="PyTorch#125484")
def copies_of_the_first_sum_only(patch: Patches) -> None:
    """Only the sum of the first micro-batch goes into the sum over copies."""

    @patch(Unit, "_has_replica_sum")
    def wrong(right, self):
        return right(self) and not (self.frees_grads and self._has_sum)


@mutant("H03", "ACCUM", "K GA Z2", seen_in="PyTorch#125484", core=True)
def sums_summed_again(patch: Patches) -> None:
    """What goes into the sum over copies are all sums so far, not the one of this micro-batch."""

    @patch(Unit, "_end_reduce")
    def wrong(right, self):
        before = self.grad_total.clone() if self.frees_grads and self._has_sum else None
        right(self)
        if before is not None and self.group is not None and self._has_replica_sum:
            self.grad_total.add_(before, alpha=self.replica_group.size() - 1)


@mutant("H04", "GROUP", "K Z2", seen_in="class GROUP")
def groups_exchanged(patch: Patches) -> None:
    """Where there are as many copies as shards, the two groups of a unit change places."""

    @patch(BufferedModule, "_build_buffer")
    def wrong(right, self, plan):
        buffer = right(self, plan)
        for unit in buffer.units if buffer.sharding.grads else ():
            group, copies = unit.group, unit.replica_group
            if copies is not None and copies.size() == group.size():
                unit.group, unit.replica_group = copies, group
        return buffer


@mutant("H05", "GROUP", "K Z3", seen_in="class GROUP")
def gathered_from_the_copies(patch: Patches) -> None:
    """Where there are as many copies as shards, params are gathered from the ranks with copies."""

    @patch(Unit, "_gather_shards")
    def wrong(right, self, *, async_op):
        group, copies = self.group, self.replica_group
        if self.frees_params and copies is not None and copies.size() == group.size():
            self.group = copies
        try:
            return right(self, async_op=async_op)
        finally:
            self.group = group


@mutant("H06", "GROUP", "K Z3", seen_in="class GROUP", kill="contract")
def gathered_over_all_ranks(patch: Patches) -> None:
    """Params are gathered over all ranks, though each block has all shards."""

    @patch(Unit, "_gather_shards")
    def wrong(right, self, *, async_op):
        group = self.group
        if self.frees_params and self.replica_group is not None:
            self.group = dist.group.WORLD
        try:
            return right(self, async_op=async_op)
        finally:
            self.group = group


@mutant("H07", "GROUP", "ME Z2", seen_in="Megatron-LM#6080", kill="contract")
def experts_over_the_dense_block(patch: Patches) -> None:
    """Sharded gradients of experts are reduced over the ranks that shard the dense params."""

    @patch(BufferedModule, "_build_buffer")
    def wrong(right, self, plan):
        buffer = right(self, plan)
        for unit in buffer.units if plan.key.kind == "expert" and buffer.sharding.grads else ():
            unit.group = self.shard_group
        return buffer


@mutant("H08", "ASYNC", "AS K Z2", seen_in="DeepSpeed#5545", kill="race")
def copies_summed_too_early(patch: Patches) -> None:
    """The sum over copies of a shard is issued before the sum inside the block is there."""

    @patch(Unit, "chain_reduce")
    def wrong(right, self):
        if self._chained or not self.frees_grads or not self._has_replica_sum:
            right(self)
            return
        self._chained = True
        first, self._reducing = self._reducing, self._sum_replicas(async_op=True)
        first.wait()


@mutant("W59", "ORDER", "K DR B2", seen_in="class ORDER")
def empty_parts_end_no_sum(patch: Patches) -> None:
    """A rank whose part of a unit is empty does not end the first sum before it goes on.

    A bug of our own, found by a campaign: a sum at the first rank ends with a call of all ranks.
    """

    @patch(Unit, "chain_reduce")
    def wrong(right, self):
        if self._chained or self._has_replica_sum:
            right(self)
        self._chained = True


@mutant("H09", "VOLUME", "K Z2", seen_in="class VOLUME", kill="volume")
def copies_sum_whole_units(patch: Patches) -> None:
    """Copies sum whole units of sharded gradients, where the rank's own shard is enough."""

    @patch(Unit, "_sum_replicas")
    def wrong(right, self, *, async_op):
        if not self.frees_grads or not self._has_replica_sum:
            return right(self, async_op=async_op)
        return units.all_reduce_sum(self.grads, group=self.replica_group, async_op=async_op)


@mutant("H10", "GROUP", "K Z3", seen_in="class GROUP")
def copies_not_written(patch: Patches) -> None:
    """Only the first block writes new values to its shards of the params."""

    @patch(Buffer, "write_param_shard")
    def wrong(right, self, param, data):
        unit = self.unit_of(param)
        copies = None if unit is None or not unit.frees_params else unit.replica_group
        if copies is None or copies.rank() == 0:
            right(self, param, data)


@mutant("H11", "GROUP", "K Z2", seen_in="PyTorch#155903", core=True)
def copies_summed_twice(patch: Patches) -> None:
    """The sum over copies of sharded gradients is made twice."""

    @patch(Unit, "_sum_replicas")
    def wrong(right, self, *, async_op):
        if self.frees_grads and self._has_replica_sum:
            units.all_reduce_sum(self.grad_shard, group=self.replica_group)
        return right(self, async_op=async_op)
