"""Bare params."""

from __future__ import annotations

import torch

from zero_sim.workloads import build_workload


def test_gradient_is_c_times_p_plus_d(make_scenario):
    """The factors of the batch give the gradient in closed form."""
    workload = build_workload(make_scenario("params", shapes=((2, 2), (), (3,))))
    module, batch = workload.build(), workload.batch(step=0, rank=0, micro=0)
    workload.loss(module, batch).backward()
    p = torch.cat([param.detach().reshape(-1) for param in module.parameters()])
    grad = torch.cat([param.grad.reshape(-1) for param in module.parameters()])
    c, d = batch.inputs
    torch.testing.assert_close(grad, c * p + d)


def test_shapes_are_kept(make_scenario):
    """Scalars, empty params and order come out as asked for."""
    shapes = ((), (0,), (2, 0, 3), (1, 4))
    module = build_workload(make_scenario("params", shapes=shapes)).build()
    assert [tuple(param.shape) for param in module.parameters()] == list(shapes)
    assert [name for name, _ in module.named_parameters()] == ["p0", "p1", "p2", "p3"]


def test_empty_params_get_an_empty_gradient(make_scenario):
    """One element among empty params is enough to train."""
    workload = build_workload(make_scenario("params", shapes=((0,), (), (0, 3))))
    module = workload.build()
    workload.loss(module, workload.batch(step=0, rank=0, micro=0)).backward()
    assert [tuple(param.grad.shape) for param in module.parameters()] == [(0,), (), (0, 3)]


def test_no_params_at_all_can_be_built(make_scenario):
    """The module is empty and its loss constant: whoever trains it has to say so."""
    workload = build_workload(make_scenario("params", shapes=()))
    module = workload.build()
    loss = workload.loss(module, workload.batch(step=0, rank=0, micro=0))
    assert not list(module.parameters())
    assert not loss.requires_grad
