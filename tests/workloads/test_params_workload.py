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
def test_params_may_be_plain_tensors_by_now(make_scenario, name):
    """Wrappers that shard a module put views of a gathered buffer in the place of its params."""
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


SHAPES = ((2,), (3,), ())


def grads_of(workload, **at):
    """Gradients of one micro-batch by the params' names; None of what its loss does not read."""
    module = workload.build()
    workload.loss(module, workload.batch(**{"step": 0, "rank": 0, "micro": 0, **at})).backward()
    return {name: param.grad for name, param in module.named_parameters()}


class TestTied:
    """Two places of one param."""

    def test_both_names_are_one_param(self, make_scenario):
        """It comes once among the params, and twice among their names."""
        module = build_workload(make_scenario("params", shapes=SHAPES, tied=("p2", "p0"))).build()
        every = dict(module.named_parameters(remove_duplicate=False))
        assert [name for name, _ in module.named_parameters()] == ["p0", "p1", "p2"]
        assert list(every) == ["p0", "p1", "p2", "again.p2", "again.p0"]
        assert every["again.p0"] is every["p0"]
        assert every["again.p2"] is every["p2"]

    def test_gradient_is_the_sum_over_both_places(self, make_scenario):
        """Each place has factors of its own, those of second names behind all others."""
        workload = build_workload(make_scenario("params", shapes=SHAPES, tied=("p2", "p0")))
        p, batch = workload.build(), workload.batch(step=0, rank=0, micro=0)
        c, d = (factors.split([2, 3, 1, 1, 2]) for factors in batch.inputs)
        first, last = p.p0.detach(), p.p2.detach().reshape(1)
        grads = grads_of(workload)
        torch.testing.assert_close(grads["p0"], (c[0] + c[4]) * first + d[0] + d[4])
        torch.testing.assert_close(grads["p2"].reshape(1), (c[2] + c[3]) * last + d[2] + d[3])

    def test_what_is_not_tied_has_the_bits_that_it_has_without(self, make_scenario):
        """Initial ones: they are drawn before anything is tied."""
        plain = build_workload(make_scenario("params", shapes=SHAPES)).build()
        tied = build_workload(make_scenario("params", shapes=SHAPES, tied=("p1",))).build()
        for one, other in zip(plain.parameters(), tied.parameters(), strict=True):
            assert torch.equal(one, other)


class TestReaders:
    """Which loss reads which param."""

    def test_unused_param_has_no_gradient(self, make_scenario):
        """On no rank, and zeros are none."""
        workload = build_workload(make_scenario("params", shapes=SHAPES, unused=("p1",)))
        for rank in (0, 1):
            grads = grads_of(workload, rank=rank)
            assert {name for name, grad in grads.items() if grad is None} == {"p1"}

    def test_one_rank_alone_reads_its_param(self, make_scenario):
        """In each of its micro-batches, or in the one that is named."""
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

    def test_others_have_the_factors_that_they_have_without(self, make_scenario):
        """So that a case differs from its plain one in what is said of it alone."""
        plain = grads_of(build_workload(make_scenario("params", shapes=SHAPES)))
        grads = grads_of(build_workload(make_scenario("params", shapes=SHAPES, unused=("p1",))))
        assert torch.equal(plain["p0"], grads["p0"])
        assert torch.equal(plain["p2"], grads["p2"])
