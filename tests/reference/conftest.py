"""Scenarios for the tests of the oracle, and a workload with injected gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zero_sim.scenario.spec import (
    DataSpec,
    ModelSpec,
    OptimizerSpec,
    RunSpec,
    Scenario,
    SystemSpec,
    WorldSpec,
)
from zero_sim.workloads import Batch


class OneParam(nn.Module):
    """A param `w` that starts at 1, and `unused`, which no loss reaches."""

    def __init__(self, elems, dtype):
        super().__init__()
        self.w = nn.Parameter(torch.ones(elems, dtype=dtype))
        self.unused = nn.Parameter(torch.ones(2, dtype=dtype))

    def forward(self, inputs):
        """Return a loss whose gradient is `inputs`."""
        return (self.w * inputs).sum()


class InjectedWorkload:
    """Workload in which the gradient of `w` is `grads[rank][micro]` at every step."""

    def __init__(self, grads, dtype=torch.float32):
        self.grads = [[torch.tensor(micro, dtype=dtype) for micro in rank] for rank in grads]
        self.dtype = dtype

    def build(self):
        return OneParam(self.grads[0][0].numel(), self.dtype)

    def batch(self, *, step, rank, micro):
        """Return the injected gradient as the input."""
        return Batch(inputs=self.grads[rank][micro].clone(), targets=None)

    def loss(self, module, batch):
        return module(batch.inputs)

    def accuracy(self, module):
        """Return None."""
        return


@pytest.fixture
def inject():
    return InjectedWorkload


@pytest.fixture
def make_scenario():
    """Return a function that makes a scenario from the settings used here."""

    def make(name="mlp", *, size=2, order="linear", micros=1, data=None, optim=None, system=None,
             seed=0, **model):  # fmt: skip
        return Scenario(
            schema=1,
            model=ModelSpec(name=name, **model),
            data=data or DataSpec(),
            world=WorldSpec(size=size, order=order),
            run=RunSpec(micro_batches=micros, seed=seed),
            optimizer=optim or OptimizerSpec(name="sgd", lr=1.0),
            system=system or SystemSpec(divide="none"),
        )

    return make
