"""Unwrapped modules: no hooks, no gradients, params with their own memory."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.configs import zero_config
from zero_sim.errors import UsageError
from zero_sim.zero import DistributedDataParallel, DistributedOptimizer, Seams
from zero_sim.zero.seams import TEXTBOOK
from zero_sim.zero.variants.reduce_buffers import BufferedGrads, BufferSettings

CONFIGS = {
    "stage-0": {"stage": 0},
    "stage-1": {"stage": 1, "overlap_params": True},
    "stage-2": {
        "stage": 2,
        "sync": "every",
        "seams": Seams(grads=partial(BufferedGrads, settings=BufferSettings(elems=5))),
    },
    "stage-3": {"stage": 3},
}


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2))


def hooks_of(module):
    """Count the hooks of each kind on a module, its submodules and its params."""
    counts = [
        len(hooks or ())
        for each in module.modules()
        for hooks in (
            each._forward_pre_hooks,
            each._forward_hooks,
            each._forward_hooks_always_called,
            each._backward_hooks,
            each._backward_pre_hooks,
        )
    ]
    for param in module.parameters():
        counts.append(len(param._post_accumulate_grad_hooks or ()))
        counts.append(len(param._backward_hooks or ()))
    return counts


def train(module, rank, *, seams=TEXTBOOK, **config):
    """Take a step of the wrapped module; return the wrapper."""
    ddp = DistributedDataParallel(
        module,
        config=zero_config(bucket_elems=8, **config),
        group=dist.group.WORLD,
        seams=seams,
    )
    optimizer = DistributedOptimizer(ddp, optim_factory=lambda p: torch.optim.SGD(p, lr=0.1))
    ddp.begin_last_micro_batch()
    ddp(torch.ones(2, 3) * (rank + 1)).sum().backward()
    ddp.finish_grad_sync()
    optimizer.step()
    return ddp


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_unwrap_removes_hooks_gradients_and_buffers(world_of, config):
    world = world_of(2)

    def program(rank):
        module = build()
        before, sizes = (
            hooks_of(module),
            [p.untyped_storage().nbytes() for p in module.parameters()],
        )
        ddp = train(module, rank, **config)
        assert hooks_of(module) != before
        ddp.finish_param_gather()
        expected = {name: param.clone() for name, param in ddp.unsharded_params().items()}
        assert ddp.unwrap() is module
        assert hooks_of(module) == before
        assert sizes == [p.untyped_storage().nbytes() for p in module.parameters()]
        assert all(torch.equal(p, expected[name]) for name, p in module.named_parameters())
        assert not any(hasattr(p, "main_grad") or p.grad is not None for p in module.parameters())

    world.run(program)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_unwrapped_module_trains_and_can_be_wrapped_again(world_of, config):
    """Gradients stay with the params and reach no buffer, and a second wrapper works as usual."""
    world = world_of(2)

    def program(rank):
        module = train(build(), rank, **config).unwrap()
        module(torch.ones(1, 3)).sum().backward()
        assert all(param.grad is not None for param in module.parameters())
        return [p.tolist() for p in train(module, rank, **config).unwrap().parameters()]

    first, second = world.run(program)
    assert first == second


def test_wrapper_refuses_calls_after_unwrap(world_of):
    world = world_of(1)

    def program(rank):
        ddp = train(build(), rank, stage=1)
        ddp.unwrap()
        with pytest.raises(UsageError, match=r"begin_last_micro_batch\(\) after unwrap"):
            ddp.begin_last_micro_batch()
        with pytest.raises(UsageError, match=r"end_micro_batch\(\) after unwrap"):
            ddp.finish_grad_sync()

    world.run(program)
