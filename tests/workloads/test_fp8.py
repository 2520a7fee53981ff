"""Weights in fp8: formats, scales and gradients."""

from __future__ import annotations

import pytest
import torch

from zero_sim.workloads import build_workload

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def weights_of(module):
    return {name: param for name, param in module.named_parameters() if name.endswith("weight")}


@pytest.mark.parametrize(
    ("fp8_format", "up", "down"),
    [("e4m3", E4M3, E4M3), ("e5m2", E5M2, E5M2), ("mixed", E4M3, E5M2)],
)
def test_formats(make_scenario, fp8_format, up, down):
    """Formats of the matrices into and out of the inner layers."""
    module = build_workload(make_scenario("fp8", fp8_format=fp8_format, blocks=2)).build()
    dtypes = {name: param.dtype for name, param in weights_of(module).items()}
    assert dtypes == {f"{i}.{part}.weight": dtype for i in (0, 1)
                      for part, dtype in (("up", up), ("down", down))}  # fmt: skip


def test_biases_are_in_the_working_dtype(make_scenario):
    module = build_workload(make_scenario("fp8", dtype="bf16")).build()
    assert {param.dtype for name, param in module.named_parameters() if "bias" in name} == {
        torch.bfloat16
    }


def test_weights_fill_their_format(make_scenario):
    """The initial scale is not a power of two, and the greatest value is the format's maximum."""
    module = build_workload(make_scenario("fp8")).build()
    for name, weight in weights_of(module).items():
        scale = module.get_buffer(f"{name}_scale")
        assert weight.float().abs().max() == torch.finfo(weight.dtype).max
        assert torch.frexp(scale).mantissa != 0.5


@pytest.mark.parametrize(
    ("dtype", "torch_dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)]
)
def test_gradient_equals_that_of_the_product(make_scenario, dtype, torch_dtype):
    """The reference is a module with the products as weights, in the working dtype."""
    workload = build_workload(make_scenario("fp8", dtype=dtype))
    module = workload.build()
    batch = workload.batch(step=0, rank=0, micro=0)
    workload.loss(module, batch).backward()
    plain = build_workload(make_scenario("mlp", dtype=dtype)).build()
    with torch.no_grad():
        for name, param in plain.named_parameters():
            source = module.get_parameter(name).float()
            scale = dict(module.named_buffers()).get(f"{name}_scale", torch.ones(()))
            param.copy_(source * scale)
    workload.loss(plain, batch).backward()
    for name, param in module.named_parameters():
        assert param.grad.dtype == torch_dtype
        assert torch.equal(param.grad, plain.get_parameter(name).grad)
        assert param.grad.any()


def test_scale_affects_the_loss(make_scenario):
    workload = build_workload(make_scenario("fp8"))
    module, batch = workload.build(), workload.batch(step=0, rank=0, micro=0)
    before = workload.loss(module, batch).item()
    module[0].up.weight_scale.mul_(2)
    assert workload.loss(module, batch).item() != before
