"""Workloads whose gradients are whole multiples of a unit, within the budget."""

from __future__ import annotations

import pytest
import torch

from zero_sim.scenario.spec import RunSpec, WorldSpec
from zero_sim.workloads import build_workload
from zero_sim.workloads.bit_hash import UNIT
from zero_sim.workloads.exact import HashedTernary, hash_bits

SHAPES = ((3, 4), (), (0, 2), (90,))


def gradients(workload, module, *, step=0, rank=0, micro=0):
    loss = workload.loss(module, workload.batch(step=step, rank=rank, micro=micro))
    params = [param for param in module.parameters() if param.numel()]
    grads = torch.autograd.grad(loss, params, allow_unused=True, materialize_grads=True)
    return torch.cat([grad.reshape(-1).double() for grad in grads])


def all_gradients(workload, module, *, ranks, micros):
    """Return the gradients of all micro-batches of all ranks, (ranks * micros, elements)."""
    pairs = [(rank, micro) for rank in range(ranks) for micro in range(micros)]
    return torch.stack([gradients(workload, module, rank=r, micro=m) for r, m in pairs])


@pytest.fixture
def drawn(make_scenario):
    """Return a workload, a module, and all ranks' gradients."""

    def draw(name, *, ranks=3, micros=2, data=None, dtype="bf16", **model):
        if name != "ternary":
            model.setdefault("shapes", SHAPES)
        world, run = WorldSpec(size=ranks), RunSpec(micro_batches=micros)
        scenario = make_scenario(name, dtype=dtype, world=world, run=run, data=data, **model)
        workload = build_workload(scenario)
        module = workload.build()
        return workload, module, all_gradients(workload, module, ranks=ranks, micros=micros)

    return draw


@pytest.mark.parametrize(("dtype", "budget"), [("bf16", 2**8), ("fp16", 2**11), ("fp32", 2**24)])
@pytest.mark.parametrize("name", ["bit-hash", "ternary"])
def test_gradients_are_within_the_budget(drawn, name, dtype, budget):
    _, _, grads = drawn(name, dtype=dtype)
    units = grads if name == "ternary" else grads / UNIT
    assert torch.equal(units, units.round())
    assert units.clamp(min=0).sum(0).max() <= budget
    assert (-units).clamp(min=0).sum(0).max() <= budget
    assert units.count_nonzero() > units.numel() / 3


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_one_bit_of_a_param_changes_its_hashed_gradient(drawn, dtype):
    workload, module, grads = drawn("bit-hash", ranks=1, micros=1, dtype=dtype)
    width = torch.int32 if dtype == "fp32" else torch.int16
    with torch.no_grad():
        module.p3.view(width).bitwise_xor_(1)
    changed = gradients(workload, module) != grads[0]
    assert not changed[:13].any()
    # Hashes take many values, so few collide.
    assert changed[13:].float().mean() > 0.9


def test_most_bit_flips_change_the_ternary_net(drawn):
    """A third of all flips do not change a hash; the others change the output."""
    workload, module, grads = drawn("ternary", ranks=1, micros=1)
    seen = 0
    for row in range(8):
        module = workload.build()
        with torch.no_grad():
            module.up.weight[row].view(torch.int16).bitwise_xor_(1)
        seen += not torch.equal(gradients(workload, module), grads[0])
    assert seen >= 6


def test_ternary_net_does_not_depend_on_the_batch_split(drawn):
    """Usual networks depend on it, because kernels for other shapes round differently."""
    workload, _, _ = drawn("ternary", ranks=1)
    batch = workload.batch(step=0, rank=0, micro=0)
    rows = workload.build()
    rows.kernel.requires_grad_(False)[:] = 0.0  # the convolution joins rows on purpose
    with torch.no_grad():
        rows.kernel.copy_(_zero_hash(rows.kernel.dtype))

    def grads_of(part):
        inputs, targets = batch.inputs[part], batch.targets[part]
        logits = rows(inputs, tokens=targets[:, 0])
        (grad,) = torch.autograd.grad((logits.float() * targets[:, 1:]).sum(), [rows.up.weight])
        return grad

    whole = grads_of(slice(None))
    assert whole.any()
    assert torch.equal(whole, grads_of(slice(0, 1)) + grads_of(slice(1, None)))


def _zero_hash(dtype):
    """Return values that hash to 0 at each of the kernel's positions, (8, 1, 3)."""
    values = (torch.arange(-64, 65) / 32).to(dtype)
    kernel = torch.empty(24, dtype=dtype)
    for place in range(24):
        tries = torch.stack([kernel.clone().index_fill_(0, torch.tensor(place), v) for v in values])
        hashes = torch.stack([hash_bits(row, salt=0)[place] for row in tries])
        kernel[place] = values[(hashes % 3 == 1).nonzero()[0]].item()
    return kernel.view(8, 1, 3)


def test_hashes_take_all_three_values_and_pass_gradients_through():
    weight = torch.randn(3000, generator=torch.Generator().manual_seed(0)).requires_grad_()
    hashed = HashedTernary.apply(weight)
    counts = [int((hashed == value).sum()) for value in (-1, 0, 1)]
    assert sum(counts) == 3000
    assert all(900 < count < 1100 for count in counts)
    (hashed * torch.arange(3000.0)).sum().backward()
    assert torch.equal(weight.grad, torch.arange(3000.0))
