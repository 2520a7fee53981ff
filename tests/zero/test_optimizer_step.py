"""Norms, clipping and skipped steps over all ranks."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.configs import zero_config
from zero_sim.errors import UsageError
from zero_sim.zero import DistributedDataParallel, DistributedOptimizer, StepSeams
from zero_sim.zero.groups import build_redundancy_groups
from zero_sim.zero.variants.scaler import LossScaler

SIZES = (3, 4, 1, 9)


def draw(seed):
    """Draw a gradient for each param."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) for size in SIZES]


def scaled(**settings):
    return StepSeams(loss_scaler=LossScaler(**settings))


def build(*, dtype=torch.float32, sizes=SIZES, lr=0.25, momentum=0.0, config=None, **options):
    """Wrap params of ones; SGD, so that a step shows the gradient."""
    module = nn.ParameterList([nn.Parameter(torch.ones(n, dtype=dtype)) for n in sizes])
    config = zero_config(**{"divide": "none", **(config or {})})
    group = dist.group.WORLD
    ddp = DistributedDataParallel(
        module,
        config=config,
        group=build_redundancy_groups(group, redundancy=config.redundancy),
    )

    def sgd(params):
        return torch.optim.SGD(params, lr=lr, momentum=momentum)

    return ddp, DistributedOptimizer(ddp, optim_factory=sgd, **options)


def take_step(ddp, optimizer, grads):
    """Take a step with these gradients on this rank."""
    loss = sum((p * g.to(p.dtype)).sum() for p, g in zip(ddp.module, grads, strict=True))
    scaler = optimizer.loss_scaler
    (loss if scaler is None else scaler.scale_loss(loss)).backward()
    ddp.finish_grad_sync()
    result = optimizer.step()
    optimizer.zero_grad()
    return result


def snapshot(ddp, optimizer):
    """Return the values that a skipped step must not change."""
    owned = [(f.master.tolist(), {k: v.tolist() for k, v in f.state.items()})
             for f in optimizer.fragments()]  # fmt: skip
    return [param.tolist() for param in ddp.module], owned


@pytest.mark.parametrize("stage", [0, 1])
class TestNorm:
    """Norm and zeros of the full gradient, on every rank."""

    @pytest.mark.parametrize("world_size", [1, 2, 3, 5])
    def test_counts_every_element_once(self, run_ranks, stage, world_size):
        """The bits are equal for any number of ranks and any padding."""
        grads = draw(0)

        def program(rank):
            ddp, optimizer = build(config={"stage": stage, "bucket_elems": 5, "align_elems": 4})
            zeros = [torch.zeros(n) for n in SIZES]
            return take_step(ddp, optimizer, grads if rank == 0 else zeros)

        results, _ = run_ranks(world_size, program)
        squares = math.fsum(x * x for grad in grads for x in grad.tolist())
        expected = torch.tensor(math.sqrt(squares), dtype=torch.float64).float()
        for result in results:
            assert result.norm.dtype is torch.float32
            assert result.norm.shape == ()
            assert torch.equal(result.norm, expected)
            assert result.zeros == 0

    def test_counts_zeros_of_params_but_not_of_padding(self, run_ranks, stage):
        """Two zeros in the gradient, many more in the padding."""

        def program(rank):
            ddp, optimizer = build(sizes=(3, 2), config={"stage": stage, "align_elems": 16})
            grads = [torch.tensor([1.0, 0.0, 1.0]), torch.tensor([0.0, 1.0])]
            return take_step(ddp, optimizer, grads).zeros

        results, _ = run_ranks(3, program)
        assert results == [2] * 3

    def test_is_taken_after_division_and_before_clipping(self, run_ranks, stage):
        """Two ranks with gradients of norm 5: their mean has norm 5, clipped or not."""

        def program(rank):
            ddp, optimizer = build(
                sizes=(2,), config={"stage": stage, "divide": "post"}, clip_norm=1.0
            )
            return take_step(ddp, optimizer, [torch.tensor([3.0, 4.0])]).norm.item()

        results, _ = run_ranks(2, program)
        assert results == [5, 5]

    def test_excludes_frozen_params(self, run_ranks, stage):
        """Neither norm nor zeros include them, even if the param was frozen after its backward."""

        def program(rank):
            ddp, optimizer = build(sizes=(2, 3), config={"stage": stage})
            loss = sum((param * (rank + 1)).sum() for param in ddp.module)
            loss.backward()
            ddp.finish_grad_sync()
            ddp.module[1].requires_grad_(False)
            result = optimizer.step()
            return result.norm.item(), result.zeros

        results, _ = run_ranks(2, program)
        assert results == [(torch.tensor(18.0).sqrt().item(), 0)] * 2

    def test_step_without_scaler_is_never_skipped(self, run_ranks, stage):
        """Without a loss scaler no step is skipped, even with a NaN."""

        def program(rank):
            ddp, optimizer = build(sizes=(2,), config={"stage": stage})
            return take_step(ddp, optimizer, [torch.tensor([1.0, math.nan])])

        results, _ = run_ranks(2, program)
        for result in results:
            assert result.norm.isnan()
            assert (result.skipped, result.loss_scale) == (False, None)


class TestClip:
    """Clipping of the full gradient, not of a rank's part."""

    @pytest.mark.parametrize("world_size", [1, 2, 3])
    @pytest.mark.parametrize("stage", [0, 1])
    def test_by_norm_has_the_same_bits_for_any_number_of_ranks(self, run_ranks, stage, world_size):
        """The reference uses plain tensors."""
        grads = draw(1)

        def program(rank):
            ddp, optimizer = build(lr=1.0, config={"stage": stage}, clip_norm=0.3)
            zeros = [torch.zeros(n) for n in SIZES]
            take_step(ddp, optimizer, grads if rank == 0 else zeros)
            return [param.detach().clone() for param in ddp.module]

        results, _ = run_ranks(world_size, program)
        squares = math.fsum(x * x for grad in grads for x in grad.tolist())
        norm = torch.tensor(math.sqrt(squares), dtype=torch.float64).float()
        coefficient = torch.tensor(0.3) / (norm + torch.tensor(1e-6))
        assert coefficient < 1
        for params in results:
            for param, grad in zip(params, grads, strict=True):
                assert torch.equal(param, 1 - grad * coefficient)

    def test_by_value(self, run_ranks):
        """Each element is clamped after the sum over ranks."""

        def program(rank):
            ddp, optimizer = build(sizes=(3,), lr=1.0, clip_value=1.5)
            take_step(ddp, optimizer, [torch.tensor([-1.0, 0.5, 1.0])])
            return ddp.module[0].tolist()

        results, _ = run_ranks(2, program)
        assert results == [[2.5, 0.0, -0.5]] * 2

    def test_leaves_the_reduced_gradient_readable(self, lone_group):
        """Clipping works on a copy."""
        ddp, optimizer = build(sizes=(2,), clip_value=0.5)
        (ddp.module[0] * 3).sum().backward()
        ddp.finish_grad_sync()
        optimizer.step()
        (fragment,) = optimizer.fragments()
        assert fragment.grad.tolist() == [3, 3]

    @pytest.mark.parametrize(
        "bounds", [{"clip_norm": 0.0}, {"clip_value": -1.0}, {"clip_norm": math.nan}]
    )
    def test_needs_positive_bounds(self, lone_group, bounds):
        """A bound of zero would silently stop the training."""
        with pytest.raises(UsageError, match="to be positive"):
            build(**bounds)

    def test_by_both_is_refused(self, lone_group):
        """The order of the two would be ambiguous."""
        with pytest.raises(UsageError, match=r"one way of clipping.*Remove one"):
            build(clip_norm=1.0, clip_value=1.0)


@pytest.mark.parametrize("stage", [0, 1])
class TestLossScale:
    """Loss scaling: no effect on the bits, and an overflow skips the step on all ranks."""

    def test_scale_does_not_affect_the_bits(self, run_ranks, stage):
        """Params and norm have equal bits with and without a scaler."""

        def program(rank):
            outcomes = []
            for scaler in (None, LossScaler(scale=2.0**16)):
                ddp, optimizer = build(
                    config={"stage": stage}, seams=StepSeams(loss_scaler=scaler), clip_norm=0.5
                )
                norms = [take_step(ddp, optimizer, draw(rank + s)).norm.item() for s in range(3)]
                outcomes.append((norms, snapshot(ddp, optimizer)))
            return outcomes

        results, _ = run_ranks(3, program)
        assert all(plain == scaled for plain, scaled in results)

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    @pytest.mark.parametrize("where", [0, 2])
    def test_overflow_on_one_rank_skips_on_all(self, run_ranks, stage, value, where):
        """Masters, moments and params stay; the scale halves; the next step is taken."""

        def program(rank):
            ddp, optimizer = build(
                config={"stage": stage},
                momentum=0.5,
                seams=scaled(scale=8.0, growth_interval=2),
            )
            take_step(ddp, optimizer, draw(rank))
            before = snapshot(ddp, optimizer)
            grads = draw(rank + 10)
            if rank == where:
                grads[3][8] = value
            bad = take_step(ddp, optimizer, grads)
            after = snapshot(ddp, optimizer)
            good = take_step(ddp, optimizer, draw(rank + 20))
            changed = snapshot(ddp, optimizer) != after
            scaler = optimizer.loss_scaler
            return (bad.skipped, good.skipped, after == before, changed), (
                bad.loss_scale, good.loss_scale, scaler.scale, scaler.good_steps)  # fmt: skip

        results, _ = run_ranks(3, program)
        assert results == [((True, False, True, True), (8, 4, 4, 1))] * 3

    def test_overflow_only_in_the_sum_skips(self, run_ranks, stage):
        """Gradients are finite on each rank, and their sum is infinite."""

        def program(rank):
            ddp, optimizer = build(
                sizes=(2,),
                config={"stage": stage},
                seams=scaled(scale=1.0),
            )
            return take_step(ddp, optimizer, [torch.tensor([3e38, 0.0])]).skipped

        results, _ = run_ranks(2, program)
        assert results == [True, True]

    def test_frozen_params_do_not_count(self, run_ranks, stage):

        def program(rank):
            ddp, optimizer = build(
                sizes=(2, 3),
                config={"stage": stage},
                seams=scaled(scale=2.0),
            )
            loss = (ddp.module[0] * 1.0).sum() + (ddp.module[1] * math.inf).sum()
            loss.backward()
            ddp.finish_grad_sync()
            ddp.module[1].requires_grad_(False)
            return optimizer.step().skipped

        results, _ = run_ranks(2, program)
        assert results == [False, False]

    def test_all_ranks_issue_the_same_collectives(self, run_ranks, stage):
        """A skipped step issues the same collectives."""

        def program(rank):
            ddp, optimizer = build(
                sizes=(1,),
                config={"stage": stage},
                seams=scaled(scale=2.0),
            )
            for value in (1.0, math.inf if rank == 1 else 1.0, 1.0):
                take_step(ddp, optimizer, [torch.tensor([value])])

        _, log = run_ranks(3, program)
        kinds = [[record.kind for record in log.of_rank(rank)] for rank in range(3)]
        assert kinds[0] == kinds[1] == kinds[2]

    def test_scale_grows_after_finite_steps(self, run_ranks, stage):
        """The scale doubles after `growth_interval` finite steps."""

        def program(rank):
            ddp, optimizer = build(
                config={"stage": stage},
                seams=scaled(scale=4.0, growth_interval=2),
            )
            return [take_step(ddp, optimizer, draw(rank)).loss_scale for _ in range(5)]

        results, _ = run_ranks(2, program)
        assert results == [[4, 4, 8, 8, 16]] * 2


class TestRedundancy:
    """Replicas of the state: no element counts twice, and all replicas agree."""

    @pytest.mark.parametrize("redundancy", [1, 2, 3, 6])
    @pytest.mark.parametrize("partition", ["padded", "uneven"])
    def test_norm_and_zeros_count_each_element_once(self, run_ranks, redundancy, partition):
        """Six ranks in shard groups give the norm of a single rank's gradient."""
        grads = draw(2)
        grads[3][4:6] = 0.0

        def program(rank):
            ddp, optimizer = build(
                config={"redundancy": redundancy, "partition": partition}, clip_norm=0.5
            )
            result = take_step(ddp, optimizer, [g * (rank == 0) for g in grads])
            return result.norm.item(), result.zeros, [param.tolist() for param in ddp.module]

        results, _ = run_ranks(6, program)
        squares = math.fsum(x * x for grad in grads for x in grad.tolist())
        norm = torch.tensor(math.sqrt(squares), dtype=torch.float64).float().item()
        assert [(got, zeros) for got, zeros, _ in results] == [(norm, 2)] * 6
        assert all(params == results[0][2] for _, _, params in results)

    def test_overflow_skips_in_every_replica(self, run_ranks):
        """Overflow on one rank of four in two shard groups; all take the next step."""

        def program(rank):
            ddp, optimizer = build(
                config={"redundancy": 2},
                seams=scaled(scale=4.0),
                momentum=0.5,
            )
            grads = draw(rank)
            if rank == 3:
                grads[0][0] = math.inf
            before = snapshot(ddp, optimizer)
            skipped = take_step(ddp, optimizer, grads).skipped
            untouched = snapshot(ddp, optimizer) == before
            after = take_step(ddp, optimizer, draw(rank + 4))
            return skipped, untouched, after.skipped, after.loss_scale

        results, _ = run_ranks(4, program)
        assert results == [(True, True, False, 2)] * 4

    def test_overflow_in_one_replica_skips_in_all(self, run_ranks):
        """A sum that overflowed in a single shard group must skip the step in all."""

        def program(rank):
            ddp, optimizer = build(config={"redundancy": 2}, seams=scaled(scale=4.0))
            sum(param.sum() for param in ddp.module).backward()
            ddp.finish_grad_sync()
            if rank == 0:
                next(optimizer.fragments()).grad[0] = math.inf
            return optimizer.step().skipped

        results, _ = run_ranks(4, program)
        assert results == [True] * 4


class TestOverlappedGather:
    """Overlapped gathers, started by the optimizer and finished by the module."""

    def test_params_equal_those_of_a_blocking_gather(self, run_ranks):
        """Several steps, one of them skipped."""

        def program(rank):
            outcomes = []
            for overlap_params in (False, True):
                ddp, optimizer = build(
                    config={"overlap_params": overlap_params, "bucket_elems": 4},
                    seams=scaled(scale=4.0),
                )
                for step in range(4):
                    grads = draw(10 * step + rank)
                    if step == 2 and rank == 1:
                        grads[1][2] = math.nan
                    ddp.finish_param_gather()
                    take_step(ddp, optimizer, grads)
                ddp.finish_param_gather()
                outcomes.append(snapshot(ddp, optimizer))
            return outcomes

        results, _ = run_ranks(3, program)
        assert all(waiting == overlapped for waiting, overlapped in results)
