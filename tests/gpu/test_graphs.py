"""CUDA graphs: a replayed step gives the bits of the eager step."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

STEPS = 4


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, capturable=True, foreach=True)
    batches = [torch.randn(16, 32).cuda() for _ in range(STEPS)]
    return model, optimizer, batches


def step(model, optimizer, x, *, group=None):
    loss = model(x).square().mean()
    loss.backward()
    for param in model.parameters() if group is not None else ():
        dist.all_reduce(param.grad, group=group)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def results(model, optimizer):
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [value.detach().clone() for value in (*model.parameters(), *states)]


@pytest.mark.parametrize("with_nccl", [False, True])
def test_replayed_step_equals_eager_step(gpu, tmp_path, with_nccl):
    group = None
    if with_nccl:
        dist.init_process_group(
            "nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
        )
        group = dist.group.WORLD
    try:
        eager, optimizer, batches = make()
        for x in batches:
            step(eager, optimizer, x, group=group)
        wanted = results(eager, optimizer)

        model, optimizer, batches = make()
        held, side = batches[0].clone(), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        # The first step creates optimizer state outside the graph, because a capture runs nothing.
        with torch.cuda.stream(side):
            step(model, optimizer, held, group=group)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step(model, optimizer, held, group=group)
        for x in batches[1:]:
            held.copy_(x)
            graph.replay()
        torch.cuda.synchronize()
        got = results(model, optimizer)
    finally:
        if with_nccl:
            dist.destroy_process_group()
    assert all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True))
