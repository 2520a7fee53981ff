"""Helpers for targets that read a scenario's optimizer."""

import pytest
import torch

from zero_sim.errors import ProtocolError
from zero_sim.scenario.spec import ModelSpec, OptimizerSpec, Scenario
from zero_sim.targets import (
    LearningRates,
    class_of,
    flat_state,
    group_index,
    param_groups,
    plain_optimizer,
    settings_of,
)

SCENARIO = Scenario(schema=1, model=ModelSpec(name="mlp"), optimizer=OptimizerSpec(lr=0.5))


@pytest.mark.parametrize(
    ("helper", "arguments"),
    [
        (class_of, ()),
        (settings_of, ()),
        (group_index, ("a",)),
        (param_groups, ({},)),
        (plain_optimizer, ({},)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_scenario_instead_of_its_optimizer_is_refused(helper, arguments):
    with pytest.raises(ProtocolError, match=r"got a Scenario\. Pass scenario\.optimizer\."):
        helper(SCENARIO, *arguments)


def test_learning_rates_without_an_optimizer_are_refused():
    with pytest.raises(ProtocolError, match="expected an optimizer with param_groups"):
        LearningRates(SCENARIO)


def test_optimizer_state_is_flattened():
    param = torch.nn.Parameter(torch.ones(2, 3))
    optimizer = plain_optimizer(SCENARIO.optimizer, {"w": param})
    param.grad = torch.ones(2, 3)
    optimizer.step()
    shapes = {key: each.shape for key, each in flat_state(optimizer.state[param]).items()}
    assert shapes == {"step": (), "exp_avg": (6,), "exp_avg_sq": (6,)}
