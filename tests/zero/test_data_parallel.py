"""Accumulation and reduction of a module's gradients."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.configs import zero_config
from zero_sim.errors import LayoutError, ModelError, UsageError
from zero_sim.zero import (
    DistributedDataParallel,
    KindGroups,
    ZeroConfig,
    build_redundancy_groups,
)


class Weighted(nn.Module):
    """A single param of a given dtype; forward returns its product with the input."""

    def __init__(self, *values, dtype=torch.float32):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(values, dtype=dtype))

    def forward(self, x):
        return (self.w * x).sum()


def wrap(module, group, *, broadcast_params=True, **config):
    return DistributedDataParallel(
        module, config=zero_config(**config), group=group, broadcast_params=broadcast_params
    )


class TestLifetime:
    """Memory of wrapped models after they are deleted."""

    def test_memory_is_freed_with_the_wrapper(self, lone_group):
        ddp = wrap(Weighted(1.0, 2.0), lone_group, overlap_grads=True)
        ddp(torch.tensor([3.0, 4.0])).backward()
        held = [weakref.ref(each) for each in (ddp, ddp.module.w, ddp.buffers[0])]
        del ddp
        gc.collect()
        assert [each() for each in held] == [None, None, None]

    def test_backward_after_deletion_leaves_grad_in_place(self, lone_group):
        """The gradient stays in param.grad, as in a module that was never wrapped."""
        module = Weighted(1.0, 2.0)
        wrap(module, lone_group)
        gc.collect()
        module(torch.tensor([3.0, 4.0])).backward()
        assert module.w.grad.tolist() == [3, 4]


class TestAccumulation:
    """Gradients that backward adds to main_grad."""

    def test_adds_micro_batches(self, lone_group):
        """Two backward passes add up, and param.grad is dropped each time."""
        ddp = wrap(Weighted(1.0, 2.0), lone_group)
        ddp(torch.tensor([3.0, 4.0])).backward()
        ddp(torch.tensor([10.0, 20.0])).backward()
        assert ddp.module.w.main_grad.tolist() == [13, 24]
        assert ddp.module.w.grad is None

    def test_tied_param_counts_each_use_once(self, lone_group):
        module = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
        module[1].weight = module[0].weight
        nn.init.constant_(module[0].weight, 3.0)
        ddp = wrap(module, lone_group)
        ddp(torch.ones(1, 1)).sum().backward()
        assert ddp.params["0.weight"].main_grad.item() == 6

    def test_sums_in_fp32_if_configured(self, lone_group):
        """A bf16 buffer drops 1 added to 256; an fp32 buffer keeps it."""
        sums = {}
        for grad_dtype in ("param", "fp32"):
            ddp = wrap(Weighted(1.0, dtype=torch.bfloat16), lone_group, grad_dtype=grad_dtype)
            for value in (256.0, 1.0):
                ddp(torch.tensor([value], dtype=torch.bfloat16)).backward()
            sums[grad_dtype] = ddp.module.w.main_grad.item()
        assert sums == {"param": 256, "fp32": 257}

    def test_drops_gradients_computed_before_wrapping(self, lone_group):
        module = Weighted(1.0)
        module(torch.tensor([5.0])).backward()
        ddp = wrap(module, lone_group)
        ddp(torch.tensor([2.0])).backward()
        assert module.w.main_grad.tolist() == [2]

    @pytest.mark.filterwarnings("ignore:Using backward:UserWarning")
    def test_keeps_no_graph_of_a_differentiable_gradient(self, lone_group):
        """create_graph=True leaves the buffer a plain tensor."""
        ddp = wrap(Weighted(1.0), lone_group)
        ddp(torch.tensor([2.0])).pow(2).backward(create_graph=True)
        assert not ddp.module.w.main_grad.requires_grad

    def test_refuses_a_sparse_gradient(self, lone_group):
        ddp = wrap(nn.Embedding(3, 2, sparse=True), lone_group)
        with pytest.raises(ModelError, match=r"'weight'\. Set sparse=False"):
            ddp(torch.tensor([1])).sum().backward()

    def test_frozen_params_have_no_buffer(self, lone_group):
        module = nn.Linear(2, 2)
        module.bias.requires_grad_(False)
        ddp = wrap(module, lone_group)
        assert [buffer.plan.numel for buffer in ddp.buffers] == [4]
        assert not hasattr(module.bias, "main_grad")


class TestSync:
    """finish_grad_sync, the sum over ranks once a step."""

    def test_divides_before_the_sum_in_the_gradient_dtype(self, run_ranks):
        """pre: each rank rounds its own third to bf16. post and none leave the sum."""

        def program(rank):
            sums = []
            for divide in ("pre", "post", "none"):
                ddp = wrap(Weighted(1.0, dtype=torch.bfloat16), dist.group.WORLD, divide=divide)
                ddp(torch.tensor([1.0 + rank], dtype=torch.bfloat16)).backward()
                ddp.finish_grad_sync()
                sums += [part.own_grad.tolist() for part in ddp.buffers[0].memory.values()]
            return sums

        def bf16(value):
            return torch.tensor(value, dtype=torch.bfloat16)

        pre = (bf16(1.0) / 3 + bf16(2.0) / 3 + bf16(3.0) / 3).item()
        results, _ = run_ranks(3, program)
        assert results == [[[pre], [6], [6]], [[], [], []], [[], [], []]]

    def test_rank_without_backward_contributes_zeros(self, run_ranks):
        """A rank without any backward contributes zeros and does not hang the others."""

        def program(rank):
            ddp = wrap(Weighted(1.0, 1.0), dist.group.WORLD)
            if rank == 1:
                ddp(torch.tensor([2.0, 3.0])).backward()
            ddp.finish_grad_sync()
            return ddp.buffers[0].get_grad_shard(ddp.module.w).tolist()

        results, _ = run_ranks(2, program)
        assert results == [[2], [3]]

    def test_refuses_a_second_sync(self, lone_group):
        """A second call would add the reduced sums again."""
        ddp = wrap(Weighted(1.0), lone_group)
        ddp.finish_grad_sync()
        with pytest.raises(UsageError, match=r"called twice.*zero_grad_buffer"):
            ddp.finish_grad_sync()

    def test_refuses_a_backward_after_sync(self, lone_group):
        ddp = wrap(Weighted(1.0), lone_group)
        ddp.finish_grad_sync()
        with pytest.raises(UsageError, match="gradient of 'w'"):
            ddp(torch.tensor([2.0])).backward()

    def test_zero_grad_buffer_starts_the_next_step(self, lone_group):
        ddp = wrap(Weighted(1.0), lone_group)
        ddp(torch.tensor([2.0])).backward()
        ddp.finish_grad_sync()
        ddp.zero_grad_buffer()
        ddp(torch.tensor([3.0])).backward()
        assert ddp.module.w.main_grad.tolist() == [3]

    def test_shards_by_the_rank_in_its_group(self, run_ranks):
        """Each of two groups in a world shards over its own two ranks."""

        def program(rank):
            groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
            ddp = wrap(Weighted(1.0, 1.0), groups[rank // 2])
            ddp(torch.tensor([1.0, 2.0]) * 10**rank).backward()
            ddp.finish_grad_sync()
            return ddp.buffers[0].get_grad_shard(ddp.module.w).tolist()

        results, _ = run_ranks(4, program)
        assert results == [[11], [22], [1100], [2200]]


class TestMicroBatches:
    """Sums after the last micro-batch, or after each with sync="every"."""

    def test_are_summed_once_by_default(self, run_ranks):

        def program(rank):
            ddp = wrap(Weighted(1.0), dist.group.WORLD, broadcast_params=False)
            for micro in range(3):
                ddp(torch.tensor([1.0 + rank])).backward()
                ddp.end_micro_batch(last=micro == 2)
            return ddp.buffers[0].get_grad_shard(ddp.module.w).tolist()

        results, log = run_ranks(2, program)
        assert (results, len(log.of_rank(0))) == ([[9], []], 1)

    def test_sync_every_rounds_each_micro_batch_separately(self, run_ranks):
        """bf16: (256 - 256) + (1 + 0) is 1. But 256 + 1 rounds to 256, and 256 - 256 is 0."""

        def program(rank):
            shards = []
            for sync in ("last", "every"):
                ddp = wrap(Weighted(1.0, dtype=torch.bfloat16), dist.group.WORLD, sync=sync)
                for micro, value in enumerate((256.0, -256.0) if rank == 0 else (1.0, 0.0)):
                    ddp(torch.tensor([value], dtype=torch.bfloat16)).backward()
                    ddp.end_micro_batch(last=micro == 1)
                shards.append(ddp.buffers[0].get_grad_shard(ddp.module.w).tolist())
            return shards

        results, _ = run_ranks(2, program)
        assert results == [[[1], [0]], [[], []]]

    def test_refuse_one_after_the_last(self, lone_group):
        """The sum is complete; another micro-batch belongs to the next step."""
        ddp = wrap(Weighted(1.0), lone_group)
        ddp.end_micro_batch(True)
        with pytest.raises(UsageError, match=r"end_micro_batch\(\) after it"):
            ddp.end_micro_batch(False)


class TestRedundancy:
    """Several shard groups, each with the full state."""

    def wrap_blocks(self, redundancy, *, broadcast_params=True, **config):
        """Wrap a module of two elements on this rank."""
        return wrap(
            Weighted(1.0, 1.0),
            build_redundancy_groups(dist.group.WORLD, redundancy=redundancy),
            broadcast_params=broadcast_params,
            redundancy=redundancy,
            **config,
        )

    @pytest.mark.parametrize("redundancy", [2, 4])
    def test_sums_over_all_ranks(self, run_ranks, redundancy):
        """The sum goes beyond the shard group, even one of one rank; the divisor counts all."""

        def program(rank):
            ddp = self.wrap_blocks(redundancy)
            ddp(torch.tensor([1.0, 2.0]) * 10**rank).backward()
            ddp.finish_grad_sync()
            return ddp.buffers[0].get_grad_shard(ddp.module.w).tolist(), ddp.divisor.item()

        results, _ = run_ranks(4, program)
        halves = [([1111], 4), ([2222], 4)]
        assert results == (halves * 2 if redundancy == 2 else [([1111, 2222], 4)] * 4)

    def test_moves_only_shards_between_shard_groups(self, run_ranks):
        """A bucket of 2 inside a shard group, then a shard of 1 across; the gather stays inside."""

        def program(rank):
            ddp = self.wrap_blocks(2, broadcast_params=False)
            ddp.finish_grad_sync()
            ddp.start_param_gather()

        _, log = run_ranks(4, program)
        calls = [(r.kind, r.elems, r.group_ranks) for r in log.of_rank(3)]
        assert calls == [
            ("reduce_scatter", 2, (2, 3)),
            ("all_reduce", 1, (1, 3)),
            ("all_gather", 1, (2, 3)),
        ]

    def test_refuses_missing_groups(self, run_ranks):

        def program(rank):
            with pytest.raises(UsageError, match=r"redundancy=2, got None.*build_redundancy"):
                wrap(Weighted(1.0), dist.group.WORLD, redundancy=2)

        run_ranks(2, program)

    def test_refuses_swapped_groups(self, run_ranks):

        def program(rank):
            right = build_redundancy_groups(dist.group.WORLD, redundancy=2)
            wrong = KindGroups(
                group=right.group,
                shard_group=right.replica_group,
                replica_group=right.shard_group,
            )
            with pytest.raises(UsageError, match="expected shard_group to have 3 ranks"):
                DistributedDataParallel(
                    Weighted(1.0),
                    config=zero_config(redundancy=2),
                    group=wrong,
                )

        run_ranks(6, program)

    def test_refuses_a_partial_shard_group_without_replicas(self, run_ranks):
        """A single replica is sharded over all ranks, or some gradients would be missing."""

        def program(rank):
            pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
            with pytest.raises(UsageError, match="shard_group to have 4 ranks"):
                DistributedDataParallel(
                    Weighted(1.0),
                    config=ZeroConfig(),
                    group=KindGroups(group=dist.group.WORLD, shard_group=pairs[rank // 2]),
                )

        run_ranks(4, program)

    def test_refuses_uneven_shard_groups(self, run_ranks):

        def program(rank):
            with pytest.raises(LayoutError, match="redundancy=2 for 3 ranks"):
                wrap(Weighted(1.0), dist.group.WORLD, redundancy=2)

        run_ranks(3, program)


class TestConstruction:
    """Buffers and initial values of a wrapped module."""

    def test_groups_params_by_dtype(self, lone_group):
        module = nn.ModuleList([Weighted(1.0, dtype=torch.bfloat16), Weighted(1.0, 2.0)])
        ddp = wrap(module, lone_group)
        assert [str(b.plan.key) for b in ddp.buffers] == ["dense/bf16", "dense/fp32"]

    def test_groups_params_by_kind(self, lone_group):
        """Params of different kinds share no buffer."""
        module = nn.ModuleDict({"expert": Weighted(1.0), "router": Weighted(1.0, 2.0)})
        ddp = DistributedDataParallel(
            module,
            config=ZeroConfig(),
            group=lone_group,
            kind_of=lambda name, param: "expert" if "expert" in name else "dense",
        )
        kinds = [(str(b.plan.key), b.plan.numel) for b in ddp.buffers]
        assert kinds == [("expert/fp32", 1), ("dense/fp32", 2)]

    @pytest.mark.parametrize("stage", [0, 1])
    def test_broadcasts_params_and_module_buffers(self, run_ranks, stage):
        """Ranks with different initial bits end with rank 0's, frozen params included."""

        def program(rank):
            module = nn.Sequential(Weighted(1.0 + rank), nn.BatchNorm1d(1), Weighted(5.0 + rank))
            module[1].running_mean.fill_(7.0 + rank)
            module[2].requires_grad_(False)
            wrap(module, dist.group.WORLD, stage=stage)
            return [t.item() for t in (module[0].w, module[1].running_mean, module[2].w)]

        results, _ = run_ranks(2, program)
        assert results == [[1, 7, 5]] * 2

    def test_broadcasts_nothing_if_disabled(self, run_ranks):

        def program(rank):
            module = Weighted(1.0 + rank)
            wrap(module, dist.group.WORLD, broadcast_params=False)
            return module.w.item()

        results, log = run_ranks(2, program)
        assert (results, log.of_rank(0)) == ([1, 2], [])

    def test_refuses_a_wrapped_module(self, lone_group):
        """A second wrapper would count every gradient twice."""
        module = Weighted(1.0)
        wrap(module, lone_group)
        with pytest.raises(ModelError, match="not wrapped yet, got 'w'"):
            wrap(module, lone_group)

    def test_refuses_no_group(self):
        with pytest.raises(UsageError, match="explicit process group"):
            wrap(Weighted(1.0), None)
