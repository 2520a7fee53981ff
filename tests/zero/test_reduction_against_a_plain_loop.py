"""Reduced gradients and gathered params against plain loops over ranks: equal bits, any config.

The module has each kind of awkward param. The params that a rank uses depend on rank and
micro-batch. Bits of matrix products depend on the machine's instructions and on the weight's
address, which these tests do not cover. So forward and backward use small whole numbers, for which
every product is exact, and a hook turns the gradients into fractions before accumulation.
"""

from __future__ import annotations

from functools import reduce
from itertools import product
from operator import add

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.configs import zero_config
from zero_sim.zero import DistributedDataParallel, build_redundancy_groups

STEPS, MICRO_BATCHES = 2, 2
WORLDS = [(1, 1), (2, 1), (3, 1), (4, 2), (6, 2), (6, 3), (4, 4)]


class Unusual(nn.Module):
    """A frozen, an empty, a strided, an unused and a tied param, in two dtypes; three layers."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(3)

        def draw(*shape):
            return nn.Parameter(torch.randint(-2, 3, shape, generator=generator).float())

        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.empty = draw(0)
        self.first = nn.Linear(3, 5, bias=False)
        self.first.weight = nn.Parameter(draw(3, 5).detach().t())
        self.unused = draw(4)
        self.twice = nn.Linear(5, 5)
        self.twice.weight, self.twice.bias = draw(5, 5), draw(5)
        self.router = nn.Parameter(draw(5).detach().bfloat16())
        self.one_rank = draw(7)
        self.one_micro = draw(2, 2)
        self.tied = nn.Linear(3, 5, bias=False)
        self.tied.weight = self.first.weight
        for param in (each for each in self.parameters() if each.requires_grad):
            param.register_hook(lambda grad: grad * 0.37)

    def forward(self, x, *, rank, micro):
        """Use some params twice, and others only on some ranks or micro-batches."""
        hidden = self.twice(
            nn.functional.hardtanh(self.twice(self.first(x) + self.tied(x)), -9.0, 9.0)
        )
        loss = (hidden * self.router.float()).sum() + self.frozen.sum() + self.empty.sum()
        if rank == 1:
            loss = loss + (self.one_rank * x.sum()).sum()
        if micro == 0:
            loss = loss + (self.one_micro**2 * x.sum()).sum()
        return loss


def batch_of(*, step, rank, micro):
    """Draw a micro-batch; the number of rows depends on the rank."""
    generator = torch.Generator().manual_seed(100 * step + 10 * rank + micro)
    return torch.randint(-2, 3, (2 + rank % 3, 3), generator=generator).float()


def new_value(grad, *, step):
    """Return a param's new value, with fractions only if no product follows."""
    return -grad if step == STEPS - 1 else -grad.sign()


def build_ddp(config):
    return DistributedDataParallel(
        Unusual(),
        config=config,
        group=build_redundancy_groups(dist.group.WORLD, redundancy=config.redundancy),
    )


def run_step(ddp, *, step, rank):
    """Run all micro-batches of a step on one rank, until the gradients are reduced."""
    for micro in range(MICRO_BATCHES):
        rows = batch_of(step=step, rank=rank, micro=micro)
        last = micro == MICRO_BATCHES - 1
        ddp.add_rows(len(rows))
        loss = ddp(rows, rank=rank, micro=micro)
        if last or ddp.config.sync == "every":
            ddp.begin_last_micro_batch()
        loss.backward()
        ddp.end_micro_batch(last)


def train_with_zero(config, *, rank):
    """Train with ZeRO; return the gradients of each step and the final params.

    The new value of each param is its negative gradient, or only the sign before the last step.
    """
    ddp = build_ddp(config)
    history = []
    for step in range(STEPS):
        run_step(ddp, step=step, rank=rank)
        owned = {}
        with torch.no_grad():
            for buffer in ddp.buffers:
                for param, memory in buffer.memory.items():
                    grad = buffer.get_grad_shard(param)
                    owned[memory.name] = (memory.fragment, grad.clone())
                    if config.divide == "post":
                        grad = grad.float() / ddp.divisor
                    buffer.write_param_shard(param, new_value(grad.float(), step=step))
        ddp.start_param_gather()
        ddp.zero_grad_buffer()
        history.append(owned)
    ddp.finish_param_gather()
    params = {name: param.clone() for name, param in ddp.unsharded_params().items()}
    return history, params


def scale_plainly(grad, config, count):
    """Scale a rank's gradient before the sum."""
    if config.divide == "pre":
        return (grad.float() / count).to(grad.dtype)
    if config.divide == "premul":
        reciprocal = (torch.tensor(1.0) / count).to(grad.dtype)
        return (grad.float() * reciprocal.float()).to(grad.dtype)
    return grad


def sum_plainly(per_rank, redundancy):
    """Sum inside shard groups of consecutive ranks, then over the groups."""
    size = len(per_rank) // redundancy
    blocks = [per_rank[start : start + size] for start in range(0, len(per_rank), size)]
    return reduce(add, [reduce(add, block) for block in blocks])


def train_plainly(world_size, config):
    """Train in one process with loops over ranks and micro-batches.

    Return the reduced gradients of each step and the final params.
    """
    module = Unusual()
    params = {name: p for name, p in module.named_parameters() if p.requires_grad}
    history = []
    for step in range(STEPS):
        local = {name: [] for name in params}
        rows_count = 0
        for rank in range(world_size):
            micros = {name: [] for name in params}
            for micro in range(MICRO_BATCHES):
                rows = batch_of(step=step, rank=rank, micro=micro)
                rows_count += len(rows)
                loss = module(rows, rank=rank, micro=micro)
                grads = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
                for (name, param), grad in zip(params.items(), grads, strict=True):
                    dtype = torch.float32 if config.grad_dtype == "fp32" else param.dtype
                    zero = torch.zeros(param.shape, dtype=dtype)
                    micros[name].append(zero if grad is None else zero + grad)
            for name in params:
                local[name].append(micros[name])
        count = {
            "ranks": world_size,
            "micro-batches": world_size * MICRO_BATCHES,
            "tokens": rows_count,
        }[config.divide_by]
        reduced = {name: reduce_plainly(local[name], config, count) for name in params}
        with torch.no_grad():
            for name, param in params.items():
                divided = reduced[name].float()
                divided = divided / count if config.divide == "post" else divided
                param.copy_(new_value(divided, step=step))
        history.append(reduced)
    return history, {name: param.detach() for name, param in params.items()}


def reduce_plainly(per_rank, config, count):
    """Reduce local gradients [rank][micro] of one param."""
    if config.sync == "last":
        sums = [scale_plainly(reduce(add, micros), config, count) for micros in per_rank]
        return sum_plainly(sums, config.redundancy)
    return reduce(
        add,
        [
            sum_plainly([scale_plainly(g, config, count) for g in micro], config.redundancy)
            for micro in zip(*per_rank, strict=True)
        ],
    )


def assert_same_bits(got, expected, where):
    """Compare as integers, without tolerance."""
    bits = torch.int16 if expected.dtype is torch.bfloat16 else torch.int32
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape), where
    assert torch.equal(got.contiguous().view(bits), expected.contiguous().view(bits)), where


def check(world, config):
    """Run both; compare every owned fragment of every step, and the final params."""
    world_size = world.world_size
    expected, expected_params = train_plainly(world_size, config)
    results = world.run(lambda rank: train_with_zero(config, rank=rank))
    for step, grads in enumerate(expected):
        for name, whole in grads.items():
            owners = torch.zeros(whole.numel(), dtype=torch.int64)
            for rank, (history, _) in enumerate(results):
                fragment, got = history[step][name]
                start, stop = (
                    (0, 0)
                    if fragment is None
                    else (fragment.in_param.start, fragment.in_param.stop)
                )
                owners[start:stop] += 1
                assert_same_bits(got, whole.reshape(-1)[start:stop], (config, step, rank, name))
            copies = config.redundancy if config.stage else world_size
            assert (owners == copies).all()
    for rank, (_, params) in enumerate(results):
        for name, whole in expected_params.items():
            assert_same_bits(params[name], whole, (config, rank, name))


@pytest.mark.parametrize(("world_size", "redundancy"), WORLDS)
class TestAgainstAPlainLoop:
    """Every rank's part of every reduced gradient, bit for bit."""

    @pytest.mark.parametrize("sync", ["last", "every"])
    @pytest.mark.parametrize("divide", ["none", "pre", "post", "premul"])
    def test_every_division(self, world_of, world_size, redundancy, divide, sync):
        """Order, time and divisor of every division."""
        for divide_by in ("ranks", "micro-batches", "tokens"):
            if sync == "every" and divide in ("pre", "premul") and divide_by == "tokens":
                continue
            config = zero_config(
                divide=divide,
                divide_by=divide_by,
                sync=sync,
                redundancy=redundancy,
                micro_batches=MICRO_BATCHES,
                bucket_elems=8,
                grad_dtype="fp32" if divide_by == "tokens" else "param",
            )
            check(world_of(world_size), config)

    @pytest.mark.parametrize("partition", ["padded", "uneven"])
    @pytest.mark.parametrize("param_order", ["registration", "reverse"])
    def test_every_layout(self, world_of, world_size, redundancy, partition, param_order):
        """The layout does not affect the bits."""
        for bucket_elems, sync in product((None, 1, 30), ("last", "every")):
            config = zero_config(
                partition=partition,
                param_order=param_order,
                bucket_elems=bucket_elems,
                sync=sync,
                redundancy=redundancy,
                align_bytes=1 if partition == "uneven" else 12,
            )
            check(world_of(world_size), config)

    @pytest.mark.parametrize("partition", ["padded", "uneven"])
    @pytest.mark.parametrize("sync", ["last", "every"])
    def test_overlapped_communication(self, world_of, world_size, redundancy, partition, sync):
        """Random schedules, and ranks that use different params."""
        choices = (("pre", "ranks"), ("post", "tokens"), ("premul", "micro-batches"))
        for seed, (divide, divide_by) in enumerate(choices):
            config = zero_config(
                partition=partition,
                sync=sync,
                redundancy=redundancy,
                divide=divide,
                divide_by=divide_by,
                micro_batches=MICRO_BATCHES,
                bucket_elems=4,
                overlap_grads=True,
                overlap_params=True,
            )
            world = world_of(world_size, schedule="random", seed=seed)
            check(world, config)


@pytest.mark.parametrize(("world_size", "redundancy"), WORLDS)
@pytest.mark.parametrize("sync", ["last", "every"])
@pytest.mark.parametrize("stage", [2, 3])
def test_sharded_gradients_and_params(world_of, world_size, redundancy, sync, stage):
    """Temporary memory has the same sums under any schedule."""
    choices = (("pre", "ranks", "padded"), ("post", "tokens", "uneven"))
    for seed, (divide, divide_by, partition) in enumerate(choices):
        config = zero_config(
            stage=stage,
            sync=sync,
            partition=partition,
            redundancy=redundancy,
            divide=divide,
            divide_by=divide_by,
            micro_batches=MICRO_BATCHES,
            bucket_elems=4,
            overlap_grads=seed == 0,
        )
        check(world_of(world_size, schedule="random", timing="hostile", seed=seed), config)


@pytest.mark.parametrize("overlap_grads", [False, True])
@pytest.mark.parametrize("sync", ["last", "every"])
def test_stage_0_against_a_plain_loop(world_of, sync, overlap_grads):
    """Without shards, every rank has the full sums."""
    for divide, divide_by in product(("pre", "post"), ("ranks", "micro-batches")):
        config = zero_config(
            stage=0,
            sync=sync,
            divide=divide,
            divide_by=divide_by,
            micro_batches=MICRO_BATCHES,
            bucket_elems=4,
            overlap_grads=overlap_grads,
        )
        check(world_of(3), config)


def test_division_by_tokens_before_the_sum_with_overlap(world_of):
    """The rows are counted before the first bucket is sent."""
    config = zero_config(divide="pre", divide_by="tokens", overlap_grads=True, bucket_elems=4)
    check(world_of(3, schedule="random", seed=5), config)
