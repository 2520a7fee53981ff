"""Flat memory for params of a single kind and dtype."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from zero_sim.errors import LayoutError, UsageError
from zero_sim.layout import LayoutPolicy, ParamSpec, plan_buffers
from zero_sim.zero import Buffer
from zero_sim.zero.groups import KindGroups
from zero_sim.zero.sharding import sharding_of


def make_buffer(
    params, *, group, stage=1, grad_dtype=torch.float32, replica_group=None, every=False, **policy
):
    """Build the only buffer of named fp32 params; `shard_count` follows the group."""
    specs = [
        ParamSpec(name=name, shape=tuple(param.shape), dtype="fp32")
        for name, param in params.items()
    ]
    groups = KindGroups(
        group=group,
        shard_group=group if stage else None,
        replica_group=replica_group if stage else group,
    )
    shard_count = dist.get_world_size(group) if stage else 1
    policy = LayoutPolicy(**{"shard_count": shard_count, **policy})
    (plan,) = plan_buffers(specs, policy=policy)
    return Buffer(
        plan,
        params=params,
        sharding=sharding_of(stage),
        groups=groups,
        grad_dtype=grad_dtype,
        accumulate_sums=every,
    )


def make_params(*sizes):
    """Make 1-D params p0, p1, ... with consecutive values."""
    values = torch.arange(float(sum(sizes))).split(list(sizes))
    return {f"p{i}": nn.Parameter(value.clone()) for i, value in enumerate(values)}


class TestViews:
    """Params and gradients as views of flat memory."""

    def test_params_keep_their_values(self, lone_group):
        params = make_params(3, 2)
        buffer = make_buffer(params, group=lone_group, align_elems=4)
        assert buffer.param_data.tolist() == [0, 1, 2, 3, 4, 0, 0, 0]
        assert params["p1"].tolist() == [3, 4]

    def test_params_follow_the_flat_memory(self, lone_group):
        params = make_params(3, 2)
        buffer = make_buffer(params, group=lone_group)
        buffer.param_data[4] = 9
        assert params["p1"].tolist() == [3, 9]

    def test_gradients_have_the_param_shape_and_their_own_dtype(self, lone_group):
        params = {"w": nn.Parameter(torch.ones(2, 3))}
        buffer = make_buffer(params, group=lone_group, grad_dtype=torch.bfloat16)
        params["w"].main_grad[1, 2] = 7
        assert params["w"].main_grad.dtype is torch.bfloat16
        assert buffer.grad_data.tolist() == [0, 0, 0, 0, 0, 7]

    def test_transposed_param_keeps_its_logical_order(self, lone_group):
        """A param with non-contiguous strides is laid out row by row, in the order of its shape."""
        params = {"w": nn.Parameter(torch.arange(6.0).reshape(2, 3).t())}
        before = params["w"].tolist()
        buffer = make_buffer(params, group=lone_group)
        assert buffer.param_data.tolist() == [0, 3, 1, 4, 2, 5]
        assert params["w"].tolist() == before

    def test_stage_0_does_not_move_params(self, lone_group):
        """Without shards, flat param memory would be waste."""
        params = make_params(3)
        place = params["p0"].data_ptr()
        buffer = make_buffer(params, group=lone_group, stage=0)
        assert buffer.param_data is None
        assert params["p0"].data_ptr() == place


class TestReduction:
    """Sums of gradients over ranks, bucket by bucket."""

    def test_scatters_each_bucket(self, run_ranks):
        """Every rank finds the sum of its own part of each param, and nothing else."""

        def program(rank):
            params = make_params(3, 4)
            buffer = make_buffer(params, group=dist.group.WORLD, bucket_elems=1)
            for param in params.values():
                param.main_grad.copy_(torch.arange(1.0, param.numel() + 1) * 10**rank)
            buffer.reduce_grads()
            return [buffer.get_grad_shard(param).tolist() for param in params.values()]

        results, log = run_ranks(2, program)
        assert results == [[[11, 22], [11, 22]], [[33], [33, 44]]]
        assert [record.elems for record in log.of_rank(0)] == [4, 4]

    def test_sums_whole_buckets_with_stage_0(self, run_ranks):

        def program(rank):
            params = make_params(3)
            buffer = make_buffer(params, group=dist.group.WORLD, stage=0)
            params["p0"].main_grad.fill_(10.0**rank)
            buffer.reduce_grads()
            return buffer.get_grad_shard(params["p0"]).tolist()

        results, _ = run_ranks(2, program)
        assert results == [[11, 11, 11]] * 2

    @pytest.mark.parametrize("stage", [0, 1])
    def test_leaves_padding_at_zero(self, run_ranks, stage):
        """Padding takes part in every sum and division and stays zero."""

        def program(rank):
            params = make_params(3, 1)
            buffer = make_buffer(
                params, group=dist.group.WORLD, stage=stage, bucket_elems=1, align_elems=4
            )
            for param in params.values():
                param.main_grad.fill_(1.0 + rank)
            for bucket in buffer.units:
                bucket.scale_grads("pre", divisor=torch.tensor(3.0))
            buffer.reduce_grads()
            paddings = [bucket.padding for bucket in buffer.plan.buckets]
            return [buffer.grad_data[p.start : p.stop].abs().sum().item() for p in paddings]

        results, _ = run_ranks(3, program)
        assert results == [[0, 0]] * 3

    def test_empty_bucket_makes_no_collective(self, run_ranks):
        """All ranks know from the plan that the bucket is empty."""

        def program(rank):
            buffer = make_buffer({"p": nn.Parameter(torch.zeros(0))}, group=dist.group.WORLD)
            buffer.reduce_grads()
            buffer.allgather_params()

        _, log = run_ranks(2, program)
        assert log.of_rank(0) == []

    @pytest.mark.parametrize("stage", [0, 3])
    def test_allgather_params_is_refused_at_stages_0_and_3(self, lone_group, stage):
        """Without shards there is nothing to gather; at stage 3 params are gathered on use."""
        buffer = make_buffer(make_params(2), group=lone_group, stage=stage)
        with pytest.raises(UsageError, match=r"unsharded params.*got allgather_params\(\)"):
            buffer.allgather_params()


class TestUnevenShards:
    """Shards without padding: ranks own different numbers of elements, possibly none."""

    def test_are_reduced_and_gathered(self, run_ranks):
        """Three elements over two ranks give 2 + 1; five give 3 + 2."""

        def program(rank):
            params = make_params(3, 5)
            buffer = make_buffer(params, group=dist.group.WORLD, bucket_elems=1, partition="uneven")
            for param in params.values():
                param.main_grad.fill_(10.0**rank)
            buffer.reduce_grads()
            for param in params.values():
                buffer.write_param_shard(param, buffer.get_grad_shard(param) + rank)
            buffer.allgather_params()
            return [param.tolist() for param in params.values()]

        results, log = run_ranks(2, program)
        assert results == [[[11, 11, 12], [11, 11, 11, 12, 12]]] * 2
        kinds = [record.kind for record in log.of_rank(0)]
        assert kinds == ["reduce_scatter_list"] * 2 + ["all_to_all"] * 2

    def test_even_split_uses_plain_collectives(self, run_ranks):
        """The plan shows every rank that this bucket divides evenly."""

        def program(rank):
            buffer = make_buffer(make_params(4), group=dist.group.WORLD, partition="uneven")
            buffer.reduce_grads()
            buffer.allgather_params()

        _, log = run_ranks(2, program)
        assert [record.kind for record in log.of_rank(1)] == ["reduce_scatter", "all_gather"]

    def test_empty_shards_are_not_summed_over_replicas(self, run_ranks):
        """With one element and two replicas, owners of the empty second shard add nothing."""

        def program(rank):
            pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
            across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
            params = make_params(1)
            buffer = make_buffer(
                params,
                group=pairs[rank // 2],
                replica_group=across[rank % 2],
                partition="uneven",
            )
            params["p0"].main_grad.fill_(10.0**rank)
            buffer.reduce_grads()
            return buffer.get_grad_shard(params["p0"]).tolist()

        results, log = run_ranks(4, program)
        assert results == [[1111], [], [1111], []]
        counts = [sum(r.kind == "all_reduce" for r in log.of_rank(rank)) for rank in range(4)]
        assert counts == [1, 0, 1, 0]


class TestAccumulatedSums:
    """Sums of several micro-batches, accumulated in separate memory."""

    def test_owner_reads_accumulated_sums(self, run_ranks):
        """Each bucket accumulates its shard of each sum; gradients are zero after each."""

        def program(rank):
            params = make_params(3, 4)
            buffer = make_buffer(params, group=dist.group.WORLD, bucket_elems=1, every=True)
            for micro in range(2):
                for param in params.values():
                    param.main_grad.fill_(1.0 + rank + 10 * micro)
                buffer.reduce_grads()
                for bucket in buffer.units:
                    bucket.accumulate_sum(is_first=micro == 0)
                assert not buffer.grad_data.any()
            totals = [buffer.get_grad_shard(param).tolist() for param in params.values()]
            buffer.zero_grads()
            return totals, buffer.total_data.tolist()

        results, _ = run_ranks(2, program)
        assert results == [([[26, 26], [26, 26]], [0] * 4), ([[26], [26, 26]], [0] * 4)]


class TestInSteps:
    """Asynchronous operations, finished later."""

    def test_finish_reduce_completes_the_replica_sum(self, run_ranks):
        """finish_reduce sums over the replicas even if the caller did not chain that sum."""

        def program(rank):
            alone = [dist.new_group([0]), dist.new_group([1])]
            params = make_params(2)
            buffer = make_buffer(params, group=alone[rank], replica_group=dist.group.WORLD)
            params["p0"].main_grad.fill_(10.0**rank)
            (bucket,) = buffer.units
            bucket.fill()
            bucket.start_reduce()
            bucket.finish_reduce()
            return buffer.get_grad_shard(params["p0"]).tolist(), bucket.reducing

        results, _ = run_ranks(2, program)
        assert results == [([11, 11], False)] * 2

    def test_write_waits_for_the_gather_of_its_shard(self, run_ranks):
        """The first rank receives values written before the gather, and none written after it."""

        def program(rank):
            params = make_params(2)
            buffer = make_buffer(params, group=dist.group.WORLD)
            param, (bucket,) = params["p0"], buffer.units
            buffer.write_param_shard(param, torch.tensor([5.0]))
            bucket.start_gather()
            if rank == 0:
                buffer.write_param_shard(param, torch.tensor([6.0]))
                return bucket.gathering, param.tolist()
            bucket.finish_gather()
            return bucket.gathering, param.tolist()

        results, _ = run_ranks(2, program)
        assert results == [(False, [6, 5]), (False, [5, 5])]


class TestParamShards:
    """Each rank's part of the params."""

    def test_written_parts_reach_every_rank(self, run_ranks):
        """After the gather, each param has its owners' values, cast to its dtype."""

        def program(rank):
            params = make_params(3, 2)
            buffer = make_buffer(params, group=dist.group.WORLD)
            for param in params.values():
                part = buffer.get_param_shard(param)
                buffer.write_param_shard(param, part.double() + 100 * (rank + 1))
            buffer.allgather_params()
            return [param.tolist() for param in params.values()]

        results, _ = run_ranks(2, program)
        assert results == [[[100, 101, 102], [203, 204]]] * 2

    def test_are_empty_on_ranks_that_own_nothing(self, run_ranks):

        def program(rank):
            params = make_params(1)
            buffer = make_buffer(params, group=dist.group.WORLD)
            shard = buffer.get_grad_shard(params["p0"])
            buffer.write_param_shard(params["p0"], torch.zeros(shard.numel()))
            return tuple(shard.shape)

        results, _ = run_ranks(3, program)
        assert results == [(1,), (0,), (0,)]

    @pytest.mark.parametrize("shape", [(2,), (4,), (3, 1), ()])
    def test_refuse_data_of_another_length(self, lone_group, shape):
        params = make_params(3)
        buffer = make_buffer(params, group=lone_group)
        with pytest.raises(LayoutError, match=r"3 elements.*param 'p0', shard 0 of 1"):
            buffer.write_param_shard(params["p0"], torch.zeros(shape))

    def test_refuse_an_unknown_param(self, lone_group):
        """A param outside the buffer is refused even if its shape fits."""
        buffer = make_buffer(make_params(3), group=lone_group)
        with pytest.raises(LayoutError, match="buffer dense/fp32"):
            buffer.get_grad_shard(nn.Parameter(torch.zeros(3)))

    def test_stage_0_writes_through_param_strides(self, lone_group):
        """A transposed param in its own storage gets each element at its logical position."""
        params = {"w": nn.Parameter(torch.zeros(2, 3).t())}
        buffer = make_buffer(params, group=lone_group, stage=0)
        buffer.write_param_shard(params["w"], torch.arange(6.0))
        assert params["w"].tolist() == [[0, 1], [2, 3], [4, 5]]
        assert buffer.get_param_shard(params["w"]).tolist() == [0, 1, 2, 3, 4, 5]


class TestPlanCheck:
    """Plans that do not match the group or the params."""

    @pytest.mark.parametrize(("stage", "shard_count", "expected"), [(1, 2, 1), (0, 2, 1)])
    def test_shard_count_must_fit_the_group(self, lone_group, stage, shard_count, expected):
        message = f"{expected} shards.*shard_count={shard_count}.*Use plan_buffers"
        with pytest.raises(LayoutError, match=message):
            make_buffer(make_params(4), group=lone_group, stage=stage, shard_count=shard_count)

    def test_params_must_match_the_plan(self, lone_group):
        (plan,) = plan_buffers(
            [ParamSpec(name="a", shape=(2,), dtype="fp32")], policy=LayoutPolicy(shard_count=1)
        )
        with pytest.raises(LayoutError, match=r"missing=\['a'\], extra=\['p0'\]"):
            Buffer(
                plan,
                params=make_params(2),
                sharding=sharding_of(1),
                groups=KindGroups(group=lone_group, shard_group=lone_group),
                grad_dtype=torch.float32,
            )

    def test_shapes_must_match_the_plan(self, lone_group):
        (plan,) = plan_buffers(
            [ParamSpec(name="p0", shape=(2,), dtype="fp32")], policy=LayoutPolicy(shard_count=1)
        )
        with pytest.raises(LayoutError, match=r"\(2,\), as planned, got \(3,\) for param 'p0'"):
            Buffer(
                plan,
                params=make_params(3),
                sharding=sharding_of(1),
                groups=KindGroups(group=lone_group, shard_group=lone_group),
                grad_dtype=torch.float32,
            )
