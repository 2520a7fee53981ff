"""Ranks that join a micro-batch without data, against arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.configs import zero_config
from zero_sim.errors import UsageError
from zero_sim.sim.failures import RankFailed
from zero_sim.zero import DistributedDataParallel, DistributedOptimizer, Seams, ZeroConfig
from zero_sim.zero.gathers import schedule_params
from zero_sim.zero.variants.reduce_buffers import BufferedGrads, BufferSettings
from zero_sim.zero.variants.uneven_micro_batches import (
    RepeatableOnUse,
    UnevenStepCount,
    join_micro_batch,
)

UNEVEN = Seams(step_count=UnevenStepCount, params=partial(schedule_params, on_use=RepeatableOnUse))


def train(rank, data, *, buffer_elems=None, **config):
    """Train a step of x -> w * x on at most two micro-batches; return w and the divisor.

    The gradient of each micro-batch is its input.
    """
    seams = UNEVEN
    if buffer_elems is not None:
        settings = BufferSettings(elems=buffer_elems)
        seams = replace(UNEVEN, grads=partial(BufferedGrads, settings=settings))
    module = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(module.weight)
    ddp = DistributedDataParallel(
        module, config=zero_config(**config), group=dist.group.WORLD, seams=seams
    )
    optimizer = DistributedOptimizer(ddp, optim_factory=lambda p: torch.optim.SGD(p, lr=1.0))
    for micro in range(2):
        last = micro == 1
        if micro >= len(data[rank]):
            join_micro_batch(ddp, last)
            continue
        ddp.add_rows(1)
        loss = ddp(torch.tensor([[data[rank][micro]]])).sum()
        if last or config.get("sync") == "every":
            ddp.begin_last_micro_batch()
        loss.backward()
        ddp.end_micro_batch(last)
    optimizer.step()
    ddp.finish_param_gather()
    return ddp.unsharded_params()["weight"].item(), ddp.divisor.item()


CONFIGS = [
    {"stage": 0},
    {"stage": 1},
    {"stage": 1, "sync": "every"},
    {"stage": 1, "overlap_params": True, "bucket_elems": 1},
    {"stage": 2},
    {"stage": 2, "sync": "every", "buffer_elems": 4},
    {"stage": 3},
    {"stage": 3, "sync": "every", "reshard_after_forward": False},
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize(("by", "count"), [("ranks", 2), ("micro-batches", 3), ("tokens", 3)])
def test_mean_includes_earlier_micro_batches(run_ranks, config, by, count):
    """Rank 1 has no data after 8, so the mean of 4, 32 and 8 is over the declared count."""
    values = run_ranks(2, lambda rank: train(rank, [[4.0, 32.0], [8.0]], divide_by=by, **config))
    expected = -(torch.tensor(44.0) / count).item()
    assert values[0] == [(expected, count)] * 2


@pytest.mark.parametrize("config", [each for each in CONFIGS if each["stage"] < 3], ids=str)
def test_rank_without_any_data_steps_with_the_others(run_ranks, config):
    values = run_ranks(
        2, lambda rank: train(rank, [[], [8.0, 2.0]], divide_by="micro-batches", **config)
    )
    assert values[0] == [(-5.0, 2)] * 2


def test_stage_3_needs_an_earlier_forward_on_the_rank(run_ranks):
    with pytest.raises(RankFailed, match=r"expected a forward on this rank before"):
        run_ranks(1, lambda rank: train(rank, [[]], stage=3))


def test_undeclared_uneven_counts_are_refused(lone_group):
    ddp = DistributedDataParallel(nn.Linear(1, 1), config=ZeroConfig(), group=lone_group)
    with pytest.raises(UsageError, match=r"expected an UnevenStepCount"):
        join_micro_batch(ddp, last=True)


def test_division_before_the_count_is_known_is_refused(lone_group):
    config = zero_config(divide="pre", sync="every", divide_by="micro-batches", micro_batches=2)
    with pytest.raises(UsageError, match=r"micro-batches that had data are counted only after"):
        DistributedDataParallel(nn.Linear(1, 1), config=config, group=lone_group, seams=UNEVEN)
