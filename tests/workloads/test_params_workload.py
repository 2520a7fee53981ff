"""Bare params."""

from __future__ import annotations

import pytest
import torch

from zero_sim.scenario.spec import OneRankSpec, RunSpec
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


@pytest.mark.parametrize("name", ["params", "bit-hash"])
def test_params_may_be_replaced_by_plain_tensors(make_scenario, name):
    """Wrappers that shard a module replace its params by views of a gathered buffer."""
    workload = build_workload(make_scenario(name, shapes=SHAPES))
    module, batch = workload.build(), workload.batch(step=0, rank=0, micro=0)
    expected = workload.loss(module, batch)
    for key, param in list(module.named_parameters()):
        delattr(module, key)
        setattr(module, key, param.detach().clone())
    assert torch.equal(workload.loss(module, batch), expected)


def test_shapes_are_kept(make_scenario):
    shapes = ((), (0,), (2, 0, 3), (1, 4))
    module = build_workload(make_scenario("params", shapes=shapes)).build()
    assert [tuple(param.shape) for param in module.parameters()] == list(shapes)
    assert [name for name, _ in module.named_parameters()] == ["p0", "p1", "p2", "p3"]


def test_empty_params_get_an_empty_gradient(make_scenario):
    """A single element among empty params is enough to train."""
    workload = build_workload(make_scenario("params", shapes=((0,), (), (0, 3))))
    module = workload.build()
    workload.loss(module, workload.batch(step=0, rank=0, micro=0)).backward()
    assert [tuple(param.grad.shape) for param in module.parameters()] == [(0,), (), (0, 3)]


def test_module_without_params_can_be_built(make_scenario):
    """The module is empty and its loss constant; the trainer has to refuse it."""
    workload = build_workload(make_scenario("params", shapes=()))
    module = workload.build()
    loss = workload.loss(module, workload.batch(step=0, rank=0, micro=0))
    assert not list(module.parameters())
    assert not loss.requires_grad


SHAPES = ((2,), (3,), ())


def grads_of(workload, **at):
    """Return gradients of a micro-batch by name; None for params that its loss does not use."""
    module = workload.build()
    workload.loss(module, workload.batch(**{"step": 0, "rank": 0, "micro": 0, **at})).backward()
    return {name: param.grad for name, param in module.named_parameters()}


class TestTied:
    """Params with two names."""

    def test_both_names_are_one_param(self, make_scenario):
        """A param is listed once, with two names."""
        module = build_workload(make_scenario("params", shapes=SHAPES, tied=("p2", "p0"))).build()
        every = dict(module.named_parameters(remove_duplicate=False))
        assert [name for name, _ in module.named_parameters()] == ["p0", "p1", "p2"]
        assert list(every) == ["p0", "p1", "p2", "again.p2", "again.p0"]
        assert every["again.p0"] is every["p0"]
        assert every["again.p2"] is every["p2"]

    def test_gradient_is_the_sum_over_both_uses(self, make_scenario):
        """Each use has its own factors; those of second names come last."""
        workload = build_workload(make_scenario("params", shapes=SHAPES, tied=("p2", "p0")))
        p, batch = workload.build(), workload.batch(step=0, rank=0, micro=0)
        c, d = (factors.split([2, 3, 1, 1, 2]) for factors in batch.inputs)
        first, last = p.p0.detach(), p.p2.detach().reshape(1)
        grads = grads_of(workload)
        torch.testing.assert_close(grads["p0"], (c[0] + c[4]) * first + d[0] + d[4])
        torch.testing.assert_close(grads["p2"].reshape(1), (c[2] + c[3]) * last + d[2] + d[3])

    def test_other_params_are_not_affected(self, make_scenario):
        """Initial values are drawn before any param is tied."""
        plain = build_workload(make_scenario("params", shapes=SHAPES)).build()
        tied = build_workload(make_scenario("params", shapes=SHAPES, tied=("p1",))).build()
        for one, other in zip(plain.parameters(), tied.parameters(), strict=True):
            assert torch.equal(one, other)


class TestReaders:
    """Params by the losses that use them."""

    def test_unused_param_has_no_gradient(self, make_scenario):
        """The gradient is None on every rank, not zeros."""
        workload = build_workload(make_scenario("params", shapes=SHAPES, unused=("p1",)))
        for rank in (0, 1):
            grads = grads_of(workload, rank=rank)
            assert {name for name, grad in grads.items() if grad is None} == {"p1"}

    def test_one_rank_param_is_used_only_on_its_rank(self, make_scenario):
        """The rank uses it in each micro-batch, or only in the given one."""
        ones = (OneRankSpec(param="p1", rank=1), OneRankSpec(param="p2", rank=1, micro_batch=0))
        workload = build_workload(
            make_scenario("params", shapes=SHAPES, one_rank=ones, run=RunSpec(micro_batches=2))
        )
        read = {
            (rank, micro): {
                name
                for name, grad in grads_of(workload, rank=rank, micro=micro).items()
                if grad is not None
            }
            for rank in (0, 1)
            for micro in (0, 1)
        }
        assert read == {
            (0, 0): {"p0"},
            (0, 1): {"p0"},
            (1, 0): {"p0", "p1", "p2"},
            (1, 1): {"p0", "p1"},
        }

    def test_unused_param_does_not_affect_the_factors_of_others(self, make_scenario):
        """A case thus differs from its plain form only in the named params."""
        plain = grads_of(build_workload(make_scenario("params", shapes=SHAPES)))
        grads = grads_of(build_workload(make_scenario("params", shapes=SHAPES, unused=("p1",))))
        assert torch.equal(plain["p0"], grads["p0"])
        assert torch.equal(plain["p2"], grads["p2"])
