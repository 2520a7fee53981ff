"""Divisor of a step's gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.configs import zero_config
from zero_sim.errors import UsageError
from zero_sim.zero import DistributedDataParallel


def wrap(group, **config):
    """Wrap a layer with a single weight."""
    module = nn.Linear(1, 1, bias=False)
    return DistributedDataParallel(module, config=zero_config(**config), group=group)


class TestCount:
    """The divisor, equal to the step's count once the gradients are reduced."""

    def test_is_the_number_of_ranks(self, run_ranks):
        """The number of micro-batches does not matter."""

        def program(rank):
            ddp = wrap(dist.group.WORLD)
            ddp.end_micro_batch(False)
            ddp.finish_grad_sync()
            return ddp.divisor.item(), ddp.micro_batches

        assert run_ranks(3, program)[0] == [(3, 2)] * 3

    def test_is_the_number_of_micro_batches_of_all_ranks(self, run_ranks):
        """Counted anew in each step."""

        def program(rank):
            ddp = wrap(dist.group.WORLD, divide_by="micro-batches")
            counts = []
            for micro_batches in (3, 1):
                for micro in range(micro_batches):
                    ddp.end_micro_batch(last=micro == micro_batches - 1)
                counts.append(ddp.divisor.item())
                ddp.zero_grad_buffer()
            return counts

        assert run_ranks(2, program)[0] == [[6, 2]] * 2

    def test_is_the_number_of_rows_of_all_ranks(self, run_ranks):
        """A rank may have none, counts exceed bf16's integers, and each step starts at zero."""

        def program(rank):
            ddp = wrap(dist.group.WORLD, divide_by="tokens")
            counts = []
            for rows in (rank, 257 * rank):
                ddp.add_rows(rows)
                ddp.end_micro_batch(False)
                ddp.add_rows(rows)
                ddp.finish_grad_sync()
                counts.append(ddp.divisor.item())
                ddp.zero_grad_buffer()
            return counts

        assert run_ranks(3, program)[0] == [[6, 1542]] * 3

    @pytest.mark.parametrize("count", [7, torch.tensor(7), torch.tensor(7.0)])
    def test_given_count_overrides_divide_by(self, lone_group, count):
        """A given count, as number or tensor, overrides divide_by."""
        ddp = wrap(lone_group, divide_by="tokens")
        ddp.finish_grad_sync(count=count)
        assert ddp.divisor.item() == 7

    @pytest.mark.parametrize("count", [0, -1])
    def test_is_at_least_one(self, lone_group, count):
        with pytest.raises(UsageError, match=f"at least 1, got a count of {count}"):
            wrap(lone_group).finish_grad_sync(count=count)

    @pytest.mark.parametrize("count", [1.5, True, float("inf"), torch.tensor(2.5)])
    def test_is_whole(self, lone_group, count):
        with pytest.raises(UsageError, match="whole number"):
            wrap(lone_group).finish_grad_sync(count=count)

    def test_is_exact_in_fp32(self, lone_group):
        """fp32 would round 2**24 + 1 to 2**24; 2**24 + 2 is exact."""
        ddp = wrap(lone_group)
        with pytest.raises(UsageError, match=r"fp32 can represent.*16777217"):
            ddp.finish_grad_sync(count=2**24 + 1)
        ddp = wrap(lone_group)
        ddp.finish_grad_sync(count=2**24 + 2)
        assert ddp.divisor.item() == 2**24 + 2


class TestRows:
    """add_rows, which counts until the rows are summed."""

    @pytest.mark.parametrize("rows", [-1, 1.0, True, None])
    def test_invalid_row_count_is_refused(self, lone_group, rows):
        with pytest.raises(UsageError, match=f"at least 0, got {rows!r}"):
            wrap(lone_group, divide_by="tokens").add_rows(rows)

    def test_rows_after_the_sum_are_refused(self, lone_group):
        """Rows added after the sum would be lost."""
        ddp = wrap(lone_group, divide_by="tokens", divide="pre", overlap_grads=True)
        ddp.add_rows(2)
        ddp.begin_last_micro_batch()
        with pytest.raises(UsageError, match="3 more afterwards"):
            ddp.add_rows(3)


class TestConfiguredMicroBatches:
    """A configured number of micro-batches, which each step must match."""

    @pytest.mark.parametrize(("ended", "last"), [(0, True), (1, False)])
    def test_refuses_another_number(self, lone_group, ended, last):
        """The step ends after one of two, or does not end after two."""
        ddp = wrap(lone_group, micro_batches=2)
        for _ in range(ended):
            ddp.end_micro_batch(False)
        with pytest.raises(UsageError, match="2 micro-batches in a step"):
            ddp.end_micro_batch(last)

    def test_refuses_two_counts_in_a_step(self, lone_group):
        """The gradients of the first micro-batch were already divided by its count."""
        ddp = wrap(lone_group, sync="every", divide="pre")
        ddp.end_micro_batch(False, count=4)
        with pytest.raises(UsageError, match=r"the count 4.*got 6"):
            ddp.finish_grad_sync(count=6)

    def test_refuses_a_count_without_a_division(self, lone_group):
        """Nothing is divided in this micro-batch."""
        with pytest.raises(UsageError, match=r"count=4 with last=False"):
            wrap(lone_group).end_micro_batch(False, count=4)
