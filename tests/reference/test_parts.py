"""Parts of one model in the oracle: common norm, clipping and skips."""

import pytest
import torch
from torch import nn

from zero_sim.reference import Reference, step_together
from zero_sim.reference.gradient import measure, measure_together
from zero_sim.scenario.spec import LossScaleSpec, ModelSpec, OptimizerSpec, Scenario, SystemSpec
from zero_sim.workloads import Batch


class Two(nn.Module):
    """`own` and `shared`, both with the input as their gradient."""

    def __init__(self):
        super().__init__()
        self.own = nn.Parameter(torch.zeros(1))
        self.shared = nn.Parameter(torch.zeros(1))

    def forward(self, factor):
        return ((self.own + self.shared) * factor).sum()


class Constant:
    """Workload with the same gradient on each rank at every step."""

    def __init__(self, grad):
        self.grad = grad

    def build(self):
        return Two()

    def batch(self, *, step, rank, micro):
        return Batch(inputs=torch.tensor([self.grad]), targets=None)

    def loss(self, module, batch):
        return module(batch.inputs)

    def accuracy(self, module):
        return None


def parts(*grads, **optim):
    """Return a part of two ranks per gradient; `shared` counts only in the first."""
    case = Scenario(
        schema=1,
        model=ModelSpec(name="mlp"),
        system=SystemSpec(divide="post"),
        optimizer=OptimizerSpec(**{"name": "sgd", "lr": 1.0, **optim}),
    )
    return [
        Reference(case, workload=Constant(grad), uncounted=("shared",) if index else ())
        for index, grad in enumerate(grads)
    ]


def test_norm_is_over_all_parts():
    """3, 3 and 4; the copy in the second part is excluded."""
    first, second = step_together(parts(3.0, 4.0), [None, None])
    assert first.norm.item() == second.norm.item() == pytest.approx(34**0.5)
    assert {name: master.item() for name, master in second.masters.items()} == {
        "own": -4.0,
        "shared": -4.0,
    }


def test_all_parts_are_clipped_by_the_common_norm():
    _, second = step_together(parts(3.0, 4.0, clip_norm=34**0.5 / 2), [None, None])
    assert [master.item() for master in second.masters.values()] == pytest.approx([-2.0, -2.0])


def test_zeros_are_counted_over_all_parts():
    assert [taken.measured.zeros for taken in step_together(parts(0.0, 0.0), [None] * 2)] == [3, 3]


@pytest.mark.parametrize("bad", [0, 1])
def test_overflow_in_one_part_skips_in_all(bad):
    grads = [1.0, 1.0]
    grads[bad] = torch.inf
    references = parts(*grads, loss_scale=LossScaleSpec(initial=8.0))
    assert [taken.skipped for taken in step_together(references, [None] * 2)] == [True, True]
    assert [taken.loss_scale for taken in step_together(references, [None] * 2)] == [4.0, 4.0]


def test_overflow_of_uncounted_params_skips():
    (alone,) = parts(torch.inf, loss_scale=LossScaleSpec(initial=8.0))
    alone._uncounted = ("own", "shared")
    taken = alone.step()
    assert taken.skipped
    assert taken.norm.item() == 0


def test_single_part_is_a_plain_step():
    (one,), (other,) = parts(3.0), parts(3.0)
    (together,), alone = step_together([one], [None]), other.step()
    assert torch.equal(together.norm, alone.norm)
    assert torch.equal(together.masters["own"], alone.masters["own"])


def test_certificate_is_over_all_terms():
    """Each part is far from a tie; their sum is near one."""
    # Norms in fp32 are 2**-23 apart above 1, so the middle of 1 and its successor is 1 + 2**-24.
    square = (1 + 2.0**-24) ** 2
    first = measure(torch.tensor([0.5], dtype=torch.float32))
    rest = torch.tensor(square - 0.25, dtype=torch.float64).sqrt()
    from dataclasses import replace

    second = replace(measure(rest.to(torch.float32).reshape(1)), squares=square - 0.25)
    assert first.norm_certified
    assert not measure_together([first, second]).norm_certified
