"""Params that a few ranks keep between a forward and its backward."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from zero_sim.errors import LayoutError, UsageError
from zero_sim.zero import DistributedDataParallel, ZeroConfig, build_reshard_group


def build():
    """Two layers of one weight each, with the same bits on every rank."""
    layers = [nn.Linear(2, 4, bias=False), nn.Linear(4, 2, bias=False)]
    for index, layer in enumerate(layers):
        nn.init.constant_(layer.weight, 0.5 + index)
    return nn.Sequential(*layers)


def wrap(keeping=2, **config):
    """Stage 3, a unit for each weight, kept by so many ranks."""
    config = {"stage": 3, "bucket_elems": 1, "prefetch": 0, **config}
    return DistributedDataParallel(
        build(),
        config=ZeroConfig(reshard_after_forward=keeping, **config),
        group=dist.group.WORLD,
        reshard_group=build_reshard_group(dist.group.WORLD, reshard=keeping),
    )


def gathers(log, rank=0):
    """The ranks of each gather of a rank."""
    return [record.group_ranks for record in log.of_rank(rank) if record.kind == "all_gather"]


def test_backward_gathers_among_them(run_ranks):
    """Forward gathers both weights among all, backward the first one among two neighbours."""

    def program(rank):
        ddp = wrap()
        loss = ddp(torch.ones(1, 2)).sum()
        ddp.begin_last_micro_batch()
        loss.backward()
        ddp.finish_grad_sync()

    _, log = run_ranks(4, program)
    assert gathers(log) == [(0, 1, 2, 3), (0, 1, 2, 3), (0, 1)]
    assert gathers(log, rank=3) == [(0, 1, 2, 3), (0, 1, 2, 3), (2, 3)]


def test_each_keeps_its_part_until_backward(run_ranks):
    """Half of a weight's eight elements on each of two ranks, and nothing after backward."""

    def program(rank):
        ddp = wrap()
        unit = ddp.buffers[0].units[0]
        loss = ddp(torch.ones(1, 2)).sum()
        kept = unit.resharded.numel()
        ddp.begin_last_micro_batch()
        loss.backward()
        ddp.finish_grad_sync()
        return kept, unit.resharded

    results, _ = run_ranks(4, program)
    assert results == [(4, None)] * 4


def test_nothing_is_kept_without_a_backward(run_ranks):
    """In evaluation params are freed as with all ranks."""

    def program(rank):
        ddp = wrap()
        with torch.no_grad():
            ddp(torch.ones(1, 2))
        return [unit.resharded for unit in ddp.buffers[0].units]

    results, _ = run_ranks(4, program)
    assert results == [[None, None]] * 4


@pytest.mark.parametrize("keeping", [3, 4])
def test_refuses_parts_that_are_not_equal_or_all(run_ranks, keeping):
    """The message says which numbers there are."""

    def program(rank):
        with pytest.raises(LayoutError, match=rf"4 ranks do, got {keeping}\. Try 2, True\."):
            build_reshard_group(dist.group.WORLD, reshard=keeping)

    run_ranks(4, program)


def test_refuses_a_group_of_another_size(run_ranks):
    """A config that says two is not given all."""

    def program(rank):
        config = ZeroConfig(stage=3, reshard_after_forward=2)
        with pytest.raises(UsageError, match=r"2 ranks.*got None.*build_reshard_group"):
            DistributedDataParallel(build(), config=config, group=dist.group.WORLD)

    run_ranks(4, program)


@pytest.mark.parametrize("value", [0, 1, -2])
def test_refuses_less_than_two_ranks(value):
    """One rank that keeps all is reshard_after_forward=False."""
    with pytest.raises(UsageError, match=rf"at least 2, or a bool, got {value}\. Try False"):
        ZeroConfig(stage=3, reshard_after_forward=value)
