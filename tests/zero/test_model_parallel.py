"""A common norm, clip coefficient and loss scale for a model with parts on different ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.configs import zero_config
from zero_sim.errors import UsageError
from zero_sim.zero import DistributedDataParallel, DistributedOptimizer, StepSeams
from zero_sim.zero.variants.model_groups import build_model_parallel_group
from zero_sim.zero.variants.scaler import LossScaler

PLACES = [(0, 1), (2, 3)]
"""Ranks 0 and 2 train one part, 1 and 3 the other; 0 1 and 2 3 have equal group ranks in both."""


class Part(nn.Module):
    """A param of this part, and `shared`, of which each part has a copy."""

    def __init__(self):
        super().__init__()
        self.own = nn.Parameter(torch.zeros(2))
        self.shared = nn.Parameter(torch.zeros(2))


def build(rank, *, stage=1, scaler=None, clip_norm=None, count_copies=False):
    parts = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    ddp = DistributedDataParallel(
        Part(), config=zero_config(stage=stage, divide="none"), group=parts[rank % 2]
    )
    return DistributedOptimizer(
        ddp,
        optim_factory=lambda params: torch.optim.SGD(params, lr=1.0),
        clip_norm=clip_norm,
        seams=StepSeams(
            loss_scaler=scaler,
            model_parallel_group=build_model_parallel_group(PLACES),
            is_counted=lambda name: count_copies or name != "shared" or rank % 2 == 0,
        ),
    )


def step(optimizer, rank, *, value=1.0):
    """Take a step; gradients sum to `2 * value` in the first part, `4 * value` in the second."""
    module = optimizer.ddp.module
    ((1 + rank % 2) * value * (module.own.sum() + module.shared.sum())).backward()
    optimizer.ddp.finish_grad_sync()
    return optimizer.step()


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize(
    ("count_copies", "squares"), [(False, 4 * 4 + 2 * 16), (True, 4 * 4 + 4 * 16)]
)
def test_norm_spans_all_parts_and_counts_copies_once(run_ranks, stage, count_copies, squares):
    def program(rank):
        optimizer = build(rank, stage=stage, count_copies=count_copies)
        return step(optimizer, rank).norm.item() ** 2

    results, _ = run_ranks(4, program)
    assert results == [pytest.approx(squares)] * 4


def test_uncounted_copies_are_clipped_too(run_ranks):
    """The norm is sqrt(48), clipped to a quarter of it."""

    def program(rank):
        optimizer = build(rank, clip_norm=48**0.5 / 4)
        step(optimizer, rank)
        module = optimizer.ddp.module
        return *module.own.tolist(), *module.shared.tolist()

    results, _ = run_ranks(4, program)
    for rank, values in enumerate(results):
        assert values == pytest.approx([-1.0 if rank % 2 else -0.5] * 4)


def test_overflow_in_one_part_skips_on_all(run_ranks):
    def program(rank):
        optimizer = build(rank, scaler=LossScaler(scale=4.0))
        result = step(optimizer, rank, value=torch.inf if rank == 3 else 1.0)
        return result.skipped, optimizer.loss_scaler.scale, optimizer.ddp.module.own[0].item()

    results, _ = run_ranks(4, program)
    assert results == [(True, 2.0, 0.0)] * 4


def test_overflow_in_an_uncounted_copy_skips_too(run_ranks):
    def program(rank):
        optimizer = build(rank, scaler=LossScaler(scale=4.0))
        module = optimizer.ddp.module
        (module.own.sum() + module.shared.sum() * (torch.inf if rank == 3 else 1.0)).backward()
        optimizer.ddp.finish_grad_sync()
        return optimizer.step().skipped

    results, _ = run_ranks(4, program)
    assert results == [True] * 4


def test_zero_count_skips_copies_as_the_norm_does(run_ranks):
    def program(rank):
        return step(build(rank), rank, value=0.0).zeros

    results, _ = run_ranks(4, program)
    assert results == [6] * 4


def test_rank_outside_the_model_parallel_groups_is_refused(run_ranks):
    def program(rank):
        if rank == 2:
            with pytest.raises(UsageError, match="places that contain rank 2"):
                build_model_parallel_group([(0, 1)])

    run_ranks(3, program)
