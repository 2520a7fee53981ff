"""Small replicated params beside large params with one owner each."""

from dataclasses import replace
from itertools import islice

import pytest
import torch

from zero_sim.fuzz.drawing import draws
from zero_sim.fuzz.strategies import drawn_cases
from zero_sim.rules.judging import run_case
from zero_sim.scenario.spec import ModelSpec, RunSpec, Scenario, SystemSpec, WorldSpec
from zero_sim.targets import (
    Capabilities,
    Numerics,
    WholeParamEngine,
    plain_optimizer,
)

CASE = Scenario(
    schema=1,
    model=ModelSpec(name="params", shapes=((2,), (4, 3), (5, 2))),
    world=WorldSpec(size=3),
    system=SystemSpec(stage=1),
    run=RunSpec(steps=3),
)
UNKNOWN = replace(CASE, world=replace(CASE.world, order="ring", order_known=False))


class Mixed:
    """Params without rows are replicated; all others have one owner."""

    name = "mixed"
    capabilities = Capabilities(stages=(1,))
    numerics = Numerics(reported_grads="after-division")

    def build(self, module, *, scenario, group):
        named = dict(module.named_parameters())
        large = [name for name, param in named.items() if param.dim() > 1]
        owners = {name: index % group.size() for index, name in enumerate(large)}
        optimizer = plain_optimizer(scenario.optimizer, named)
        return self.engine(module, optimizer, group=group, owner_of=owners.get)

    def engine(self, *args, **named):
        return WholeParamEngine(*args, **named)


class Forgetful(Mixed):
    """Rank 1 corrupts state of replicated params, which no working param shows."""

    class Engine(WholeParamEngine):
        def step(self, *, lr_factor):
            super().step(lr_factor=lr_factor)
            if self.group.rank() == 1:
                for name, param in self.named.items():
                    if self.owner_of(name) is None and param.numel():
                        self.state_of(param)["exp_avg_sq"].reshape(-1)[0] *= 2

    def engine(self, *args, **named):
        return self.Engine(*args, **named)


class Silent(Mixed):
    """Only rank 0 reports replicated parts."""

    class Engine(WholeParamEngine):
        def parts(self):
            for part in super().parts():
                if part.place.replicas == 1 or self.group.rank() == 0:
                    yield part

    def engine(self, *args, **named):
        return self.Engine(*args, **named)


def test_right_replicas_pass_in_all_cases():
    cases = list(islice(draws(drawn_cases(Mixed(), ranks_max=4), seed="1"), 25))
    assert {run_case(case, target=Mixed()).verdict for case in cases} == {"pass"}


@pytest.mark.parametrize("case", [CASE, UNKNOWN])
def test_replicated_state_is_compared_on_every_rank(case):
    assert run_case(case, target=Mixed()).verdict == "pass"
    found = run_case(case, target=Forgetful()).findings
    assert {(each.check, each.rank, each.param) for each in found} == {("equality.state", 1, "p0")}


def test_unreported_replica_is_found():
    (found,) = run_case(CASE, target=Silent()).findings
    assert found.check == "invariant.ownership"
    assert "elements [0, 2) belong to rank 0 alone, with replicas = 3" in found.message


def test_replicas_are_compared_with_each_other_in_unknown_order():
    class Drifting(Mixed):
        class Engine(WholeParamEngine):
            def reduce(self):
                super().reduce()
                if self.group.rank() == 2:  # Within all bounds, yet different.
                    for param in self.named.values():
                        param.grad = torch.nextafter(param.grad, torch.zeros(()))

        def engine(self, *args, **named):
            return self.Engine(*args, **named)

    found = run_case(UNKNOWN, target=Drifting()).findings
    assert ("p0", 2) in {(each.param, each.rank) for each in found}
