"""Arena: a single allocation for gradients, used as long as they arrive in order."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.configs import zero_config
from zero_sim.errors import UsageError
from zero_sim.layout import Span
from zero_sim.zero import DistributedDataParallel, Seams
from zero_sim.zero.variants.arena import Arena, move_grads
from zero_sim.zero.variants.reduce_buffers import BufferedGrads, BufferSettings


def wrap(depth=4, **config):
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(depth)))
    settings = {"stage": 2, "bucket_elems": 1, "micro_batches": 1} | config
    ddp = DistributedDataParallel(model, config=zero_config(**settings), group=dist.group.WORLD)
    return ddp, move_grads(ddp)


def step(ddp, inputs=None):
    ddp.begin_last_micro_batch()
    ddp(torch.ones(1, 2) if inputs is None else inputs).sum().backward()
    ddp.finish_grad_sync()
    ddp.zero_grad_buffer()


def storages_of(ddp):
    """Collect the storage address of each gradient as it arrives."""
    seen = []
    for param in ddp.params.values():
        param.register_post_accumulate_grad_hook(
            lambda p: seen.append(p.main_grad.untyped_storage().data_ptr())
        )
    return seen


@pytest.mark.parametrize("stage", [2, 3])
def test_all_gradients_lie_in_the_arena(world_of, stage):
    def program(rank):
        ddp, arena = wrap(stage=stage)
        seen = storages_of(ddp)
        step(ddp)
        step(ddp)
        return len(seen), set(seen) == {arena.memory.untyped_storage().data_ptr()}

    assert world_of(2).run(program) == [(8, True)] * 2


def test_early_gradient_gets_its_own_memory(world_of):
    """Each layer has its own backward, first layer first; the arena expects it last."""

    def program(rank):
        ddp, arena = wrap(stage=2)
        layers = list(ddp.module)
        ddp.begin_last_micro_batch()
        grads = {}
        for layer in layers:  # One backward per layer, in reverse of the expected order.
            out = layer(torch.full((1, 2), rank + 1.0))
            out.sum().backward()
            inside = arena.memory.untyped_storage().data_ptr()
            grads[layer] = layer.weight.main_grad.untyped_storage().data_ptr() == inside
            for other in layers[: layers.index(layer)]:
                assert (other.weight.main_grad == rank + 1).all()
            if layer is layers[-2]:
                break
        layers[-1](torch.full((1, 2), rank + 1.0)).sum().backward()
        ddp.finish_grad_sync()
        shards = [buffer.get_grad_shard(p) for buffer in ddp.buffers for p in buffer.memory]
        return list(grads.values()), [bool((shard == 3).all()) for shard in shards]

    assert world_of(2).run(program) == [([True, True, False], [True] * 4)] * 2


def test_length_is_independent_of_depth(world_of):
    def program(rank):
        return [len(wrap(depth=depth)[1].memory) for depth in (2, 9)]

    assert world_of(1).run(program) == [[1024, 1024]]


def test_accumulated_gradients_all_fit_in_the_arena(world_of):
    def program(rank):
        return len(wrap(depth=9, micro_batches=2)[1].memory)

    assert world_of(1).run(program) == [9 * 512]


def test_span_in_use_is_not_given_again():
    arena = Arena(1024, device=torch.device("cpu"))
    first = arena.take(Span(0, 512), dtype=torch.float32)
    assert first.shape == (128,)
    assert arena.take(Span(508, 1024), dtype=torch.bfloat16) is None
    arena.take_back(Span(0, 512))
    assert arena.take(Span(508, 1024), dtype=torch.bfloat16) is not None


def test_stage_1_refuses_an_arena(world_of):
    def program(rank):
        with pytest.raises(UsageError, match="stage=1, which keeps unsharded gradients"):
            wrap(stage=1)

    world_of(1).run(program)


def test_reduce_buffers_refuse_an_arena(world_of):
    """Gradients go through the buffers, so the arena would be unused."""

    def program(rank):
        ddp = DistributedDataParallel(
            nn.Linear(2, 2),
            config=zero_config(stage=2, sync="every"),
            group=dist.group.WORLD,
            seams=Seams(grads=partial(BufferedGrads, settings=BufferSettings(elems=4))),
        )
        with pytest.raises(UsageError, match="got a DistributedDataParallel with reduce buffers"):
            move_grads(ddp)

    world_of(1).run(program)
