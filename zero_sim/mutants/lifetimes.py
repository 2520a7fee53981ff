"""Faults of time and of identity: waits, stale views, groups, and the order of collectives."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from zero_sim.mutants.patching import Patches
from zero_sim.mutants.records import mutant
from zero_sim.targets import own
from zero_sim.zero import buffer as buffers
from zero_sim.zero import data_parallel
from zero_sim.zero import unit as units
from zero_sim.zero.buffer import Buffer
from zero_sim.zero.buffered_module import BufferedModule
from zero_sim.zero.collectives import size_and_rank
from zero_sim.zero.data_parallel import DistributedDataParallel
from zero_sim.zero.gathers import UnderForward
from zero_sim.zero.groups import KindGroups
from zero_sim.zero.optimizer import DistributedOptimizer
from zero_sim.zero.schedule import UnderBackward
from zero_sim.zero.storage import FlatStorage
from zero_sim.zero.unit import GradState, Unit


@mutant("M45", "ASYNC", "AS", seen_in="PyTorch#144535", kill="race", core=True)
def gradient_read_without_a_wait(patch: Patches) -> None:
    """Nobody waits before the reduced gradient is read."""

    @patch(Unit, "_wait_reduce")
    def wrong(right, self):
        self._reducing = None


@mutant("M47", "ASYNC", "AS B2", seen_in="DeepSpeed#7805", kill="race", core=True)
def one_staging_slot(patch: Patches) -> None:
    """Buckets go out from two staging buffers in turn, but the turn is reset at each of them."""
    slots: dict[int, Tensor] = {}

    @patch(Unit, "start_reduce")
    def wrong(right, self):
        has_one_owner = self.plan.partition.owner is not None
        if self.group is None or self.frees_grads or has_one_owner or not self.plan.is_even:
            right(self)
            return
        self._step_grads("reduce")
        whole = self.grads.untyped_storage()
        slot = slots.get(whole.data_ptr())
        if (
            slot is None
            or slot.untyped_storage().nbytes() != whole.nbytes()
            or (slot.dtype != self.grads.dtype)
        ):
            slot = self.grads.new_zeros(whole.nbytes() // self.grads.element_size())
            slots[whole.data_ptr()] = slot
        staged = slot[: self.grads.numel()].copy_(self.grads)
        self._reducing = units.reduce_scatter_sum(
            self.grad_shard, staged, group=self.group, async_op=True
        )
        self._chained = False


@mutant("M49", "ASYNC", "AS B2", seen_in="DeepSpeed#8080")
def any_producer_will_do(patch: Patches) -> None:
    """A bucket is sent when the latest of its producers is done, whether or not the others are."""

    @patch(UnderBackward, "mark_ready")
    def wrong(right, self, param):
        unit = self._unit_of.get(param)
        if self.running and self._by_arrival and unit is not None:
            self._missing[unit].clear()
        right(self, param)

    @patch(UnderBackward, "check_open")
    def blind(right, self, param, *, name):
        return None

    @patch(Unit, "fill")
    def unasked(right, self):
        if self.grad_state is not GradState.REDUCING:
            right(self)


@mutant("M51", "ASYNC", "AS S2", seen_in="Megatron-LM#6388")
def reader_outside_its_module(patch: Patches) -> None:
    """A module waits for the first bucket that it reads from, and not for the others."""

    @patch(UnderForward, "_before_forward")
    def wrong(right, self, needed, module, args):
        right(self, needed[:1], module, args)

    @patch(UnderForward, "check_read")
    def blind(right, self, param, *, name):
        return None


@mutant("M53", "ALIAS", "AS S2", seen_in="Megatron-LM#4609", core=True)
def not_zeroed_while_gathering(patch: Patches) -> None:
    """Gradients share memory with the gather's target, and are not zeroed while it is on."""

    @patch(Buffer, "zero_grads")
    def wrong(right, self):
        if not any(unit.gathering for unit in self.units):
            right(self)
            return
        for unit in self.units:
            unit.reset_grads()


@mutant("M55", "ALIAS", "ME", seen_in="Megatron-LM#4800")
def gathered_into_the_others_gradients(patch: Patches) -> None:
    """The dense params are gathered into memory from which experts still read gradients."""

    @patch(DistributedOptimizer, "_upcast_grad")
    def wrong(right, self, master):
        grad = right(self, master)
        dense = self.ddp.buffers[0].param_data
        if master.buffer.plan.key.kind == "expert" and dense is not None and grad.numel():
            grad[0] = dense[0]
        return grad


@mutant("M57", "ALIAS", "S2", seen_in="PyTorch#43307")
def view_bound_to_the_result(patch: Patches) -> None:
    """In the third step a bucket is what its last reduction returned, no view of the gradients."""

    @patch(DistributedDataParallel, "zero_grad_buffer")
    def wrong(right, self):
        right(self)
        begun = self.__dict__["_begun"] = self.__dict__.get("_begun", 0) + 1
        for unit in self.buffers[0].units[:1] if begun == 3 else ():
            if not unit.frees_grads:
                unit.grad_storage = FlatStorage(unit.grads.clone())


@mutant("M59", "ASYNC", "AS S2", seen_in="Megatron-LM 33111c9c9a", kill="race")
def handle_consumed_elsewhere(patch: Patches) -> None:
    """Another forward than training's takes the gather's handle, so that nobody waits for it."""

    @patch(UnderForward, "finish")
    def wrong(right, self):
        for unit in self._units:
            unit._gathering = None
            unit.finish_gather()


@mutant("Y01", "ASYNC", "AS K", seen_in="DeepSpeed#5545", kill="race")
def second_sum_without_the_first(patch: Patches) -> None:
    """The sum over replicas is issued before the sum inside the block is complete."""

    @patch(Unit, "chain_reduce")
    def wrong(right, self):
        if self._chained:
            return
        self._chained = True
        if self._has_replica_sum:
            first, self._reducing = self._reducing, self._sum_replicas(async_op=True)
            first.wait()


@mutant("Y02", "ASYNC", "AS S2", seen_in="Megatron-LM#663")
def gathered_before_written(patch: Patches) -> None:
    """Gathers are issued before the masters are written to the params."""

    @patch(DistributedOptimizer, "_step_masters")
    def early(right, self, trained, grads):
        for buffer in self.ddp.buffers if self.ddp.config.overlap_params else ():
            for unit in buffer.units:
                unit.start_gather()
        right(self, trained, grads)

    @patch(UnderForward, "start")
    def once(right, self):
        for unit in self._unguarded:
            unit.finish_gather()


@mutant("Y03", "ASYNC", "AS", seen_in="Megatron-LM#6187", kill="race")
def forward_does_not_wait(patch: Patches) -> None:
    """A forward begins while the gathers of its params are in flight."""

    @patch(UnderForward, "_before_forward")
    def wrong(right, self, needed, module, args):
        right(self, (), module, args)

    @patch(UnderForward, "check_read")
    def blind(right, self, param, *, name):
        return None


@mutant("Y04", "ASYNC", "AS GA", seen_in="fairscale#780", kill="race")
def zeroed_while_reduced(patch: Patches) -> None:
    """The gradients of a bucket are zeroed right after its reduction is issued."""

    @patch(UnderBackward, "_issue_next")
    def wrong(right, self):
        unit = self._units[self._issued_count]
        right(self)
        if not isinstance(unit, Unit) or not unit.reducing:
            return
        own = unit.grad_shard
        start = own.storage_offset() - unit.grads.storage_offset()
        unit.grads[:start].zero_()
        unit.grads[start + own.numel() :].zero_()


@mutant("Z01", "ALIAS", "", seen_in="apex#1794")
def param_is_a_copy(patch: Patches) -> None:
    """The last param is a copy of its place in the buffer, not a view."""

    @patch(Buffer, "_adopt")
    def wrong(right, self, params, **named):
        memory = right(self, params, **named)
        last = list(params.values())[-1]
        last.data = last.data.clone()
        return memory


@mutant("Z02", "ALIAS", "", seen_in="class ALIAS", core=True)
def reduced_gradient_divided_in_place(patch: Patches) -> None:
    """The optimizer's gradient is the buffer's memory, not a copy of it."""

    @patch(DistributedOptimizer, "_upcast_grad")
    def wrong(right, self, master):
        grad = right(self, master)
        reduced = master.buffer.get_grad_shard(master.param)
        return reduced.copy_(grad) if reduced.dtype is grad.dtype else grad


@mutant("Z03", "ALIAS", "S2", seen_in="Megatron-LM#6336")
def module_sees_the_first_params(patch: Patches) -> None:
    """From the second step on the module's first param is a stale copy."""

    @patch(DistributedDataParallel, "zero_grad_buffer")
    def wrong(right, self):
        right(self)
        begun = self.__dict__["_begun"] = self.__dict__.get("_begun", 0) + 1
        if begun == 2:
            first = next(iter(self.params.values()))
            first.data = first.data.clone()


@mutant("Z04", "ALIAS", "S2", seen_in="class ALIAS")
def main_grad_is_stale(patch: Patches) -> None:
    """From the second step on hooks add to a copy of the gradient buffer."""

    @patch(DistributedDataParallel, "_accumulate")
    def wrong(right, self, memory, param):
        if self.__dict__.get("_begun", 0) > 1:
            param.grad = None
            if self.grad_schedule.sums_in_backward:
                self.grad_schedule.mark_ready(param)
        else:
            right(self, memory, param)

    @patch(DistributedDataParallel, "zero_grad_buffer")
    def counted(right, self):
        right(self)
        self.__dict__["_begun"] = self.__dict__.get("_begun", 0) + 1


@mutant("M61", "GROUP", "K DR", seen_in="verl#7493", core=True)
def replicas_not_summed(patch: Patches) -> None:
    """The sum over replicas is left out."""

    @patch(Unit, "_has_replica_sum")
    def wrong(right, self):
        return right(self) and self.group is None


@mutant("M63", "GROUP", "K DR", seen_in="PyTorch#154888", core=True)
def nothing_to_synchronise(patch: Patches) -> None:
    """Shards of degree one are taken for a world without anything to sum."""

    @patch(Unit, "_has_replica_sum")
    def wrong(right, self):
        return right(self) and (self.group is None or self.group.size() > 1)


@mutant("M65", "GROUP", "K", seen_in="DeepSpeed#7601", core=True)
def global_rank_for_group_rank(patch: Patches) -> None:
    """A rank takes the shard of its global rank, as far as there are so many."""

    @patch(buffers, "_find_own_shard")
    def wrong(right, plan, *, group, **named):
        shard = right(plan, group=group, **named)
        return shard if group is None else min(dist.get_rank(), plan.policy.shard_count - 1)


@mutant("M67", "GROUP", "ME DR", seen_in="Megatron-LM#6080")
def experts_over_the_dense_group(patch: Patches) -> None:
    """Gradients of experts are summed over all ranks."""

    @patch(BufferedModule, "_build_buffer")
    def wrong(right, self, plan):
        buffer = right(self, plan)
        for unit in buffer.units if not self.config.sharding.state else ():
            unit.replica_group = self.group
        return buffer


@mutant("G01", "GROUP", "ME", seen_in="Megatron-LM#6920")
def experts_dealt_in_blocks(patch: Patches) -> None:
    """Consecutive ranks are taken to hold the same experts, where every ep-th does."""

    @patch(own, "build_expert_groups")
    def wrong(right, group, *, expert_parallel, redundancy):
        ranks = dist.get_process_group_ranks(group)
        size, rank = size_and_rank(group)
        count = size // expert_parallel
        if redundancy > 1 or expert_parallel == size:
            return right(group, expert_parallel=expert_parallel, redundancy=redundancy)
        blocks = [ranks[start : start + count] for start in range(0, size, count)]
        is_part = size < dist.get_world_size()
        made = [dist.new_group(each, use_local_synchronization=is_part) for each in blocks]
        return KindGroups(group=made[rank // count], shard_group=made[rank // count])


@mutant("G02", "GROUP", "ME", seen_in="Megatron-LM#3129")
def experts_broadcast_to_all(patch: Patches) -> None:
    """At the start experts are broadcast over all ranks, which hold different ones."""

    @patch(data_parallel, "broadcast_from_first")
    def wrong(right, tensors, *, group):
        right(tensors, group=group if group.size() > 1 else dist.group.WORLD)


@mutant("G03", "GROUP", "K", seen_in="PyTorch#155903")
def replicas_summed_twice(patch: Patches) -> None:
    """The sum inside a block runs over all ranks, and then over the replicas once more."""

    @patch(Unit, "_sum_replicas")
    def wrong(right, self, *, async_op):
        if self.group is None or not self._has_replica_sum:
            return right(self, async_op=async_op)
        units.all_reduce_sum(self.grad_shard, group=self.replica_group)
        return right(self, async_op=async_op)


@mutant("G04", "GROUP", "K", seen_in="Megatron-LM#6048", kill="contract")
def replica_sum_on_the_first_block_only(patch: Patches) -> None:
    """Only ranks of the first block call the sum over replicas."""

    @patch(Unit, "_sum_replicas")
    def wrong(right, self, *, async_op):
        is_copy = self.group is not None and self.replica_group is not None
        if is_copy and self.replica_group.rank():
            return None
        return right(self, async_op=async_op)


@mutant("G05", "GROUP", seen_in="replicas that begin apart", core=True)
def every_rank_begins_with_its_own(patch: Patches) -> None:
    """At the start nothing is broadcast: every rank trains on from what it has built."""

    @patch(data_parallel, "broadcast_from_first")
    def wrong(right, tensors, *, group):
        pass


@mutant("G06", "GROUP", "FZ", seen_in="replicas that begin apart")
def only_trained_params_are_broadcast(patch: Patches) -> None:
    """At the start params are broadcast, frozen ones and the buffers of the module are not."""

    @patch(BufferedModule, "_replicated_tensors")
    def wrong(right, self):
        trained = {memory.data_ptr() for each in self.buffers for memory in each.working_memory()}
        return [
            ([tensor for tensor in tensors if tensor.data_ptr() in trained], group)
            for tensors, group in right(self)
        ]


@mutant("M107", "ORDER", "B2 DR", seen_in="DeepSpeed#2343", kill="contract")
def reduced_as_they_arrive(patch: Patches) -> None:
    """Buckets are reduced in the order in which they become ready, which differs between ranks."""

    @patch(UnderBackward, "_issue_ready")
    def wrong(right, self):
        rest = self._units[self._issued_count :]
        ready = [unit for unit in rest if not self._missing[unit]]
        late = [unit for unit in rest if self._missing[unit]]
        self._units = (*self._units[: self._issued_count], *ready, *late)
        for _ in ready:
            self._issue_next()


@mutant("M109", "ORDER", "FZ DR", seen_in="PyTorch#158719", kill="contract")
def unused_bucket_skipped(patch: Patches) -> None:
    """A rank on which no gradient of a bucket arrived does not take part in its reduction."""

    @patch(UnderBackward, "finish")
    def wrong(right, self):
        def is_unused(unit: Unit) -> bool:
            return all(
                param in self._missing[unit] for param, its in self._unit_of.items() if its is unit
            )

        kept = self._units
        self._units = [unit for unit in kept if unit in self._issued or not is_unused(unit)]
        right(self)
        self._units = kept


@mutant("O01", "ORDER", "B2", seen_in="class ORDER", kill="contract", core=True)
def odd_ranks_in_reverse(patch: Patches) -> None:
    """Odd ranks gather their buckets in reverse."""

    @patch(Buffer, "allgather_params")
    def wrong(right, self):
        odd = bool(dist.get_rank() % 2)
        for unit in self.units[::-1] if odd else self.units:
            unit.gather()


@mutant("O02", "ORDER", "DR", seen_in="DeepSpeed#2343", kill="contract")
def rank_dependent_branch(patch: Patches) -> None:
    """A rank whose gradient is zero in all elements does not reduce a bucket."""

    @patch(Unit, "reduce")
    def wrong(right, self):
        if self.grads.any():
            right(self)


@mutant("O03", "ORDER", "K", seen_in="class ORDER", kill="contract")
def replicas_before_shards(patch: Patches) -> None:
    """On odd ranks the two sums of a bucket change places."""

    @patch(Unit, "reduce")
    def wrong(right, self):
        if dist.get_rank() % 2:
            self._step_grads("reduce")
            self._sum_replicas(async_op=False)
            self._sum_shards(async_op=False)
            self._end_reduce()
        else:
            right(self)


@mutant("O04", "ORDER", "IN", seen_in="PyTorch#115710", kill="contract")
def skipped_on_the_rank_that_saw_it(patch: Patches) -> None:
    """A rank that sees an overflow of its own leaves without telling the others."""

    @patch(DistributedOptimizer, "_measure")
    def wrong(right, self, trained, grads):
        if self.loss_scaler is None or all(bool(grad.isfinite().all()) for grad in grads):
            return right(self, trained, grads)
        return torch.full((), torch.nan), 0, True
