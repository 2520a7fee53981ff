"""Futures passed to torch's C++ code are complete before it waits for them, so no rank hangs."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from zero_sim.sim import ContractViolation, DataRace, RankFailed
from zero_sim.sim.world import torch_futures

TIMINGS = ("eager", "lazy", "hostile")


def summed(bucket):
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future()


def chain(state, bucket):
    return summed(bucket).then(lambda each: each.value()[0]).then(lambda each: each.wait().div_(2))


def collected(state, bucket):
    both = torch.futures.collect_all([summed(bucket)])
    return both.then(lambda each: each.value()[0].value()[0].div_(2))


def own_future(state, bucket):
    mean = torch.futures.Future()
    summed(bucket).add_done_callback(lambda each: mean.set_result(each.value()[0].div_(2)))
    return mean


def scatter_then_gather(state, bucket):
    flat = bucket.buffer()
    padded = torch.zeros(-(-flat.numel() // 2) * 2)
    padded[: flat.numel()] = flat
    shard = torch.empty(padded.numel() // 2)

    def gather(each):
        whole = torch.empty_like(padded)
        mean = each.value()[0].div_(2)
        future = dist.all_gather_single(whole, mean, async_op=True).get_future()
        return future.wait()[0][: flat.numel()]

    return dist.reduce_scatter_single(shard, padded, async_op=True).get_future().then(gather)


EXACT = {
    "all_reduce": default_hooks.allreduce_hook,
    "chain": chain,
    "collect_all": collected,
    "own future": own_future,
    "scatter then gather": scatter_then_gather,
}


def trained(rank, register):
    """Params after three steps of DDP with one layer per bucket."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-5)
    register(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.5)
    data = torch.Generator().manual_seed(rank)
    for _ in range(3):
        optimizer.zero_grad()
        ddp(torch.randn(4, 3, generator=data)).square().mean().backward()
        optimizer.step()
    return torch.cat([each.detach().reshape(-1) for each in ddp.parameters()])


class TestCommHooks:
    """DDP's reducer blocks in C++ on the future that a hook returns."""

    @pytest.mark.parametrize("timing", TIMINGS)
    @pytest.mark.parametrize("races", [False, True])
    @pytest.mark.parametrize("name", EXACT)
    def test_averaging_hooks_train_like_no_hook(self, world_of, timing, races, name):
        expected = world_of(2).run(lambda rank: trained(rank, lambda ddp: None))
        world = world_of(2, timing=timing, races=races, seed=3)
        got = world.run(
            lambda rank: trained(rank, lambda ddp: ddp.register_comm_hook(None, EXACT[name]))
        )
        assert all(map(torch.equal, got, expected))

    @pytest.mark.parametrize("hook", ["fp16", "power_sgd"])
    def test_torchs_hooks_give_equal_bits_under_every_timing(self, world_of, hook):
        def register(ddp):
            if hook == "fp16":
                ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
                return
            state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2)
            ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

        first, *others = [
            world_of(2, timing=timing, races=True).run(lambda rank: trained(rank, register))
            for timing in TIMINGS
        ]
        assert torch.equal(*first)
        for other in others:
            assert all(map(torch.equal, other, first))

    @pytest.mark.parametrize("timing", TIMINGS)
    def test_hook_may_combine_the_reducers_sum_with_its_own(self, world_of, timing):
        def register(ddp):
            def hook(state, bucket):
                dist.all_reduce(torch.ones(1), async_op=True).get_future().wait()
                total = ddp.reducer._run_allreduce_hook(bucket)
                return total.then(lambda each: each.value()[0].div_(2))

            ddp.register_comm_hook(None, hook)

        expected = world_of(2).run(lambda rank: trained(rank, lambda ddp: None))
        got = world_of(2, timing=timing).run(lambda rank: trained(rank, register))
        assert all(map(torch.equal, got, expected))

    @pytest.mark.parametrize("timing", TIMINGS)
    def test_hook_runs_on_a_rank_that_has_joined(self, world_of, timing):
        def program(rank):
            model = DistributedDataParallel(nn.Linear(1, 1))
            model.register_comm_hook(None, chain)
            with model.join():
                for _ in range(1 + rank):
                    model.zero_grad()
                    model(torch.ones(1, 1)).sum().backward()
            return model.module.bias.grad.item()

        assert world_of(2, timing=timing, races=True).run(program) == [1.0, 0.5]

    def test_error_in_a_hook_is_raised(self, world_of):
        def hook(state, bucket):
            return summed(bucket).then(lambda each: 1 / 0)

        with pytest.raises(RankFailed, match="ZeroDivisionError"):
            world_of(2).run(
                lambda rank: trained(rank, lambda ddp: ddp.register_comm_hook(None, hook))
            )

    @pytest.mark.parametrize("timing", TIMINGS)
    def test_futures_of_buffers_are_waited_for(self, world_of, timing):
        def hook(state, buffers):
            averaged = [each for each in buffers.values() if each.is_floating_point()]
            return [dist.all_reduce(each, async_op=True).get_future() for each in averaged]

        got = world_of(2, timing=timing, races=True).run(
            lambda rank: trained(rank, lambda ddp: ddp._register_buffer_comm_hook(None, hook))
        )
        assert torch.equal(*got)


def started(x):
    """Plain future that is completed by a callback of a work's future."""
    future = torch.futures.Future()
    work = dist.all_reduce(x, async_op=True)
    work.get_future().add_done_callback(lambda each: future.set_result(each.value()[0]))
    return future


@pytest.mark.parametrize("timing", TIMINGS)
class TestPlainFutures:
    """A plain future can depend on a work through a callback."""

    @pytest.mark.parametrize("races", [False, True])
    def test_wait_for_a_plain_future_waits_for_the_work(self, world_of, timing, races):
        def program(rank):
            x = torch.ones(2) * (rank + 1)
            started(x).then(lambda each: each.value()).wait()
            return x.tolist()

        for seed in range(4):
            world = world_of(2, timing=timing, races=races, seed=seed)
            assert world.run(program) == [[3.0, 3.0]] * 2

    def test_collect_all_mixes_plain_futures_and_works(self, world_of, timing):
        def program(rank):
            second = dist.all_reduce(torch.ones(2), async_op=True).get_future()
            first = started(torch.ones(2))
            return [each.done() for each in torch.futures.collect_all([first, second]).wait()]

        assert world_of(2, timing=timing).run(program) == [[True, True]] * 2

    def test_callback_may_wait_for_a_plain_future(self, world_of, timing):
        def program(rank):
            first = dist.all_reduce(torch.ones(2), async_op=True).get_future()
            first.add_done_callback(lambda each: None)
            plain = torch.futures.Future()
            second = dist.all_reduce(torch.ones(2), async_op=True).get_future()
            second.add_done_callback(lambda each: plain.set_result(rank))
            return first.then(lambda each: plain.wait()).wait()

        assert world_of(2, timing=timing).run(program) == [0, 1]

    def test_polling_a_plain_future_makes_progress_but_is_no_wait(self, world_of, timing):
        def program(rank, wait):
            x = torch.ones(2)
            future = started(x)
            while not future.done():
                pass
            if wait:
                future.wait()
            return x.sum().item()

        world = world_of(2, timing=timing, races=True)
        assert world.run(lambda rank: program(rank, wait=True)) == [4.0, 4.0]
        with pytest.raises(DataRace):
            world.run(lambda rank: program(rank, wait=False))

    def test_wait_for_an_unrelated_future_is_no_wait(self, world_of, timing):
        def program(rank):
            work = dist.all_reduce(torch.ones(2), async_op=True)
            other = torch.futures.Future()
            other.set_result(1)
            other.wait()
            del work

        with pytest.raises(ContractViolation, match="without having waited"):
            world_of(2, timing=timing).run(program)


def test_uninstall_restores_torchs_functions(monkeypatch):
    monkeypatch.setattr(torch_futures, "_originals", [])
    before = [vars(owner)[name] for owner, name, _ in torch_futures._PLACES]
    torch_futures.install()
    inside = [vars(owner)[name] for owner, name, _ in torch_futures._PLACES]
    torch_futures.uninstall()
    assert not set(map(id, before)) & set(map(id, inside))
    assert [vars(owner)[name] for owner, name, _ in torch_futures._PLACES] == before


def test_futures_outside_ranks_are_torchs(world_of):
    world_of(1)
    future = torch.futures.Future()
    assert not future.done()
    doubled = torch.futures.collect_all([future]).then(lambda each: each.value()[0].value() * 2)
    future.set_result(2)
    assert doubled.wait() == 4
    assert torch.futures.wait_all([doubled]) == [4]
