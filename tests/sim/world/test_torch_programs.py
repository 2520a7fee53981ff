"""torch's own data-parallel code runs unmodified and gives the bits of a plain loop."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from zero_sim.sim import ContractViolation

TIMINGS = [("eager", 0), ("lazy", 0), *(("hostile", seed) for seed in range(3))]


@pytest.fixture(params=[False, True], ids=["plain", "races"])
def world_of(world_of, request):
    """Worlds with and without race detector: programs are clean, and no bit changes."""
    return partial(world_of, races=request.param)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(4, 5, generator=generator)


def plain_loop(size, steps, divide_first):
    """Train on one device: add the ranks' gradients in rank order, average, then AdamW."""
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, foreach=False)
    for step in range(steps):
        totals = [torch.zeros_like(p) for p in net.parameters()]
        for rank in range(size):
            net.zero_grad()
            net(batch(rank, step)).square().mean().backward()
            for total, param in zip(totals, net.parameters(), strict=True):
                total += param.grad * (1 / size) if divide_first else param.grad
        for total, param in zip(totals, net.parameters(), strict=True):
            param.grad = total if divide_first else total / size
        optimizer.step()
    return [param.detach().clone() for param in net.parameters()]


def data_parallel():
    net = DistributedDataParallel(model())
    return net, torch.optim.AdamW(net.parameters(), lr=0.01, foreach=False)


def fully_sharded():
    net = model()
    fully_shard(net, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return net, torch.optim.AdamW(net.parameters(), lr=0.01, foreach=False)


def zero_redundancy():
    net = DistributedDataParallel(model())
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=0.01, foreach=False)
    return net, optimizer


@pytest.mark.parametrize(("timing", "seed"), TIMINGS)
@pytest.mark.parametrize(
    ("build", "size"),
    [
        *((data_parallel, size) for size in (1, 2, 3, 4)),
        *((fully_sharded, size) for size in (2, 3)),
        (zero_redundancy, 3),
    ],
)
def test_training_gives_the_bits_of_a_plain_loop(world_of, build, size, timing, seed):
    def program(rank):
        net, optimizer = build()
        for step in range(3):
            optimizer.zero_grad()
            net(batch(rank, step)).square().mean().backward()
            optimizer.step()
        params = [param.detach() for param in net.parameters()]
        return [param.full_tensor() if build is fully_sharded else param for param in params]

    expected = plain_loop(size, 3, divide_first=build is not fully_sharded)
    for got in world_of(size, timing=timing, seed=seed).run(program):
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize(("timing", "seed"), TIMINGS)
def test_hybrid_shard_mesh_gives_equal_gradients(world_of, timing, seed):
    def program(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        net = model()
        fully_shard(net, mesh=mesh)
        net(batch(rank, 0)).square().mean().backward()
        return dist.get_rank(mesh["shards"].get_group()), net[0].weight.grad.full_tensor()

    got = world_of(4, timing=timing, seed=seed).run(program)
    assert [rank for rank, _ in got] == [0, 1, 0, 1]
    assert all(torch.equal(grad, got[0][1]) for _, grad in got)


@pytest.mark.parametrize("timing", ["eager", "lazy", "hostile"])
def test_work_that_torch_drops_need_not_be_waited_for(world_of, timing):
    """Join notifies other ranks by an all-reduce of zeros that it drops and no program can read."""

    class Shadow(JoinHook):
        def main_hook(self):
            dist.all_reduce(torch.zeros(1))

    class Counting(Joinable):
        def __init__(self):
            super().__init__()
            self.count = 0.0

        def join_hook(self, **_):
            return Shadow()

        join_device = torch.device("cpu")

        @property
        def join_process_group(self):
            return dist.group.WORLD

        def __call__(self):
            Join.notify_join_context(self)
            one = torch.ones(1)
            dist.all_reduce(one)
            self.count += one.item()

    def program(rank):
        counting = Counting()
        with Join([counting]):
            for _ in range(2 + rank):
                counting()
        return counting.count

    assert world_of(2, timing=timing).run(program) == [4.0, 5.0]


class _Mode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [_Mode, lambda: torch.device("cpu")])
def test_caller_of_a_work_is_found_under_a_function_mode(world_of, mode):
    """c10d functions go through such modes, so the modes' frames lie in between."""

    def joining(rank):
        with mode():
            model = DistributedDataParallel(torch.nn.Linear(1, 1))
            with Join([model]):
                for _ in range(2 + rank):
                    model.zero_grad()
                    model(torch.ones(1, 1)).sum().backward()
        return model.module.bias.grad.item()

    # The last step of rank 1 is divided by two, as if the other rank had added zeros.
    assert world_of(2).run(joining) == [1.0, 0.5]

    def dropping(rank):
        with mode():
            dist.all_reduce(torch.zeros(3), async_op=True)
            dist.barrier()

    with pytest.raises(ContractViolation, match="without having waited for 1 asynchronous call"):
        world_of(2).run(dropping)
