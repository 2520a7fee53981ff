"""Reduce buffers: temporary memory for gradients, as few as possible."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.configs import zero_config
from zero_sim.errors import UsageError
from zero_sim.zero import (
    DistributedDataParallel,
    DistributedOptimizer,
    Seams,
    Unit,
    ZeroConfig,
    build_redundancy_groups,
)
from zero_sim.zero.seams import TEXTBOOK
from zero_sim.zero.variants.gathers import chunked_units
from zero_sim.zero.variants.reduce_buffers import BufferedGrads, BufferSettings
from zero_sim.zero.variants.root_reduce import AllReducedUnit, SummedAtFirstUnit

STAGE_2 = {"stage": 2, "sync": "every", "bucket_elems": None}


def wrap(config, depth=3, seams=TEXTBOOK, **settings):
    layers = [nn.Linear(2, 2, bias=False) for _ in range(depth)]
    for index, layer in enumerate(layers):
        nn.init.constant_(layer.weight, 0.5 + index)
    model = nn.Sequential(*layers)
    config = zero_config(**{**STAGE_2, **config})
    settings = BufferSettings(**{"elems": 4, **settings})
    seams = replace(seams, grads=partial(BufferedGrads, settings=settings))
    return DistributedDataParallel(model, config=config, group=dist.group.WORLD, seams=seams)


def backward(ddp, scale=1.0):
    (ddp(torch.ones(1, 2)) * scale).sum().backward()


def watch(ddp, look):
    """Collect `look()` as each gradient arrives, after the engine's own hook."""
    seen = []
    for param in ddp.params.values():
        param.register_post_accumulate_grad_hook(lambda _: seen.append(look()))
    return seen


@pytest.mark.parametrize(("overlap", "most"), [(True, 2), (False, 1)])
def test_number_of_buffers_is_bounded(world_of, overlap, most):
    """With overlap, one buffer fills while the other is in flight."""
    world = world_of(2)

    def program(rank):
        ddp = wrap({"overlap_grads": overlap}, depth=5)
        seen = watch(ddp, lambda: len(ddp.grad_schedule.buffers.memory))
        ddp.begin_last_micro_batch()
        backward(ddp)
        ddp.finish_grad_sync()
        return max(seen), len(ddp.grad_schedule.buffers.memory)

    assert world.run(program) == [(most, 0)] * 2


def test_gradients_are_dropped_once_copied(world_of):
    world = world_of(2)

    def program(rank):
        ddp = wrap({"overlap_grads": True})
        seen = watch(ddp, lambda: [p.grad is None for p in ddp.params.values()])
        ddp.begin_last_micro_batch()
        backward(ddp)
        ddp.finish_grad_sync()
        return seen

    assert world.run(program) == [[[True] * 3] * 3] * 2


def test_gradients_of_a_buffer_wait_for_each_other(world_of):
    """Two of three gradients share a buffer: the first stays until the second arrives."""
    world = world_of(2)

    def program(rank):
        ddp = wrap({}, contiguous_grads=False, elems=8)
        seen = watch(ddp, lambda: sum(p.grad is not None for p in ddp.params.values()))
        ddp.begin_last_micro_batch()
        backward(ddp)
        ddp.finish_grad_sync()
        return seen

    assert world.run(program) == [[1, 0, 0]] * 2


@pytest.mark.parametrize("stage", [1, 2])
def test_second_gradient_before_reduction_is_added(world_of, stage):
    """Two backwards in one micro-batch; the first does not complete the unit."""
    world = world_of(1)

    def program(rank):
        ddp = wrap({"stage": stage}, elems=100)
        ddp.begin_last_micro_batch()
        last = ddp.params["2.weight"]
        (last.sum() * 3).backward()
        (last.sum() * 4).backward()
        ddp.finish_grad_sync()
        (buffer,) = ddp.buffers
        return buffer.get_grad_shard(last).tolist()

    assert world.run(program) == [[7.0] * 4]


def test_second_gradient_after_reduction_is_refused(world_of):
    world = world_of(1)

    def program(rank):
        ddp = wrap({"overlap_grads": True})
        ddp.begin_last_micro_batch()
        backward(ddp)
        with pytest.raises(UsageError, match="after its bucket was issued"):
            backward(ddp)
        ddp.finish_grad_sync()

    world.run(program)


def test_missing_gradients_are_zero(world_of):
    """One rank only; the buffer still has values of its previous user."""
    world = world_of(2)

    def program(rank):
        ddp = wrap({"divide": "none"})
        for used in ("2.weight", "0.weight"):
            ddp.zero_grad_buffer()
            ddp.begin_last_micro_batch()
            if rank == 0:
                ddp.params[used].sum().backward()
            ddp.finish_grad_sync()
        (buffer,) = ddp.buffers
        return {name: buffer.get_grad_shard(p).tolist() for name, p in ddp.params.items()}

    first, second = world.run(program)
    assert first == {"0.weight": [1.0] * 4, "1.weight": [0.0] * 2, "2.weight": []}
    assert second == {"0.weight": [], "1.weight": [0.0] * 2, "2.weight": [0.0] * 4}


def test_without_begin_call_gradients_are_copied_at_the_end(world_of):
    world = world_of(2)

    def program(rank):
        ddp = wrap({})
        optimizer = DistributedOptimizer(ddp, optim_factory=lambda p: torch.optim.SGD(p, lr=1.0))
        backward(ddp, scale=rank + 1.0)
        ddp.finish_grad_sync()
        optimizer.step()
        return [param.tolist() for param in ddp.params.values()]

    first, second = world.run(program)
    assert first == second


def test_chunks_fill_the_same_params(world_of):
    """Chunks of each rank's shard, from one element up; the last chunk is shorter."""
    world = world_of(3)

    def program(rank):
        found = []
        for chunk in (None, 1, 5, 7, 100):
            unit = Unit if chunk is None else chunked_units(chunk, config=ZeroConfig())
            ddp = wrap({"partition": "uneven"}, seams=Seams(unit=unit))
            (buffer,) = ddp.buffers
            for param in ddp.params.values():
                own = buffer.get_param_shard(param)
                buffer.write_param_shard(param, torch.arange(own.numel()) + 10.0 * rank)
            ddp.gather_params()
            found.append(torch.cat([p.flatten() for p in ddp.params.values()]).tolist())
        return found

    for found in world.run(program):
        assert all(each == found[0] for each in found)


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"stage": 3}, "stage 1 or 2 with reduce buffers"),
        ({"stage": 0, "sync": "last"}, "stage 1 or 2 with reduce buffers"),
        ({"sync": "last"}, "sync='every' with reduce buffers and stage=2"),
    ],
)
def test_refuses_incompatible_config(world_of, config, match):
    def program(rank):
        with pytest.raises(UsageError, match=match):
            wrap(config)

    world_of(1).run(program)


def test_refuses_redundancy(world_of):
    def program(rank):
        blocks = build_redundancy_groups(dist.group.WORLD, redundancy=2)
        with pytest.raises(UsageError, match="redundancy=1 with reduce buffers"):
            DistributedDataParallel(
                nn.Linear(2, 2),
                config=zero_config(redundancy=2),
                group=blocks,
                seams=Seams(grads=partial(BufferedGrads, settings=BufferSettings(elems=4))),
            )

    world_of(2).run(program)


@pytest.mark.parametrize("unit", [AllReducedUnit, SummedAtFirstUnit])
def test_refuses_units_with_their_own_sums(world_of, unit):
    """The buffers sum gradients, so the units' sums would never be issued."""

    def program(rank):
        with pytest.raises(UsageError, match=f"got {unit.__name__} for bucket 0"):
            wrap({}, seams=Seams(unit=unit))

    world_of(1).run(program)


def test_refuses_zero_length():
    with pytest.raises(UsageError, match="elems to be an integer of at least 1"):
        BufferSettings(elems=0)


@pytest.mark.parametrize(
    ("chunk", "config", "match"),
    [
        (-1, {}, "chunk_elems to be an integer of at least 1"),
        (1, {"stage": 3}, "stage 1 or 2 with chunk_elems"),
        (1, {"overlap_params": True}, "overlap_params=False"),
        (1, {"partition": "one-owner"}, "because every rank needs a shard"),
    ],
)
def test_chunks_refuse_incompatible_config(chunk, config, match):
    with pytest.raises(UsageError, match=match):
        chunked_units(chunk, config=zero_config(**config))
