"""Reductions under backward and gathers under forward."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.configs import zero_config
from zero_sim.errors import ModelError, UsageError
from zero_sim.zero import DistributedDataParallel
from zero_sim.zero.hooks import find_users


def build(depth=3):
    """Build layers of one weight each, in a bucket each, with the same bits on every rank."""
    layers = [nn.Linear(2, 2, bias=False) for _ in range(depth)]
    for index, layer in enumerate(layers):
        nn.init.constant_(layer.weight, 0.5 + index)
    return nn.Sequential(*layers)


def wrap(module, group, **config):
    """Wrap a module with both overlaps and a bucket for each param."""
    settings = {"overlap_grads": True, "overlap_params": True, "bucket_elems": 1, **config}
    return DistributedDataParallel(module, config=zero_config(**settings), group=group)


def backward(ddp, x=None):
    """Run forward and backward, by default on a row of ones."""
    ddp(torch.ones(1, 2) if x is None else x).sum().backward()


def issued(log, rank=0, kind="reduce_scatter"):
    """Count a rank's issued collectives of a kind."""
    return sum(record.kind == kind for record in log.of_rank(rank))


class TestGrads:
    """Buckets, sent in a fixed order as soon as they are complete."""

    def test_are_sent_while_backward_runs(self, world_of):
        """When the gradient of the first layer arrives, both other buckets are in flight."""
        world = world_of(2)

        def program(rank):
            ddp = wrap(build(), dist.group.WORLD)
            in_flight = []
            weight = ddp.params["0.weight"]
            weight.register_hook(
                lambda grad: in_flight.append([b.reducing for b in ddp.buffers[0].units])
            )
            ddp.begin_last_micro_batch()
            backward(ddp)
            after = [b.reducing for b in ddp.buffers[0].units]
            ddp.finish_grad_sync()
            return in_flight, after, [b.reducing for b in ddp.buffers[0].units]

        expected = ([[False, True, True]], [True] * 3, [False] * 3)
        assert world.run(program) == [expected] * 2

    def test_are_not_sent_before_the_last_micro_batch(self, world_of):
        """Backward only accumulates until begin_last_micro_batch."""
        world = world_of(2)

        def program(rank):
            ddp = wrap(build(), dist.group.WORLD)
            backward(ddp)
            before = issued(world.log, rank)
            ddp.end_micro_batch(False)
            ddp.begin_last_micro_batch()
            backward(ddp)
            after = issued(world.log, rank)
            ddp.finish_grad_sync()
            return before, after

        assert world.run(program) == [(0, 3)] * 2

    @pytest.mark.parametrize("param_order", ["registration", "reverse"])
    def test_are_sent_in_one_order_if_ranks_skip_layers(self, world_of, param_order):
        """Each rank skips another layer, whose bucket is sent at the end, in order."""
        world = world_of(3, schedule="random", seed=1)

        def program(rank):
            module = build()
            ddp = wrap(module, dist.group.WORLD, param_order=param_order)
            ddp.begin_last_micro_batch()
            used = [layer for index, layer in enumerate(module) if index != rank]
            nn.Sequential(*used)(torch.ones(1, 2)).sum().backward()
            early = issued(world.log, rank)
            ddp.finish_grad_sync()
            return early, issued(world.log, rank)

        assert world.run(program) == [(2, 3), (1, 3), (0, 3)]

    def test_do_not_wait_for_frozen_params(self, world_of):
        world = world_of(2)

        def program(rank):
            ddp = wrap(build(), dist.group.WORLD)
            ddp.params["2.weight"].requires_grad_(False)
            ddp.begin_last_micro_batch()
            early = issued(world.log, rank)
            backward(ddp)
            late = issued(world.log, rank)
            ddp.finish_grad_sync()
            return early, late

        assert world.run(program) == [(1, 3)] * 2

    def test_layer_used_twice_is_sent_once(self, lone_group):
        """Both uses are in the gradient before the bucket is sent."""
        layer = nn.Linear(2, 2, bias=False)
        nn.init.constant_(layer.weight, 1.0)
        ddp = wrap(nn.Sequential(layer, nn.Tanh(), layer), lone_group)
        ddp.begin_last_micro_batch()
        backward(ddp)
        ddp.finish_grad_sync()
        weight = layer.weight.detach().clone().requires_grad_()
        (torch.tanh(torch.ones(1, 2) @ weight.T) @ weight.T).sum().backward()
        assert ddp.buffers[0].get_grad_shard(layer.weight).tolist() == weight.grad.view(-1).tolist()

    def test_refuse_a_second_backward(self, lone_group):
        """The gradient would be added to memory that a collective reads."""
        ddp = wrap(build(), lone_group)
        ddp.begin_last_micro_batch()
        backward(ddp)
        with pytest.raises(UsageError, match=r"one gradient of '2.weight'.*overlap_grads=False"):
            backward(ddp)

    @pytest.mark.parametrize("call", ["begin_last_micro_batch", "zero_grad_buffer"])
    def test_refuse_a_call_before_the_end_of_the_step(self, lone_group, call):
        """Gradients in flight need a wait."""
        ddp = wrap(build(), lone_group)
        ddp.begin_last_micro_batch()
        with pytest.raises(UsageError, match="after begin_last_micro_batch"):
            getattr(ddp, call)()

    def test_refuse_an_end_that_is_not_last(self, lone_group):
        ddp = wrap(build(), lone_group)
        ddp.begin_last_micro_batch()
        with pytest.raises(UsageError, match="with sync='last', got last=False"):
            ddp.end_micro_batch(False)

    def test_work_under_activation_checkpoints(self, lone_group):
        """Recomputed layers give each gradient once."""
        module = build()

        class Checkpointed(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = module

            def forward(self, x):
                return checkpoint(self.inner, x, use_reentrant=False)

        ddp = wrap(Checkpointed(), lone_group)
        ddp.begin_last_micro_batch()
        backward(ddp, torch.ones(1, 2, requires_grad=True))
        ddp.finish_grad_sync()
        assert ddp.params["inner.0.weight"].main_grad.abs().sum() > 0


def write_and_gather(ddp, value):
    """Let every owner write a value, and start the gathers."""
    for buffer in ddp.buffers:
        for param in buffer.memory:
            shard = buffer.get_param_shard(param)
            buffer.write_param_shard(param, torch.full_like(shard, value))
    ddp.start_param_gather()


class TestParams:
    """Modules wait only for their own params."""

    def test_module_waits_for_its_own_params(self, world_of):
        """When a layer begins, its bucket and earlier ones are complete and later ones are not."""
        world = world_of(2, schedule="random", seed=2)

        def program(rank):
            module = build()
            ddp = wrap(module, dist.group.WORLD)
            states = []
            for layer in module:
                layer.register_forward_pre_hook(
                    lambda *_: states.append([b.gathering for b in ddp.buffers[0].units])
                )
            write_and_gather(ddp, 2.0)
            before = [b.gathering for b in ddp.buffers[0].units]
            out = ddp(torch.ones(1, 2))
            return before, states, out.tolist()

        states = [[False, True, True], [False, False, True], [False, False, False]]
        assert world.run(program) == [([True] * 3, states, [[64, 64]])] * 2

    def test_write_waits_for_the_gather(self, world_of):
        """The owner of a layer that no forward used must not overwrite a shard in flight."""
        world = world_of(3, schedule="random", seed=3)

        def program(rank):
            ddp = wrap(build(), dist.group.WORLD)
            for value in (2.0, 3.0):
                write_and_gather(ddp, value)
            ddp.finish_param_gather()
            return [param.unique().tolist() for param in ddp.params.values()]

        assert world.run(program) == [[[3]] * 3] * 3

    def test_either_tied_layer_waits(self, lone_group):
        module = build(2)
        module[1].weight = module[0].weight
        ddp = wrap(module, lone_group)
        write_and_gather(ddp, 2.0)
        module[1](torch.ones(1, 2))
        assert not ddp.buffers[0].units[0].gathering

    def test_params_read_by_another_module_are_named(self, lone_group):
        """Backward finds a param that was read without a wait."""

        class Prying(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner = build(2)

            def forward(self, x):
                return nn.functional.linear(x, self.inner[1].weight)

        ddp = wrap(Prying(), lone_group)
        write_and_gather(ddp, 2.0)
        with pytest.raises(ModelError, match=r"'inner.1.weight'.*finish_param_gather"):
            backward(ddp)

    def test_without_overlap_are_complete_at_once(self, run_ranks):
        """start_param_gather is then a blocking gather."""

        def program(rank):
            ddp = wrap(build(), dist.group.WORLD, overlap_params=False)
            write_and_gather(ddp, 2.0)
            return [param.unique().tolist() for param in ddp.params.values()]

        assert run_ranks(2, program)[0] == [[[2]] * 3] * 2

    def test_bare_lists_are_gathered_at_once(self, run_ranks):
        """A bare list has no forward that could wait."""

        def program(rank):
            params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
            ddp = wrap(nn.ParameterList(params), dist.group.WORLD)
            write_and_gather(ddp, 2.0)
            return [param.tolist() for param in params]

        assert run_ranks(2, program)[0] == [[[2, 2]] * 2] * 2


class TestFindUsers:
    """Modules by the params that their forward may read."""

    def test_params_of_containers_belong_to_the_module_above(self):
        """A ParameterList has no forward, so its params belong to the module above."""

        class Holder(nn.Module):
            def __init__(self):
                super().__init__()
                self.parts = nn.ParameterList([nn.Parameter(torch.ones(1))])
                self.layers = nn.ModuleList([nn.Linear(1, 1)])

            def forward(self, x):
                return x

        holder = Holder()
        users = find_users(holder)
        assert users[holder] == list(holder.parts)
        assert users[holder.layers[0]] == list(holder.layers[0].parameters())

    def test_attention_reads_its_output_projection(self):
        """MultiheadAttention reads out_proj.weight without calling out_proj."""
        attention = nn.MultiheadAttention(2, 1)
        assert {id(p) for p in find_users(attention)[attention]} == {
            id(p) for p in attention.parameters()
        }
