"""The flat memory of one kind and dtype of param."""

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
    """Build the one buffer of named fp32 params; `shard_count` follows the group."""
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
    """Make 1-D params p0, p1, ... that count up through all of them."""
    values = torch.arange(float(sum(sizes))).split(list(sizes))
    return {f"p{i}": nn.Parameter(value.clone()) for i, value in enumerate(values)}


class TestViews:
    """Params and gradients become views of flat memory."""

    def test_params_keep_their_values(self, lone_group):
        """Moving a param changes nothing but where it lies."""
        params = make_params(3, 2)
        buffer = make_buffer(params, group=lone_group, align_elems=4)
        assert buffer.param_data.tolist() == [0, 1, 2, 3, 4, 0, 0, 0]
        assert params["p1"].tolist() == [3, 4]

    def test_params_follow_the_flat_memory(self, lone_group):
        """A write to the buffer is seen in the param, without a copy."""
        params = make_params(3, 2)
        buffer = make_buffer(params, group=lone_group)
        buffer.param_data[4] = 9
        assert params["p1"].tolist() == [3, 9]

    def test_gradients_have_the_param_s_shape_and_their_own_dtype(self, lone_group):
        """main_grad is a view of grad_data, in the gradient's dtype."""
        params = {"w": nn.Parameter(torch.ones(2, 3))}
        buffer = make_buffer(params, group=lone_group, grad_dtype=torch.bfloat16)
        params["w"].main_grad[1, 2] = 7
        assert params["w"].main_grad.dtype is torch.bfloat16
        assert buffer.grad_data.tolist() == [0, 0, 0, 0, 0, 7]

    def test_hold_the_logical_order_of_a_transposed_param(self, lone_group):
        """A param with foreign strides is laid out row by row, as its shape reads."""
        params = {"w": nn.Parameter(torch.arange(6.0).reshape(2, 3).t())}
        before = params["w"].tolist()
        buffer = make_buffer(params, group=lone_group)
        assert buffer.param_data.tolist() == [0, 3, 1, 4, 2, 5]
        assert params["w"].tolist() == before

    def test_stage_0_leaves_params_where_they_are(self, lone_group):
        """Without shards there is no flat param memory to pay for."""
        params = make_params(3)
        place = params["p0"].data_ptr()
        buffer = make_buffer(params, group=lone_group, stage=0)
        assert buffer.param_data is None
        assert params["p0"].data_ptr() == place


class TestReduction:
    """Gradients are summed over the ranks, bucket by bucket."""

    def test_scatters_each_bucket(self, run_ranks):
        """Every rank finds the sum of its own part of each param, and only there."""

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
        """Without shards every rank finds the whole sum."""

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
        """Padding takes part in every sum and stays zero, also divided."""

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

    def test_of_a_bucket_without_elements_is_no_collective(self, run_ranks):
        """All ranks know from the plan that there is nothing to exchange."""

        def program(rank):
            buffer = make_buffer({"p": nn.Parameter(torch.zeros(0))}, group=dist.group.WORLD)
            buffer.reduce_grads()
            buffer.allgather_params()

        _, log = run_ranks(2, program)
        assert log.of_rank(0) == []

    @pytest.mark.parametrize("stage", [0, 3])
    def test_of_whole_params_needs_some_whose_owners_write_shards(self, lone_group, stage):
        """Without shards there is nothing to gather, and shards of params are gathered on use."""
        buffer = make_buffer(make_params(2), group=lone_group, stage=stage)
        with pytest.raises(UsageError, match=r"unsharded params.*got allgather_params\(\)"):
            buffer.allgather_params()


class TestUnevenShards:
    """Without padding ranks own different numbers of elements, some of them none."""

    def test_are_reduced_and_gathered(self, run_ranks):
        """Three elements over two ranks and five over two: 2 + 1 and 3 + 2."""

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

    def test_that_happen_to_be_even_need_no_lists(self, run_ranks):
        """Every rank knows from the plan that this bucket divides."""

        def program(rank):
            buffer = make_buffer(make_params(4), group=dist.group.WORLD, partition="uneven")
            buffer.reduce_grads()
            buffer.allgather_params()

        _, log = run_ranks(2, program)
        assert [record.kind for record in log.of_rank(1)] == ["reduce_scatter", "all_gather"]

    def test_of_nothing_are_summed_over_replicas_by_nobody(self, run_ranks):
        """One element, two shards, two copies: the second shard's owners have nothing to add."""

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
    """Sums of several micro-batches are added up in memory of their own."""

    def test_are_what_the_owner_sees(self, run_ranks):
        """Per bucket the shard of each sum; the gradients are zero again after each."""

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
    """What is started comes back at once and is finished later."""

    def test_a_reduction_without_its_second_sum_is_finished_whole(self, run_ranks):
        """finish_reduce sums over the replicas also where nobody chained it."""

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

    def test_a_gather_is_waited_for_before_its_shard_is_written(self, run_ranks):
        """The first rank gets what was written before the gather, not what came after it."""

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
    """Each rank writes its part of the working params."""

    def test_written_parts_reach_every_rank(self, run_ranks):
        """After the gather each param is what its owners wrote, cast to its dtype."""

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

    def test_are_empty_where_nothing_is_owned(self, run_ranks):
        """A rank that owns nothing of a param reads and writes 0 elements."""

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
        """The message names the param, the length that is owned and the shape that came."""
        params = make_params(3)
        buffer = make_buffer(params, group=lone_group)
        with pytest.raises(LayoutError, match=r"3 elements.*param 'p0', shard 0 of 1"):
            buffer.write_param_shard(params["p0"], torch.zeros(shape))

    def test_refuse_a_stranger(self, lone_group):
        """A param that the buffer does not hold is an error, also with a fitting shape."""
        buffer = make_buffer(make_params(3), group=lone_group)
        with pytest.raises(LayoutError, match="buffer dense/fp32"):
            buffer.get_grad_shard(nn.Parameter(torch.zeros(3)))

    def test_of_stage_0_write_through_the_param_s_own_strides(self, lone_group):
        """A transposed param in its own storage gets each element where its shape says."""
        params = {"w": nn.Parameter(torch.zeros(2, 3).t())}
        buffer = make_buffer(params, group=lone_group, stage=0)
        buffer.write_param_shard(params["w"], torch.arange(6.0))
        assert params["w"].tolist() == [[0, 1], [2, 3], [4, 5]]
        assert buffer.get_param_shard(params["w"]).tolist() == [0, 1, 2, 3, 4, 5]


class TestPlanCheck:
    """A plan made for something else is refused."""

    @pytest.mark.parametrize(("stage", "shard_count", "expected"), [(1, 2, 1), (0, 2, 1)])
    def test_shard_count_must_fit_the_group(self, lone_group, stage, shard_count, expected):
        """The message holds both numbers and what to plan with."""
        message = f"{expected} shards.*shard_count={shard_count}.*Use plan_buffers"
        with pytest.raises(LayoutError, match=message):
            make_buffer(make_params(4), group=lone_group, stage=stage, shard_count=shard_count)

    def test_params_must_be_those_planned(self, lone_group):
        """Missing and extra params are named."""
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

    def test_shapes_must_be_those_planned(self, lone_group):
        """A param of another shape is named with both shapes."""
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
