"""ZeRO against a plain loop over ranks: equal bits in params, gradients, masters and state."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.configs import zero_config
from zero_sim.zero import DistributedDataParallel, DistributedOptimizer, ZeroConfig

STEPS, MICRO_BATCHES = 3, 2


def adamw(params):
    return torch.optim.AdamW(params, lr=0.05, weight_decay=0.1, foreach=False)


def adam(params):
    return torch.optim.Adam(params, lr=0.05, foreach=False)


def sgd(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=0.1, foreach=False)


def shapes_of(world_size):
    """Return sizes near the world size, one element, none, a scalar, and shapes cut by shards."""
    n = world_size
    return [(n - 1,), (n,), (n + 1,), (1,), (0,), (), (3, 5), (2 * n + 1,)]


def draw(seed, shapes, dtype):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def build_module(shapes, dtype):
    """Build a module with the same initial bits on every call."""
    return nn.ParameterList([nn.Parameter(value) for value in draw(7, shapes, dtype)])


def compute_loss(params, *, step, rank, micro, dtype):
    """Compute a loss whose gradient depends on this rank's data and on the params."""
    data = draw(1000 * step + 10 * rank + micro, [tuple(p.shape) for p in params], dtype)
    return sum(((p * p + p) * x).sum() for p, x in zip(params, data, strict=True))


def train_with_zero(*, shapes, dtype, config, optim_factory):
    """Train on one rank; return params and owned fragments per step."""
    module = build_module(shapes, dtype)
    ddp = DistributedDataParallel(module, config=config, group=dist.group.WORLD)
    optimizer = DistributedOptimizer(ddp, optim_factory=optim_factory)
    history = []
    for step in range(STEPS):
        for micro in range(MICRO_BATCHES):
            compute_loss(module, step=step, rank=ddp.rank, micro=micro, dtype=dtype).backward()
        ddp.finish_grad_sync()
        optimizer.step()
        owned = [
            (f.param, f.in_param, {"grad": f.grad.clone(), "master": f.master.clone()}
             | {key: value.clone() for key, value in f.state.items()})
            for f in optimizer.fragments()
        ]  # fmt: skip
        history.append(({n: p.detach().clone() for n, p in module.named_parameters()}, owned))
        optimizer.zero_grad()
    return history


def train_plainly(*, world_size, shapes, dtype, config, optim_factory):
    """Train on one device with a loop over ranks; return params and all state per step."""
    params = build_module(shapes, dtype)
    masters = [nn.Parameter(param.detach().float()) for param in params]
    optimizer = optim_factory(masters)
    grad_dtype = torch.float32 if config.grad_dtype == "fp32" else dtype
    history = []
    for step in range(STEPS):
        reduced = None
        for rank in range(world_size):
            local = [torch.zeros(shape, dtype=grad_dtype) for shape in shapes]
            for micro in range(MICRO_BATCHES):
                loss = compute_loss(params, step=step, rank=rank, micro=micro, dtype=dtype)
                grads = torch.autograd.grad(loss, list(params))
                local = [total + grad for total, grad in zip(local, grads, strict=True)]
            if config.divide == "pre":
                local = [total / world_size for total in local]
            if reduced is None:
                reduced = local
            else:
                reduced = [total + mine for total, mine in zip(reduced, local, strict=True)]
        for master, total in zip(masters, reduced, strict=True):
            master.grad = total.float() / (world_size if config.divide == "post" else 1)
        optimizer.step()
        state = {}
        for (name, param), master, total in zip(
            params.named_parameters(), masters, reduced, strict=True
        ):
            param.data.copy_(master.detach())
            state[name] = {"grad": total, "master": master.detach().clone()}
            for key, value in optimizer.state[master].items():
                state[name][key] = value.clone()
        history.append(({n: p.detach().clone() for n, p in params.named_parameters()}, state))
    return history


def assert_same_bits(got, expected, where):
    """Compare as integers, so zeros keep their signs and there is no tolerance."""
    bits = torch.int16 if expected.element_size() == 2 else torch.int32
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape), where
    assert torch.equal(got.contiguous().view(bits), expected.contiguous().view(bits)), where


def assert_same_history(per_rank, expected, *, stage):
    """Compare params and owned state of every rank with the plain loop; check ownership."""
    for step, (params, state) in enumerate(expected):
        owners = {
            name: torch.zeros(param.numel(), dtype=torch.int) for name, param in params.items()
        }
        for rank, history in enumerate(per_rank):
            got_params, owned = history[step]
            for name, param in params.items():
                assert_same_bits(got_params[name], param, (step, rank, name))
            for name, span, values in owned:
                part = slice(span.start, span.stop)
                owners[name][part] += 1
                assert values.keys() == state[name].keys()
                for key, value in values.items():
                    whole = state[name][key]
                    slice_of = whole if key == "step" else whole.reshape(-1)[part]
                    assert_same_bits(value, slice_of, (step, rank, name, key))
        copies = 1 if stage == 1 else len(per_rank)
        assert all((count == copies).all() for count in owners.values())


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
class TestAgainstAPlainLoop:
    """The sharded system and a plain loop, compared bit by bit after every step."""

    def test_stage_1_with_every_layout(self, run_ranks, world_size, dtype):
        """Buckets, alignment and order of params do not affect the bits."""
        shapes = shapes_of(world_size)
        plain = {"shapes": shapes, "dtype": dtype, "optim_factory": adamw}
        expected = train_plainly(world_size=world_size, config=ZeroConfig(), **plain)
        for bucket_elems, align_elems, param_order in product(
            (None, 1, world_size + 1), (1, 4), ("registration", "reverse")
        ):
            config = zero_config(
                bucket_elems=bucket_elems, align_elems=align_elems, param_order=param_order
            )
            results, _ = run_ranks(
                world_size, lambda rank, config=config: train_with_zero(config=config, **plain)
            )
            assert_same_history(results, expected, stage=1)

    @pytest.mark.parametrize("stage", [0, 1])
    def test_every_divisor_dtype_and_optimizer(self, run_ranks, world_size, dtype, stage):
        shapes = shapes_of(world_size)
        choices = zip(
            product(("none", "pre", "post"), ("param", "fp32")),
            (adamw, sgd, adam, adamw, sgd, sgd),
            strict=True,
        )
        for (divide, grad_dtype), optim_factory in choices:
            config = zero_config(
                stage=stage, divide=divide, grad_dtype=grad_dtype, bucket_elems=world_size + 1
            )
            case = {
                "shapes": shapes,
                "dtype": dtype,
                "config": config,
                "optim_factory": optim_factory,
            }
            expected = train_plainly(world_size=world_size, **case)
            results, _ = run_ranks(world_size, lambda rank, case=case: train_with_zero(**case))
            assert_same_history(results, expected, stage=stage)
