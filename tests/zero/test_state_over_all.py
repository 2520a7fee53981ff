"""Blocks of ranks with copies of the params, and one copy of the state over all of them."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from zero_sim.errors import UsageError
from zero_sim.zero import (
    DistributedDataParallel,
    DistributedOptimizer,
    ZeroConfig,
    build_redundancy_groups,
)


def build(**config):
    """Wrap two layers, 12 elements in all, with the same bits on every rank."""
    layers = [nn.Linear(2, 4, bias=False), nn.Linear(4, 1, bias=False)]
    for layer in layers:
        nn.init.constant_(layer.weight, 0.5)
    config = {"stage": 3, "redundancy": 2, "bucket_elems": 5, **config}
    group = dist.group.WORLD
    shard_group, replica_group = build_redundancy_groups(group, redundancy=2)
    ddp = DistributedDataParallel(
        nn.Sequential(*layers),
        config=ZeroConfig(**config),
        group=group,
        shard_group=shard_group,
        replica_group=replica_group,
    )
    return ddp, DistributedOptimizer(ddp, optim_factory=partial(torch.optim.SGD, lr=0.25))


def train(ddp, optimizer, rank, *, steps=2):
    """Step on rows that differ between ranks; return all params."""
    for step in range(steps):
        optimizer.zero_grad()
        ddp(torch.full((1, 2), 1.0 + rank + step)).sum().backward()
        ddp.finish_grad_sync()
        optimizer.step()
    return [param.clone() for param in ddp.whole_params().values()]


def test_a_rank_holds_its_part_of_the_block_and_of_the_state(run_ranks):
    """Of 12 elements a half of the params, and a quarter of the masters."""

    def program(rank):
        ddp, optimizer = build(state_over="all")
        params = sum(buffer.shard_data.numel() for buffer in ddp.buffers)
        return params, sum(master.numel() for master in optimizer.master_shards.values())

    held, _ = run_ranks(4, program)
    assert held == [(6, 3)] * 4


def test_every_element_has_one_owner(run_ranks):
    """The ranks at one place in their blocks own neighbouring parts, in the order of blocks."""

    def program(rank):
        _, optimizer = build(state_over="all")
        return [
            (owned.param, owned.in_param.start, owned.in_param.stop)
            for owned in optimizer.fragments()
        ]

    (first, second, third, fourth), _ = run_ranks(4, program)
    assert first == [("0.weight", 0, 2), ("1.weight", 0, 1)]
    assert third == [("0.weight", 2, 4), ("1.weight", 1, 2)]
    assert second == [("0.weight", 4, 6), ("1.weight", 2, 3)]
    assert fourth == [("0.weight", 6, 8), ("1.weight", 3, 4)]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("partition", ["padded", "uneven"])
def test_it_steps_as_with_a_copy_in_each_block(run_ranks, stage, partition):
    """Sums are added in the same order, inside a block first, so that no bit differs."""

    def program(rank, state_over):
        config = {"stage": stage, "partition": partition, "state_over": state_over}
        return train(*build(**config), rank)

    one, copies = (
        run_ranks(4, partial(program, state_over=state_over))[0] for state_over in ("all", "block")
    )
    for got, expected in zip(one, copies, strict=True):
        assert all(map(torch.equal, got, expected))
    assert not torch.equal(one[0][0], torch.full((4, 2), 0.5))


def test_stage_3_tells_other_blocks_once_a_step(run_ranks):
    """And gathers inside a block for each use; both sums are reduce-scatters."""

    def program(rank):
        train(*build(state_over="all"), rank, steps=1)

    _, log = run_ranks(4, program)
    kinds = ("reduce_scatter", "all_gather")
    made = Counter((record.kind, record.elems) for record in log.of_rank(0) if record.kind in kinds)
    # Of 8 and 4 elements: the first is gathered for forward, for backward and to be shown.
    assert made == {
        ("all_gather", 4): 3, ("all_gather", 2): 2 + 1,
        ("all_gather", 1): 1,
        ("reduce_scatter", 8): 1, ("reduce_scatter", 4): 1 + 1, ("reduce_scatter", 2): 1,
    }  # fmt: skip


@pytest.mark.parametrize("config", [{"stage": 0, "redundancy": 1}, {"state_over": "node"}])
def test_what_is_not_there_is_refused(config):
    with pytest.raises(UsageError, match="state_over"):
        ZeroConfig(**{"state_over": "all", **config})
