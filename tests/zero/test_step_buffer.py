"""Step buffer: fp32 gradients in memory of fixed length, without effect on the bits."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.configs import zero_config
from zero_sim.errors import UsageError
from zero_sim.zero import DistributedDataParallel, DistributedOptimizer, StepSeams, ZeroConfig
from zero_sim.zero.optimizer import AllAtOnce
from zero_sim.zero.variants.step_buffer import StepBuffer
from zero_sim.zero.variants.whole_params import Muon


class _Master:
    def __init__(self, elems):
        self.leaf = torch.zeros(elems)


def lengths(buffer, *elems):
    turns = StepBuffer(None, elems=buffer).turns([_Master(each) for each in elems])
    return [[master.leaf.numel() for master in turn] for turn in turns]


@pytest.mark.parametrize(
    ("buffer", "elems", "turns"),
    [
        (4, (), []),
        (4, (1, 3, 1), [[1, 3], [1]]),
        (4, (5, 1), [[5], [1]]),
        (4, (1, 5, 4, 1), [[1], [5], [4], [1]]),
        (1, (1, 1), [[1], [1]]),
        (9, (2, 3, 4), [[2, 3, 4]]),
    ],
)
def test_turns_fill_the_buffer(buffer, elems, turns):
    assert lengths(buffer, *elems) == turns


def trained(depth, buffer, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(depth)))
    config = zero_config(stage=1, micro_batches=1)
    ddp = DistributedDataParallel(model, config=config, group=dist.group.WORLD)
    seen = []

    def factory(params):
        inner = torch.optim.AdamW(params, lr=0.1)
        inner.register_step_pre_hook(lambda *_: seen.append(_held(inner)))
        return inner

    optimizer = DistributedOptimizer(
        ddp,
        optim_factory=factory,
        clip_norm=0.5,
        seams=StepSeams(stepper=AllAtOnce if buffer is None else partial(StepBuffer, elems=buffer)),
        **settings,
    )
    norms = []
    for step in range(3):
        ddp(torch.full((2, 3), step + 1.0 + dist.get_rank())).square().sum().backward()
        ddp.finish_grad_sync()
        norms.append(float(optimizer.step().norm))
        optimizer.zero_grad()
    return norms, [p.detach().clone() for p in ddp.params.values()], seen


def _held(inner):
    grads = [p.grad for group in inner.param_groups for p in group["params"] if p.grad is not None]
    return sum(
        {g.untyped_storage().data_ptr(): g.untyped_storage().nbytes() for g in grads}.values()
    )


def test_bits_do_not_depend_on_the_buffer(world_of):
    def program(rank):
        norms, params, _ = trained(3, None)
        for buffer in (1, 4, 9, 100):
            others, same, _ = trained(3, buffer)
            assert others == norms
            assert all(torch.equal(a, b) for a, b in zip(params, same, strict=True))

    world_of(3).run(program)


def test_staging_memory_is_independent_of_depth(world_of):
    def program(rank):
        return [max(trained(depth, buffer)[2]) for buffer in (12, None) for depth in (2, 8)]

    assert world_of(1).run(program) == [[48, 48, 96, 384]]


def test_whole_param_optimizer_refuses_a_step_buffer(world_of):
    def program(rank):
        model = nn.Linear(3, 3, bias=False)
        ddp = DistributedDataParallel(model, config=ZeroConfig(), group=dist.group.WORLD)
        with pytest.raises(UsageError, match="expected all gradients at once with Muon"):
            DistributedOptimizer(
                ddp,
                optim_factory=lambda p: Muon(p, momentum=0.9),
                seams=StepSeams(stepper=partial(StepBuffer, elems=4)),
            )

    world_of(1).run(program)


@pytest.mark.parametrize("length", [0, -1, 2.0, True])
def test_invalid_length_is_refused(world_of, length):
    def program(rank):
        with pytest.raises(UsageError, match="elems to be an integer of at least 1"):
            trained(1, length)

    world_of(1).run(program)
