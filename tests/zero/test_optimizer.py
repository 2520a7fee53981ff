"""Optimizer state sharded over ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.configs import zero_config
from zero_sim.errors import UsageError
from zero_sim.layout import Span
from zero_sim.zero import DistributedDataParallel, DistributedOptimizer


class Bare(nn.Module):
    """Params of the given sizes; forward sums them times a factor."""

    def __init__(self, *sizes, dtype=torch.float32):
        super().__init__()
        self.p = nn.ParameterList([nn.Parameter(torch.ones(n, dtype=dtype)) for n in sizes])

    def forward(self, factor):
        return sum((param * factor).sum() for param in self.p)


def sgd(params):
    """Build plain SGD with a step size that is exact in bf16."""
    return torch.optim.SGD(params, lr=0.25)


def adamw(params):
    return torch.optim.AdamW(params, lr=0.25)


def build(module, *, group, optim_factory=sgd, broadcast_params=True, **config):
    ddp = DistributedDataParallel(
        module, config=zero_config(**config), group=group, broadcast_params=broadcast_params
    )
    return ddp, DistributedOptimizer(ddp, optim_factory=optim_factory)


def take_step(ddp, optimizer, factor):
    """Run a forward, backward, reduction and step."""
    ddp(factor).backward()
    ddp.finish_grad_sync()
    optimizer.step()


class TestOwnership:
    """State of a rank's own elements."""

    def test_stage_1_splits_state_over_ranks(self, run_ranks):
        """Seven elements over two ranks: the second param is cut after its first element."""

        def program(rank):
            ddp, optimizer = build(Bare(3, 4), group=dist.group.WORLD, optim_factory=adamw, stage=1)
            take_step(ddp, optimizer, 1.0)
            return [
                (f.param, f.in_param, f.state["exp_avg"].numel()) for f in optimizer.fragments()
            ]

        results, _ = run_ranks(2, program)
        assert results == [
            [("p.0", Span(0, 3), 3), ("p.1", Span(0, 1), 1)],
            [("p.1", Span(1, 4), 3)],
        ]

    def test_stage_0_keeps_everything_everywhere(self, run_ranks):
        """Each rank has a single fragment per param, the full param."""

        def program(rank):
            _, optimizer = build(Bare(3, 0, 4), group=dist.group.WORLD, stage=0)
            return [(f.param, f.in_param) for f in optimizer.fragments()]

        results, _ = run_ranks(2, program)
        assert results == [[("p.0", Span(0, 3)), ("p.2", Span(0, 4))]] * 2

    def test_masters_are_flat_shards_with_zero_padding(self, run_ranks):
        """Each bucket has an fp32 tensor with the length of a shard."""

        def program(rank):
            _, optimizer = build(
                Bare(3, 2, dtype=torch.bfloat16), group=dist.group.WORLD, bucket_elems=1
            )
            return {key: (m.dtype, m.tolist()) for key, m in optimizer.master_shards.items()}

        results, _ = run_ranks(2, program)
        fp32 = torch.float32
        assert results == [
            {(0, 0): (fp32, [1, 1]), (0, 1): (fp32, [1])},
            {(0, 0): (fp32, [1, 0]), (0, 1): (fp32, [1])},
        ]

    def test_takes_12_bytes_per_element_over_all_ranks(self, run_ranks):
        """Master and two moments in fp32, once in the world: 12 P / N."""

        def program(rank):
            ddp, optimizer = build(Bare(4, 8), group=dist.group.WORLD, optim_factory=adamw)
            take_step(ddp, optimizer, 1.0)
            masters = sum(m.nbytes for m in optimizer.master_shards.values())
            states = [f.state for f in optimizer.fragments()]
            return masters + sum(s["exp_avg"].nbytes + s["exp_avg_sq"].nbytes for s in states)

        results, _ = run_ranks(3, program)
        assert results == [12 * 12 // 3] * 3

    def test_rank_without_elements_takes_part(self, run_ranks):
        """Three ranks share one element: all end with the same param, two with an empty group."""

        def program(rank):
            ddp, optimizer = build(Bare(1), group=dist.group.WORLD)
            take_step(ddp, optimizer, 1.0)
            owned = [len(group["params"]) for group in optimizer.inner.param_groups]
            return ddp.module.p[0].tolist(), owned, list(optimizer.fragments())

        results, _ = run_ranks(3, program)
        assert [(params, owned) for params, owned, _ in results] == [
            ([0.75], [1]),
            ([0.75], [0]),
            ([0.75], [0]),
        ]
        assert results[2][2] == []


class TestStep:
    """A step, from reduced gradients to equal params on all ranks."""

    @pytest.mark.parametrize(
        ("divide", "expected"), [("none", 1 - 6 / 4), ("pre", 0.5), ("post", 0.5)]
    )
    @pytest.mark.parametrize("stage", [0, 1])
    def test_divides_as_configured(self, run_ranks, stage, divide, expected):
        """Gradients 1, 2 and 3: SGD receives their sum 6 or their mean 2."""

        def program(rank):
            ddp, optimizer = build(Bare(2, 2), group=dist.group.WORLD, stage=stage, divide=divide)
            take_step(ddp, optimizer, rank + 1.0)
            return [param.tolist() for param in ddp.module.p]

        results, _ = run_ranks(3, program)
        assert results == [[[expected] * 2] * 2] * 3

    def test_master_accumulates_steps_below_bf16_resolution(self, lone_group):
        """Steps too small for bf16 add up in the fp32 master."""
        tiny = 2.0**-10
        ddp, optimizer = build(Bare(1, dtype=torch.bfloat16), group=lone_group)
        working = []
        for _ in range(8):
            take_step(ddp, optimizer, tiny * 4)
            optimizer.zero_grad()
            working.append(ddp.module.p[0].item())
        (fragment,) = optimizer.fragments()
        assert fragment.master.item() == 1 - 8 * tiny
        assert working[0] == 1.0
        assert working[-1] == 1 - 8 * tiny

    def test_leaves_the_reduced_gradient_readable(self, lone_group):
        """foreach SGD with nesterov writes to its gradient; the buffer keeps the original."""

        def nesterov(params):
            return torch.optim.SGD(params, lr=0.5, momentum=0.5, nesterov=True, foreach=True)

        ddp, optimizer = build(Bare(2), group=lone_group, optim_factory=nesterov, divide="none")
        take_step(ddp, optimizer, 3.0)
        (fragment,) = optimizer.fragments()
        assert fragment.grad.tolist() == [3, 3]

    def test_no_fp32_gradient_is_resident_between_steps(self, lone_group):
        ddp, optimizer = build(Bare(2), group=lone_group)
        take_step(ddp, optimizer, 3.0)
        assert all(p.grad is None for g in optimizer.inner.param_groups for p in g["params"])

    def test_needs_reduced_gradients(self, lone_group):
        """A step on local gradients would let ranks drift apart."""
        ddp, optimizer = build(Bare(2), group=lone_group)
        ddp(1.0).backward()
        with pytest.raises(UsageError, match=r"Call ddp\.finish_grad_sync\(\)"):
            optimizer.step()

    def test_communicates_once_per_bucket(self, run_ranks):
        """Each bucket has a reduce-scatter and an all-gather; the norm needs a small all-reduce."""

        def program(rank):
            ddp, optimizer = build(
                Bare(3, 2), group=dist.group.WORLD, bucket_elems=1, broadcast_params=False
            )
            take_step(ddp, optimizer, 1.0)

        _, log = run_ranks(2, program)
        kinds = [record.kind for record in log.of_rank(1)]
        assert kinds == ["reduce_scatter"] * 2 + ["all_reduce"] + ["all_gather"] * 2


class TestInspection:
    """fragments(), a view of all elements that a rank owns."""

    def test_shows_no_state_before_the_first_step(self, lone_group):
        """Reading does not create state."""
        _, optimizer = build(Bare(2), group=lone_group, optim_factory=adamw)
        (fragment,) = optimizer.fragments()
        assert dict(fragment.state) == {}
        assert len(optimizer.inner.state) == 0

    def test_names_buffer_bucket_and_shard(self, run_ranks):

        def program(rank):
            module = nn.ModuleList([Bare(2), Bare(3, 3, dtype=torch.bfloat16)])
            _, optimizer = build(module, group=dist.group.WORLD, bucket_elems=1)
            return [
                (f.param, f.buffer, f.bucket, f.shard, f.in_buffer) for f in optimizer.fragments()
            ]

        results, _ = run_ranks(2, program)
        assert results[1] == [
            ("0.p.0", 0, 0, 1, Span(1, 2)),
            ("1.p.0", 1, 0, 1, Span(2, 3)),
            ("1.p.1", 1, 1, 1, Span(6, 7)),
        ]
