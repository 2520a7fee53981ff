"""Faults in lifetimes and identity: waits, stale views, groups, order of collectives."""

from __future__ import annotations

from zero_sim.mutants.buckets import accept_late_gradients
from zero_sim.mutants.patching import Patches
from zero_sim.mutants.records import mutant
from zero_sim.zero import buffer as buffers
from zero_sim.zero import collectives
from zero_sim.zero.buffer import Buffer
from zero_sim.zero.buffered_module import build_buffers, find_replicated_tensors
from zero_sim.zero.data_parallel import DistributedDataParallel
from zero_sim.zero.gathers import UnderForward
from zero_sim.zero.optimizer import AllAtOnce, DistributedOptimizer
from zero_sim.zero.schedule import UnderBackward
from zero_sim.zero.unit import Unit
from zero_sim.zero.variants.model_groups import build_expert_groups


@mutant("M45", "ASYNC", "AS", seen_in="PyTorch#144535", kill="race", core=True)
def gradient_read_without_a_wait(patch: Patches) -> None:
    """The reduced gradient is read without waiting for the reduction."""
    # If the reduction completes late, the memory still holds the local gradient.
    patch[Unit._wait_reduce, "self._reducing.wait()"] = "pass"


@mutant("M47", "ASYNC", "AS B2", seen_in="DeepSpeed#7805", kill="race", core=True)
def one_staging_slot(patch: Patches) -> None:
    """Buckets alternate between two staging buffers, but each bucket begins with the first."""
    # A buffer per memory, size and dtype. `kept` outlives the call.
    patch[Unit.start_reduce, "self._reducing = self._sum_shards(async_op=True)"] = """
        if self.frees_grads or self.plan.partition.owner is not None or not self.plan.is_even:
            ...
        else:
            whole = self.grads.untyped_storage()
            key = whole.data_ptr(), whole.nbytes(), self.grads.dtype
            slot = self.grads.new_empty(whole.nbytes() // self.grads.element_size())
            slot = __mutant__.kept.setdefault(key, slot)[: self.grads.numel()].copy_(self.grads)
            self._reducing = reduce_scatter_sum(
                self.grad_shard, slot, group=self.group, async_op=True
            )"""


@mutant("M49", "ASYNC", "AS B2", seen_in="DeepSpeed#8080")
def any_producer_will_do(patch: Patches) -> None:
    """A bucket is sent when its first gradient arrives, even if other gradients are missing."""
    patch[UnderBackward.mark_ready, ".discard(param)"] = ".clear()"
    accept_late_gradients(patch)


def forget_check_waited(patch: Patches) -> None:
    """Disable the check that refuses a param's gradient while its gather is in flight."""
    # It would raise before a wrong value appears, but this fault must be found as a race.
    patch[UnderForward.check_read, "unit.gathering"] = "False"


@mutant("M51", "ASYNC", "AS S2", seen_in="Megatron-LM#6388")
def reader_outside_its_module(patch: Patches) -> None:
    """A module waits only for the first bucket that it reads."""
    # W20 is the same fault for sharded params.
    patch[UnderForward._before_forward, "in needed:"] = "in needed[:1]:"
    forget_check_waited(patch)


@mutant("M53", "ALIAS", "AS S2", seen_in="Megatron-LM#4609", core=True)
def not_zeroed_while_gathering(patch: Patches) -> None:
    """Gradients are not zeroed while a gather is in flight, as if they shared its memory."""
    patch[Buffer.zero_grads, "for memory in ("] = """
        if any(unit.gathering for unit in self.units):
            return
        ..."""


@mutant("M55", "ALIAS", "ME", seen_in="Megatron-LM#4800")
def gathered_into_the_others_gradients(patch: Patches) -> None:
    """Dense params are gathered into memory that still holds expert gradients."""
    # Only buffers with unsharded params have a `param_data`. A single element shows the overwrite
    # without really sharing memory.
    patch[DistributedOptimizer._upcast_grad, "return grad"] = """
        dense = self.ddp.buffers[0].param_data
        if master.buffer.plan.key.kind == "expert" and dense is not None and grad.numel():
            grad[0] = dense[0]
        ..."""


@mutant("M57", "ALIAS", "S2", seen_in="PyTorch#43307")
def view_bound_to_the_result(patch: Patches) -> None:
    """In the third step, a bucket holds the result of its last reduction, not its gradients."""
    patch[Buffer.zero_grads, "for memory in ("] = """
        self._steps_begun = self.__dict__.get("_steps_begun", 0) + 1
        for unit in self.units[:1] if self._steps_begun == 3 else ():
            if not unit.frees_grads:
                unit.grad_storage = FlatStorage(unit.grads.clone())
        ..."""


@mutant("M59", "ASYNC", "AS S2", seen_in="Megatron-LM 33111c9c9a", kill="race")
def handle_consumed_elsewhere(patch: Patches) -> None:
    """A forward outside training consumes the gather's handle, so nothing waits for it."""
    # Without the handle, the wait in the next line returns at once.
    patch[UnderForward.finish, "unit.finish_gather()"] = """
        unit._gathering = None
        ..."""


@mutant("Y01", "ASYNC", "AS K", seen_in="DeepSpeed#5545", kill="race")
def second_sum_without_the_first(patch: Patches) -> None:
    """The sum over replicas is issued before the sum over the shard group has completed."""
    # The first wait comes after the second call, so only the order is wrong.
    patch[Unit.chain_reduce, "self._wait_reduce()"] = "first = self._reducing"
    patch[Unit.chain_reduce, "self._sum_replicas(async_op=True)"] = """
        ...
        first.wait()"""


@mutant("Y02", "ASYNC", "AS S2", seen_in="Megatron-LM#663")
def gathered_before_written(patch: Patches) -> None:
    """Gathers are issued before the masters are written to the params."""
    # The regular start is removed, so each gather is still issued once.
    patch[DistributedOptimizer._step_masters, "for master, grad in"] = """
        for buffer in self.ddp.buffers if self.ddp.config.overlap_params else ():
            for unit in buffer.units:
                unit.start_gather()
        ..."""
    patch[UnderForward.start, "unit.start_gather()"] = "pass"


@mutant("Y03", "ASYNC", "AS", seen_in="Megatron-LM#6187", kill="race")
def forward_does_not_wait(patch: Patches) -> None:
    """A forward begins while the gathers of its params are in flight."""
    patch[UnderForward._before_forward, "unit.finish_gather()"] = "pass"
    forget_check_waited(patch)


@mutant("Y04", "ASYNC", "AS GA", seen_in="fairscale#780", kill="race")
def zeroed_while_reduced(patch: Patches) -> None:
    """A bucket's gradients are zeroed right after its reduction is issued."""
    # Leave the rank's own shard alone, because the reduction writes its result there.
    patch[UnderBackward._issue_next, "unit.start_reduce()"] = """
        ...
        if isinstance(unit, Unit) and unit.reducing:
            unit.grads[: unit.own_span.start].zero_()
            unit.grads[unit.own_span.stop :].zero_()"""


@mutant("Z01", "ALIAS", "", seen_in="apex#1794")
def param_is_a_copy(patch: Patches) -> None:
    """The last param is a copy of its part of the buffer, not a view."""
    patch[Buffer._adopt, "return memory"] = """
        param.data = param.data.clone()
        ..."""


@mutant("Z02", "ALIAS", "", seen_in="class ALIAS", core=True)
def reduced_gradient_divided_in_place(patch: Patches) -> None:
    """The optimizer's gradient shares memory with the buffer instead of copying it."""
    # Without `copy=True`, fp32 gradients are not copied. The cast still copies 16-bit gradients.
    patch[AllAtOnce.copy, "torch.float32, copy=True"] = "torch.float32"


@mutant("Z03", "ALIAS", "S2", seen_in="Megatron-LM#6336")
def module_sees_the_first_params(patch: Patches) -> None:
    """From the second step on the module's first param is a stale copy."""
    # After the clone, gathers still write to the buffer, and forward reads the clone.
    patch[DistributedDataParallel.zero_grad_buffer, "self.step_count.reset()"] = """
        ...
        self._steps_begun = self.__dict__.get("_steps_begun", 0) + 1
        if self._steps_begun == 2:
            first = next(iter(self.params.values()))
            first.data = first.data.clone()"""


@mutant("Z04", "ALIAS", "S2", seen_in="class ALIAS")
def main_grad_is_stale(patch: Patches) -> None:
    """From the second step on hooks add to a copy of the gradient buffer."""
    # A gradient that is added to a copy is lost, so zero it.
    patch[DistributedDataParallel.zero_grad_buffer, "self.step_count.reset()"] = """
        ...
        self._steps_begun = self.__dict__.get("_steps_begun", 0) + 1"""
    patch[DistributedDataParallel._accumulate, "self.grad_schedule.take(memory)"] = """
        if self._steps_begun > 1:
            param.grad = torch.zeros_like(grad)
        ..."""


@mutant("M61", "GROUP", "K DR", seen_in="verl#7493", core=True)
def replicas_not_summed(patch: Patches) -> None:
    """The sum over replicas is omitted."""
    # Unsharded state has no other sum, so it keeps this sum.
    patch[Unit._has_replica_sum, "self.replica_group is not None"] = "self.group is None and ..."


@mutant("M63", "GROUP", "K DR", seen_in="PyTorch#154888", core=True)
def nothing_to_synchronise(patch: Patches) -> None:
    """A shard group of one rank is treated as if there was nothing to sum."""
    patch[Unit._has_replica_sum, "self.replica_group is not None"] = """
        ... and (self.group is None or self.group.size() > 1)"""


@mutant("M65", "GROUP", "K", seen_in="DeepSpeed#7601", core=True)
def global_rank_for_group_rank(patch: Patches) -> None:
    """A rank takes the shard with the index of its global rank."""
    # Limit it to the number of shards, or the index would be out of range.
    patch[buffers._find_own_shard, "return rank"] = """
        ... if group is None else min(dist.get_rank(), shard_count - 1)"""


@mutant("M67", "GROUP", "ME DR", seen_in="Megatron-LM#6080")
def experts_over_the_dense_group(patch: Patches) -> None:
    """Expert gradients are summed over all ranks."""
    # Only for unsharded state: G08 and H07 break sharded experts.
    patch[build_buffers, "groups = holders.groups_of(plan.key.kind)"] = (
        "groups = holders.groups_of(plan.key.kind if config.sharding.state else 'dense')"
    )


@mutant("G01", "GROUP", "ME", seen_in="Megatron-LM#6920")
def experts_dealt_in_blocks(patch: Patches) -> None:
    """Consecutive ranks are assumed to hold the same experts, instead of every ep-th rank."""
    # Change groups and own index together, so that all ranks agree on the wrong groups.
    patch[build_expert_groups, "ranks[index::expert_parallel]"] = """
        ranks[index * world_size // expert_parallel :][: world_size // expert_parallel]"""
    patch[build_expert_groups, "rank % expert_parallel"] = """
        rank * expert_parallel // world_size"""


@mutant("G02", "GROUP", "ME", seen_in="Megatron-LM#3129")
def experts_broadcast_to_all(patch: Patches) -> None:
    """At the start, experts are broadcast over all ranks, although ranks hold different ones."""
    # Replace an expert's group of one rank by the world.
    patch[collectives.broadcast_from_first, "for tensor in tensors:"] = """
        group = group if group.size() > 1 else dist.group.WORLD
        ..."""


@mutant("G03", "GROUP", "K", seen_in="PyTorch#155903")
def replicas_summed_twice(patch: Patches) -> None:
    """The sum over replicas runs twice."""
    patch[Unit._sum_replicas, "assert self.replica_group is not None"] = """
        if self.group is not None:
            all_reduce_sum(self.grad_shard, group=self.replica_group)"""


@mutant("G04", "GROUP", "K", seen_in="Megatron-LM#6048", kill="contract")
def replica_sum_on_the_first_block_only(patch: Patches) -> None:
    """Only the first shard group calls the sum over replicas."""
    patch[Unit._sum_replicas, "not self._has_replica_sum"] = """
        ... or (self.group is not None and self.replica_group.rank() > 0)"""


@mutant("G05", "GROUP", seen_in="replicas with different initial values", core=True)
def every_rank_begins_with_its_own(patch: Patches) -> None:
    """At the start nothing is broadcast, so every rank trains from its own initial values."""
    # With equal seeds, ranks begin alike, so only cases with `distinct_start` show this.
    patch[DistributedDataParallel.__init__, "if broadcast_params:"] = "if False:"


@mutant("G06", "GROUP", "FZ", seen_in="replicas with different initial values")
def only_trained_params_are_broadcast(patch: Patches) -> None:
    """At the start, frozen params and module buffers are not broadcast."""
    patch[find_replicated_tensors, "(*frozen, *module.named_buffers())"] = "()"


@mutant("M107", "ORDER", "B2 DR", seen_in="DeepSpeed#2343", kill="contract")
def reduced_as_they_arrive(patch: Patches) -> None:
    """Buckets are reduced in the order in which they become ready, which differs by rank."""
    # A stable sort moves ready buckets ahead of the others that are not issued.
    patch[UnderBackward._issue_ready, "while self._issued_count"] = """
        rest = sorted(self._units[self._issued_count :], key=lambda unit: bool(self._missing[unit]))
        self._units = (*self._units[: self._issued_count], *rest)
        ..."""


@mutant("M109", "ORDER", "FZ DR", seen_in="PyTorch#158719", kill="contract")
def unused_bucket_skipped(patch: Patches) -> None:
    """A rank skips a bucket's reduction if no gradient of the bucket arrived."""
    # Put the units back after the loop, because the next step uses all of them.
    patch[UnderBackward.finish, "while self._issued_count"] = """
        units, arrived = self._units, set(self._issued)
        for param, unit in self._unit_of.items():
            if param not in self._missing[unit]:
                arrived.add(unit)
        self._units = [unit for unit in units if unit in arrived]
        ..."""
    patch[UnderBackward.finish, "self.running = False"] = """
        ...
        self._units = units"""


@mutant("O01", "ORDER", "B2", seen_in="class ORDER", kill="contract", core=True)
def odd_ranks_in_reverse(patch: Patches) -> None:
    """Odd ranks gather their buckets in reverse."""
    # A stride of -1 reverses the list.
    patch[Buffer.allgather_params, "in self.units"] = "...[:: -1 if dist.get_rank() % 2 else 1]"


@mutant("O02", "ORDER", "DR", seen_in="DeepSpeed#2343", kill="contract")
def rank_dependent_branch(patch: Patches) -> None:
    """A rank skips a bucket's reduction if the gradient is all zero."""
    patch[Unit.reduce, 'self._step_grads("reduce")'] = """
        if not self.grads.any():
            return
        ..."""


@mutant("O03", "ORDER", "K", seen_in="class ORDER", kill="contract")
def replicas_before_shards(patch: Patches) -> None:
    """On odd ranks, a bucket's two sums are exchanged."""
    # A stride of -1 reverses the list.
    both = "self._sum_shards(async_op=False)\nself._sum_replicas(async_op=False)"
    patch[Unit.reduce, both] = """
        sums = [self._sum_shards, self._sum_replicas]
        for add in sums[:: -1 if dist.get_rank() % 2 else 1]:
            add(async_op=False)"""


@mutant("O04", "ORDER", "IN", seen_in="PyTorch#115710", kill="contract")
def skipped_on_the_rank_that_saw_it(patch: Patches) -> None:
    """A rank with a local overflow returns without notifying the other ranks."""
    # The other ranks block in the norm's all-reduce.
    patch[DistributedOptimizer._measure, "return self._agree_on"] = """
        if self.loss_scaler is not None and not all(grad.isfinite().all() for grad in grads):
            return torch.full((), torch.nan), 0, True
        ..."""
