"""Values and scales of fp8 params are restored bit for bit, in any layout and form."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zero_sim.checkpoint.snapshot import iterate_module_tensors


class Product(torch.autograd.Function):
    """Values times scale, with the gradient of the product."""

    @staticmethod
    def forward(ctx, values, scale):
        return values.float() * scale

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Model(nn.Module):
    """A matrix in each fp8 format (tests freeze `down`) and a bias."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        for name, dtype in (("up", torch.float8_e4m3fn), ("down", torch.float8_e5m2)):
            values = torch.randn(3, 7, generator=generator) * 100
            param = nn.Parameter(values.to(dtype))
            param.grad_dtype = torch.float32
            self.register_parameter(name, param)
            # Neither a power of two nor a scale that a step would choose.
            self.register_buffer(f"{name}_scale", torch.tensor(0.0117))
        self.bias = nn.Parameter(torch.randn(7, generator=generator))

    def forward(self, inputs):
        up, down = (Product.apply(p, s) for p, s in ((self.up, self.up_scale),
                                                     (self.down, self.down_scale)))  # fmt: skip
        return sum((part * inputs).square().sum() for part in (up, down, self.bias))


def train(run, steps, *, frozen=()):
    """Step on gradients that do not depend on the number of ranks."""
    for name, param in run.ddp.params.items():
        param.requires_grad_(name not in frozen)
    for _ in range(steps):
        factors = torch.linspace(-1, 1, 7) * (1.0 if run.ddp.rank == 0 else 0.0)
        run.ddp(factors).backward()
        run.ddp.finish_grad_sync()
        run.optimizer.step()
        run.optimizer.zero_grad()
    run.ddp.finish_param_gather()
    whole = {name: p.detach().clone() for name, p in run.ddp.params.items()}
    return whole | {name: b.clone() for name, b in run.module.named_buffers()}


@pytest.mark.parametrize("form", ["sharded", "consolidated"])
@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize(
    ("size", "config"),
    [(1, {"stage": 0}), (4, {"redundancy": 2, "bucket_elems": 4}), (5, {"partition": "uneven"})],
)
def test_resumed_training_gives_the_same_bits(run_ranks, kit, tmp_path, form, before, size, config):
    """Also before any step, and with a param that was never stepped."""

    def first(rank):
        run = kit.build(module=Model(), bucket_elems=20)
        saved = train(run, before, frozen=("down",))
        kit.save(tmp_path / "checkpoint", run, form=form)
        return saved, train(run, 2)

    def second(rank):
        module = Model()
        with torch.no_grad():
            module.up.copy_(torch.zeros(()))
            module.up_scale.fill_(5.0)
            module.down_scale.fill_(5.0)
        run = kit.load(tmp_path / "checkpoint", kit.build(module=module, **config))
        return train(run, 0), train(run, 2)

    expected = run_ranks(3, first)[0]
    assert all(kit.same(list_of(got), list_of(expected)) for got in run_ranks(size, second))


def list_of(facts):
    """Return both facts as one dict, for comparison."""
    saved, trained = facts
    return {"saved": saved, "trained": trained}


def test_scales_are_saved_as_module_buffers(run_ranks, kit):
    """The lowest rank saves them once."""

    def program(rank):
        run = kit.build(module=Model())
        return [record.name for record, _ in iterate_module_tensors(run.ddp)]

    assert run_ranks(2, program) == [["up_scale", "down_scale"]] * 2
