"""Ranks on separate streams, and asynchronous copies to pinned memory."""

import pytest
import torch
import torch.distributed as dist

from zero_sim.sim import World

ELEMS = 1 << 20
"""Enough for a copy or sum to outlast the next Python line."""


@pytest.mark.parametrize("timing", ["eager", "lazy", "hostile"])
def test_side_stream_collective_sees_writes_of_its_stream(device, timing):
    def program(rank):
        x = torch.zeros(ELEMS, device=device)
        module = torch.get_device_module(device)
        side = module.Stream()
        side.wait_stream(module.current_stream())
        with module.stream(side):
            for _ in range(10):
                x.add_(rank + 1)
            dist.all_reduce(x)
            x.mul_(2)
        module.current_stream().wait_stream(side)
        return x.unique().tolist()

    with World(3, timing=timing, seed=1) as world:
        assert world.run(program) == [[120.0]] * 3


def test_collective_matches_ranks_on_different_streams(device):
    """Rank 0 uses the default stream, rank 1 another one."""

    def program(rank):
        module = torch.get_device_module(device)
        side = module.Stream() if rank else module.current_stream()
        side.wait_stream(module.current_stream())
        with module.stream(side):
            x = torch.full((ELEMS,), float(rank + 1), device=device)
            x.add_(1)
            whole = torch.empty(2 * ELEMS, device=device)
            dist.all_gather_single(whole, x)
            whole.add_(1)
        module.current_stream().wait_stream(side)
        return whole.view(2, -1)[:, 0].tolist(), len(whole.unique())

    with World(2) as world:
        assert world.run(program) == [([3.0, 4.0], 2)] * 2


def test_state_in_pinned_memory_is_complete_after_event(device):
    """Asynchronous checkpoints copy on a side stream while training continues."""
    module = torch.get_device_module(device)
    params = [torch.full((ELEMS,), float(index), device=device) for index in range(4)]
    kept = [torch.empty(ELEMS, pin_memory=True) for _ in params]
    side, copied = module.Stream(), module.Event()
    side.wait_stream(module.current_stream())
    with module.stream(side):
        for param, place in zip(params, kept, strict=True):
            place.copy_(param, non_blocking=True)
        copied.record()
    module.current_stream().wait_event(copied)
    for param in params:
        param.add_(100)
    copied.synchronize()
    assert [place.unique().tolist() for place in kept] == [[0.0], [1.0], [2.0], [3.0]]
