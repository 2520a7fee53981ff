"""Param groups, learning rates and temporarily frozen params."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.configs import zero_config
from zero_sim.errors import UsageError
from zero_sim.zero import DistributedDataParallel, DistributedOptimizer

SIZES = (5, 2, 4, 1, 6)
LRS = (0.5, 0.25)


def group_of(name):
    """Put even params into group 0 and odd ones into group 1, so neighbors in a shard differ."""
    return int(name) % 2


def adamw_of_two(groups):
    """Build AdamW with settings for each group, by index."""
    return torch.optim.AdamW(
        [
            {**g, "lr": LRS[g["group_index"]], "weight_decay": 0.1 * g["group_index"]}
            for g in groups
        ],
        foreach=False,
    )


def sgd_of_two(groups):
    """Build SGD with a learning rate for each group."""
    return torch.optim.SGD([{**group, "lr": LRS[group["group_index"]]} for group in groups])


def build(optim_factory=sgd_of_two, *, sizes=SIZES, stage=1, groups=group_of, **config):
    """Wrap params of ones."""
    module = nn.ParameterList([nn.Parameter(torch.ones(n)) for n in sizes])
    ddp = DistributedDataParallel(
        module, config=zero_config(stage=stage, divide="none", **config), group=dist.group.WORLD
    )
    return ddp, DistributedOptimizer(ddp, optim_factory=optim_factory, group_of=groups)


def take_step(ddp, optimizer, *, step=0):
    """Take a step with gradients that depend on the step only, all on rank 0."""
    loss = sum((p * g).sum() for p, g in zip(ddp.module, draw(step), strict=True))
    (loss * (ddp.rank == 0)).backward()
    ddp.finish_grad_sync()
    result = optimizer.step()
    optimizer.zero_grad()
    return result


def draw(step):
    """Draw a gradient for each param."""
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(size, generator=generator) for size in SIZES]


class TestGroups:
    """Params stepped with the settings of their group."""

    @pytest.mark.parametrize("stage", [0, 1])
    @pytest.mark.parametrize("world_size", [1, 2, 3, 7])
    def test_interleaved_groups_step_as_on_one_device(self, run_ranks, stage, world_size):
        """Params and moments have equal bits, with shards that contain parts of both groups."""

        def program(rank):
            ddp, optimizer = build(adamw_of_two, stage=stage, bucket_elems=9)
            for step in range(4):
                take_step(ddp, optimizer, step=step)
            return [param.detach().clone() for param in ddp.module]

        params = [nn.Parameter(torch.ones(size)) for size in SIZES]
        plain = adamw_of_two([{"params": params[i::2], "group_index": i} for i in range(2)])
        for step in range(4):
            for param, grad in zip(params, draw(step), strict=True):
                param.grad = grad
            plain.step()
        results, _ = run_ranks(world_size, program)
        for got in results:
            assert all(torch.equal(a, b) for a, b in zip(got, params, strict=True))

    def test_are_the_same_on_every_rank(self, run_ranks):
        """This holds even on a rank that owns nothing of a group, or nothing at all."""

        def program(rank):
            _, optimizer = build(sizes=(2, 1))
            groups = optimizer.inner.param_groups
            return [(g["lr"], g["group_index"], len(g["params"])) for g in groups]

        results, _ = run_ranks(4, program)
        assert results == [
            [(0.5, 0, 1), (0.25, 1, 0)],
            [(0.5, 0, 1), (0.25, 1, 0)],
            [(0.5, 0, 0), (0.25, 1, 1)],
            [(0.5, 0, 0), (0.25, 1, 0)],
        ]

    def test_empty_group_exists(self, lone_group):
        """Group 1 of three is empty and keeps its index."""
        _, optimizer = build(
            lambda groups: torch.optim.SGD(groups), groups=lambda name: 2 * (int(name) % 2)
        )
        assert [len(g["params"]) for g in optimizer.inner.param_groups] == [3, 0, 2]

    @pytest.mark.parametrize("index", [-1, True, 0.0, None])
    def test_are_indices(self, lone_group, index):
        """The message names the param."""
        with pytest.raises(UsageError, match=r"from 0, got .* for '0'"):
            build(groups=lambda name: index)

    def test_swapped_by_the_factory_are_refused(self, lone_group):
        """Group 0's settings would apply to group 1's params."""
        with pytest.raises(UsageError, match="param group 0, in that order"):
            build(lambda groups: torch.optim.SGD(list(reversed(groups))))


class TestLearningRate:
    """Rates set by a factor or by torch's schedulers."""

    def test_factor_multiplies_each_groups_own_rate(self, run_ranks):
        """The base is the rate at construction, not the last one, multiplied as Python floats."""

        def program(rank):
            _, optimizer = build(sizes=(1, 1))
            seen = []
            for factor in (0.1, 0.3, 1.0):
                optimizer.set_lr_factor(factor)
                seen.append([group["lr"] for group in optimizer.inner.param_groups])
            return seen

        results, _ = run_ranks(3, program)
        assert results == [[[0.5 * f, 0.25 * f] for f in (0.1, 0.3, 1.0)]] * 3

    def test_factor_reaches_the_step(self, run_ranks):
        """SGD moves by the rate if the gradient is 1."""

        def program(rank):
            ddp, optimizer = build(sizes=(1, 1))
            optimizer.set_lr_factor(0.5)
            (sum(param.sum() for param in ddp.module) * (rank == 0)).backward()
            ddp.finish_grad_sync()
            optimizer.step()
            return [param.item() for param in ddp.module]

        results, _ = run_ranks(3, program)
        assert results == [[0.75, 0.875]] * 3

    def test_schedulers_of_torch_run_on_every_rank(self, run_ranks):
        """Ranks that own nothing run them too."""

        def program(rank):
            ddp, optimizer = build(
                lambda params: torch.optim.SGD(params, lr=1.0), sizes=(1,), groups=None
            )
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer.inner, gamma=0.5)
            for _ in range(2):
                (ddp.module[0].sum() * (rank == 0)).backward()
                ddp.finish_grad_sync()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
            return ddp.module[0].item()

        results, _ = run_ranks(3, program)
        assert results == [1 - 1 - 0.5] * 3

    def test_tensor_rates_are_refused(self, lone_group):
        """A product with a tensor would round differently."""
        _, optimizer = build(
            lambda params: torch.optim.SGD(params, lr=torch.tensor(0.5)), groups=None
        )
        with pytest.raises(UsageError, match="Python numbers"):
            optimizer.set_lr_factor(0.5)


class TestFrozenForAWhile:
    """Params that do not require gradients when a step runs."""

    @pytest.mark.parametrize("stage", [0, 1])
    def test_steps_as_torch_does_without_its_gradient(self, run_ranks, stage):
        """Params and moments on three ranks, frozen at steps 1 and 2, against one device."""
        frozen_steps = (1, 2)

        def program(rank):
            ddp, optimizer = build(adamw_of_two, stage=stage)
            for step in range(5):
                ddp.module[2].requires_grad_(step not in frozen_steps)
                take_step(ddp, optimizer, step=step)
            counts = {f.param: f.state["step"].item() for f in optimizer.fragments()}
            return [param.detach().clone() for param in ddp.module], counts

        params = [nn.Parameter(torch.ones(size)) for size in SIZES]
        plain = adamw_of_two([{"params": params[i::2], "group_index": i} for i in range(2)])
        for step in range(5):
            for index, (param, grad) in enumerate(zip(params, draw(step), strict=True)):
                param.grad = None if index == 2 and step in frozen_steps else grad
            plain.step()
        results, _ = run_ranks(3, program)
        for got, counts in results:
            assert all(torch.equal(a, b) for a, b in zip(got, params, strict=True))
            assert all(count == (3 if name == "2" else 5) for name, count in counts.items())

    def test_from_the_first_step_on_has_no_state(self, lone_group):
        """State is created in the first step that trains the param."""
        ddp, optimizer = build(adamw_of_two)
        ddp.module[0].requires_grad_(False)
        take_step(ddp, optimizer)
        before = {f.param: set(f.state) for f in optimizer.fragments()}
        ddp.module[0].requires_grad_(True)
        take_step(ddp, optimizer)
        after = {f.param: set(f.state) for f in optimizer.fragments()}
        assert before["0"] == set()
        assert after["0"] == before["1"] == {"step", "exp_avg", "exp_avg_sq"}
